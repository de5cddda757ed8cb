"""VS Code's widgets in a browser: the widget manager of its Jupyter extension, over a kernel of a test's own.

VS Code itself is not needed: the extension's renderer is a page, and its widget manager is a package of npm.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.async_api import Browser, Page, Route

__all__ = ["NPM", "bundled", "opened", "run"]

NPM = shutil.which("npm")
_MANAGER = "@vscode/jupyter-ipywidgets8@1.0.9"
_BUILT_WITH = ("@jupyterlab/services@7.6.6", "esbuild@0.28.2", "requirejs@2.3.8")
_SCRIPTS = {"ipywidgets.js": "package/dist/ipywidgets.js", "require.js": "node_modules/requirejs/require.js"}
_NBEXTENSIONS = Path(sys.prefix, "share", "jupyter", "nbextensions")
_PAGE = """<!doctype html>
<title>VS Code's widgets</title>
<body data-vscode-theme-kind="vscode-dark" class="vscode-dark" style="background: #1f1f1f; color: #ccc">
<script src="/vscode/require.js"></script>
<script type="module" src="/vscode/page.js"></script>
"""


def _done(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"


def bundled(folder: Path) -> Path:
    """A folder with the scripts of the page. npm fetches what they are made of."""
    assert NPM is not None
    # The manager's package holds a bundle, and names as dependencies what is in it.
    _done(folder, NPM, "pack", "--silent", _MANAGER)
    (packed,) = folder.glob("*.tgz")
    shutil.unpack_archive(packed, folder)
    (folder / "package.json").write_text('{"private": true}')
    _done(folder, NPM, "install", "--silent", "--ignore-scripts", *_BUILT_WITH)
    shutil.copy(Path(__file__).with_name("page.js"), folder / "source.js")
    _done(
        folder,
        "node_modules/.bin/esbuild",
        "source.js",
        "--bundle",
        "--format=esm",
        "--external:/vscode/*",
        "--outfile=page.js",
    )
    for name, found in _SCRIPTS.items():
        shutil.copy(folder / found, folder / name)
    return folder


async def opened(browser: Browser, server: str, scripts: Path) -> Page:
    """A page like a VS Code notebook's, on the address of a Jupyter server, with a kernel that is ready."""

    async def answer(route: Route) -> None:
        name = route.request.url.partition("/vscode/")[2]
        if not name:
            await route.fulfill(body=_PAGE, content_type="text/html")
        elif name.startswith("nbextensions/"):
            await route.fulfill(path=_NBEXTENSIONS / name.partition("/")[2])
        else:
            await route.fulfill(path=scripts / name)

    # The page seems to come from elsewhere, since its document is none of the server's.
    page = await browser.new_page(viewport={"width": 1000, "height": 1000}, permissions=["local-network-access"])
    await page.route("**/vscode/**", answer)
    await page.goto(f"{server}/vscode/")
    await page.evaluate("vscode.ready")
    return page


async def run(page: Page, cells: Sequence[str]) -> None:
    """Run cells one after another."""
    for cell in cells:
        await page.evaluate("(code) => vscode.run(code)", cell)
