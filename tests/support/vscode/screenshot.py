"""A screenshot of a notebook in VS Code, before a scripted engine.

    python -m tests.support.vscode.screenshot [--to docs/screenshots]

`tests.support.vscode.editor` says what it needs. It starts a Redis, an engine that plays the demo model, a JupyterLab
and a code-server of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from playwright.async_api import Browser, expect

import tracewire
from tests.support.browser import browser
from tests.support.jupyter import running_lab
from tests.support.notebook_screenshots import cells
from tests.support.page_engine import HIDDEN, LAYERS
from tests.support.screenshot_command import write
from tests.support.scripted_engine import info, serving
from tests.support.shown_engine import ShownEngine
from tests.support.vscode.editor import MISSING, SCRIPTS, running_editor
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer


async def shoot(chromium: Browser, folder: Path, url: str, to: Path) -> None:
    """Steer by the slider, and take the picture while the trace is paused."""
    (lab_folder := folder / "lab").mkdir()
    async with running_editor(folder) as editor, running_lab(lab_folder, [SCRIPTS]) as lab:
        page = await editor.opened(chromium, lab.url, *cells(url))
        view = await editor.run_all(page)
        await expect(view.locator(".block .t").nth(40)).to_be_attached()
        for _ in range(45):
            await view.get_by_role("slider", name="alpha").press("ArrowRight")
        await expect(view.locator(".block .t").nth(120)).to_be_attached()
        await view.get_by_role("button", name="Pause").click()
        await expect(view.locator(".badge")).to_have_text("paused")
        # The view stands below the cells.
        await page.mouse.move(800, 300)
        for _ in range(14):
            await page.mouse.wheel(0, 100)
            await page.wait_for_timeout(100)
        await page.mouse.move(0, 0)
        await page.wait_for_timeout(500)
        await page.screenshot(path=to / "vscode-live.png")
        await view.get_by_role("button", name="Cancel").click()
        await expect(view.locator(".badge")).to_have_text("cancelled")
        await page.close()


async def run(to: Path) -> None:
    """The screenshot."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedServer.start() as server, browser() as chromium, Bus.open(server.url) as bus:
            model = info("demo", engine="gpu-1", hidden_size=HIDDEN, layer_count=LAYERS)
            async with (
                serving(bus, ShownEngine(partial(anyio.sleep, 0.05)), model),
                tracewire.connect(server.url) as client,
            ):
                await client.models.get("demo", timeout=60)
                await shoot(chromium, Path(folder), server.url, to)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write it."""
    return write(run, __doc__, arguments, MISSING)


if __name__ == "__main__":
    sys.exit(main())
