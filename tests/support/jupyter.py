"""A JupyterLab of a test's own, and notebooks in its folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import nbformat

from tests.support import ROOT
from tests.support.until import until

__all__ = ["Lab", "notebook", "running_lab"]


def notebook(*cells: str) -> nbformat.NotebookNode:
    """A notebook of code cells that were not run."""
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = spec
    return made


class Lab:
    """A server of JupyterLab."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def add(self, name: str, *cells: str) -> str:
        """Write a notebook, and return the address at which JupyterLab opens it alone."""
        nbformat.write(notebook(*cells), self._folder / name)
        return f"{self.url}/doc/tree/{name}"

    def text(self, name: str) -> str:
        """The text of a notebook's file."""
        return (self._folder / name).read_text()

    async def end_kernels(self) -> None:
        """End all kernels, as the end of a session does."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            for session in (await http.get("/api/sessions")).json():
                (await http.delete(f"/api/sessions/{session['id']}")).raise_for_status()


def _command(port: int, folder: Path, services: Sequence[str]) -> list[str]:
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "ServerApp.jpserver_extensions": '{"jupyterlab": True, "jupyter_lsp": False}',
        "ServerApp.disable_check_xsrf": True,
        "ServerApp.extra_services": json.dumps(services),
        "IdentityProvider.token": "",
    }
    return [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def kernel_environment() -> dict[str, str]:
    """The environment of a kernel that imports what this process imports, the tests' own modules included."""
    path = os.pathsep.join([str(ROOT), *(one for one in sys.path if one)])
    return {**os.environ, "PYTHONPATH": path}


@asynccontextmanager
async def running_lab(folder: Path, services: Sequence[str] = ()) -> AsyncIterator[Lab]:
    """A JupyterLab whose kernels import what this process imports. It has no settings but its own.

    `services` are modules with more handlers.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    home = folder / ".jupyter"
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    # No question whether to fetch news.
    settings = home / "jupyter_config_dir/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    folders = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")}
    environment = {**kernel_environment(), **folders, "JUPYTER_RUNTIME_DIR": str(home / "run")}
    with (folder / "lab.log").open("wb") as log:
        given = {"cwd": notebooks, "env": environment, "stdout": log, "stderr": log, "start_new_session": True}
        started = await anyio.open_process(_command(port, notebooks, services), stdin=None, **given)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as http:

            async def serves() -> bool:
                if started.returncode is not None:
                    raise RuntimeError((folder / "lab.log").read_text())
                try:
                    return (await http.get(f"{url}/api/status")).is_success
                except httpx.TransportError:
                    return False

            await until(serves)
        lab = Lab(url, notebooks)
        yield lab
        await lab.end_kernels()
    finally:
        started.terminate()
        await started.wait()
        shutil.rmtree(home, ignore_errors=True)
