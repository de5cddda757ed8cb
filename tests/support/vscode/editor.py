"""VS Code itself in a browser: a code-server of a test's own, with VS Code's Jupyter extension.

`CODE_SERVER` is the command (default: code-server), and `CODE_SERVER_EXTENSIONS` the folder of its extensions (default:
the one into which `code-server --install-extension ms-toolsai.jupyter` puts them). The extension is in no registry of
packages, so that only a machine with both runs what needs them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import nbformat
from playwright.async_api import Browser, FrameLocator, Page, expect

from tests.support.jupyter import notebook
from tests.support.until import until

__all__ = ["MISSING", "SCRIPTS", "Editor", "running_editor"]

#: What serves the scripts of widgets beside JupyterLab.
SCRIPTS = "tests.support.vscode.nbextensions"
_COMMAND = shutil.which(os.environ.get("CODE_SERVER", "code-server"))
_DATA = Path.home() / ".local" / "share" / "code-server"
_EXTENSIONS = Path(os.environ.get("CODE_SERVER_EXTENSIONS", _DATA / "extensions"))
_NEEDED = ("ms-toolsai.jupyter", "ms-toolsai.jupyter-renderers")
_SETTINGS = {
    "chat.disableAIFeatures": True,
    "extensions.autoCheckUpdates": False,
    "security.workspace.trust.enabled": False,
    "telemetry.telemetryLevel": "off",
    "workbench.editorAssociations": {"*.ipynb": "jupyter-notebook"},
    "workbench.secondarySideBar.defaultVisibility": "hidden",
    "workbench.startupEditor": "none",
}


def _missing() -> str:
    if _COMMAND is None:
        return "code-server is not installed (CODE_SERVER)"
    lacks = [name for name in _NEEDED if not any(_EXTENSIONS.glob(f"{name}-[0-9]*"))]
    return f"code-server has no extension {lacks[0]} (CODE_SERVER_EXTENSIONS)" if lacks else ""


#: What this machine lacks; `""` if nothing.
MISSING = _missing()


class Editor:
    """A code-server, with a folder of notebooks."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder

    async def opened(self, browser: Browser, jupyter: str, *cells: str) -> Page:
        """A page of VS Code with a notebook of these cells, whose kernel is one of a Jupyter server."""
        (self._folder / "trace.ipynb").write_text(nbformat.writes(notebook(*cells)))
        page = await browser.new_page(
            viewport={"width": 1280, "height": 1180}, permissions=["clipboard-read", "clipboard-write"]
        )
        await page.goto(f"{self._url}/?folder={self._folder}")
        await page.get_by_role("treeitem", name="trace.ipynb").dblclick()
        await page.get_by_text("Select Kernel", exact=True).first.click()
        asked = page.locator(".quick-input-widget")
        await asked.get_by_text("Existing Jupyter Server...").click()
        await expect(asked).to_contain_text("Press 'Enter' to confirm")
        await page.keyboard.type(f"{jupyter}/")
        await page.keyboard.press("Enter")
        # It has no token.
        await asked.get_by_text("Yes", exact=True).click()
        await expect(asked).to_contain_text("Change Server Display Name")
        await page.keyboard.press("Enter")
        await asked.get_by_text("Python 3 (ipykernel)").click()
        await expect(page.get_by_text("Python 3 (ipykernel)").first).to_be_visible()
        return page

    def text(self) -> str:
        """The text of the notebook's file."""
        return (self._folder / "trace.ipynb").read_text()

    @staticmethod
    async def run_all(page: Page) -> FrameLocator:
        """Run all cells. Returns the outputs' document."""
        await page.get_by_role("button", name="Run All", exact=True).click()
        return page.frame_locator("iframe.webview").frame_locator("iframe#active-frame")


@asynccontextmanager
async def running_editor(folder: Path) -> AsyncIterator[Editor]:
    """A code-server with settings of its own."""
    assert _COMMAND is not None
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    data, notebooks = folder / "data", folder / "notebooks"
    notebooks.mkdir()
    (data / "User").mkdir(parents=True)
    (data / "User" / "settings.json").write_text(json.dumps(_SETTINGS))
    options = {
        "auth": "none",
        "bind-addr": f"127.0.0.1:{port}",
        "config": str(folder / "config.yaml"),
        "user-data-dir": str(data),
        "extensions-dir": str(_EXTENSIONS),
    }
    command = [_COMMAND, *(word for name, value in options.items() for word in (f"--{name}", value))]
    command += ["--disable-telemetry", "--disable-update-check"]
    command += [word for name in _NEEDED for word in ("--enable-proposed-api", name)]
    with (folder / "editor.log").open("wb") as log:
        started = await anyio.open_process(command, stdin=None, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as http:

            async def serves() -> bool:
                if started.returncode is not None:
                    raise RuntimeError((folder / "editor.log").read_text())
                try:
                    return (await http.get(f"{url}/healthz")).is_success
                except httpx.TransportError:
                    return False

            await until(serves)
        yield Editor(url, notebooks)
    finally:
        started.terminate()
        await started.wait()
