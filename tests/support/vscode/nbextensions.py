"""The scripts of widgets, as nbclassic serves them: a server of JupyterLab loads this by `ServerApp.extra_services`.

VS Code fetches a widget's script from the server of a kernel that it has not started itself.
"""

from __future__ import annotations

from jupyter_core.paths import jupyter_path
from jupyter_server.base.handlers import FileFindHandler

__all__ = ["default_handlers"]

default_handlers = [(r"/nbextensions/(.*)", FileFindHandler, {"path": jupyter_path("nbextensions")})]
