"""Screenshots of a notebook in JupyterLab, before a scripted engine.

    python -m tests.support.notebook_screenshots [--to docs/screenshots]

Starts a Redis, an engine that plays the demo model, and a JupyterLab of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from playwright.async_api import Browser, Page, expect

import tracewire
from tests.support import ROOT
from tests.support.browser import browser
from tests.support.cells import blocks
from tests.support.jupyter import Lab, running_lab
from tests.support.page_engine import HIDDEN, LAYERS
from tests.support.screenshot_command import write
from tests.support.scripted_engine import info, serving
from tests.support.shown_engine import ShownEngine
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

#: A cell that shows a trace. The scripted engine plays its saves, and a lens.
SHOWN = """\
@tracewire.intervention
def steered(model, tracer, live, direction):
    projection = [].save()
    for step in tracer.iter[:]:
        stream = model.residual(4).output
        model.residual(4).output = stream + live.alpha * direction
        projection.append(float(stream[-1].float() @ direction))

direction = [0.0] * model.info.hidden_size
block = steered(direction=direction)
client.trace(model, "This module", block, live={"alpha": 0.0}, max_tokens=400, token_strings=True)"""
PAGE = ROOT / "docs" / "howto" / "notebook.md"


def cells(url: str) -> list[str]:
    """The page's cell that connects, and one that shows a trace."""
    connect = next(cell for cell in blocks(PAGE, "python") if "connect(" in cell)
    return [connect.replace('"redis://localhost"', f'"{url}", name="ada"').strip(), SHOWN]


async def opened(chromium: Browser, url: str) -> Page:
    """The notebook, whose kernel is ready."""
    page = await chromium.new_page(viewport={"width": 1280, "height": 1180})
    await page.goto(url)
    await expect(page.get_by_text("| Idle")).to_be_visible(timeout=60_000)
    return page


async def run_cells(page: Page, count: int) -> None:
    """Run the first cells."""
    await page.locator(".jp-CodeCell .cm-content").first.click()
    for _ in range(count):
        await page.keyboard.press("Shift+Enter")


async def shoot(page: Page, to: Path, name: str) -> None:
    """The part of the window below JupyterLab's bars."""
    await page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 190")
    await page.mouse.move(0, 0)
    await page.wait_for_timeout(500)
    await page.screenshot(path=to / f"{name}.png", clip={"x": 32, "y": 88, "width": 1216, "height": 1060})


async def watch(page: Page, client: tracewire.Client, to: Path) -> None:
    """Steer by the slider half-way, and take the picture while the trace is paused."""
    badge = page.locator(".badge")
    await expect(badge).to_have_text("running", timeout=60_000)
    slider = page.get_by_role("slider", name="alpha")
    await expect(page.locator(".block .t").nth(40)).to_be_attached(timeout=60_000)
    await slider.focus()
    for _ in range(45):
        await page.keyboard.press("ArrowRight")
    await expect(page.locator(".block .t").nth(120)).to_be_attached(timeout=60_000)
    await page.get_by_role("button", name="Pause").click()
    await expect(badge).to_have_text("paused")
    await shoot(page, to, "notebook-live")
    await page.get_by_role("button", name="Cancel").click()
    await expect(badge).to_have_text("cancelled")
    await expect(page.locator(".tracewire-static")).to_contain_text("cancelled")


async def walk(lab: Lab, chromium: Browser, client: tracewire.Client, to: Path) -> None:
    """The notebook while the trace runs, and opened again."""
    url = lab.add("trace.ipynb", *cells(client.url))
    page = await opened(chromium, url)
    await run_cells(page, 2)
    await watch(page, client, to)
    await page.keyboard.press("Control+s")
    await expect(page.locator(".jp-mod-dirty")).to_have_count(0)
    await page.close()
    await lab.end_kernels()
    page = await opened(chromium, url)
    await expect(page.locator(".tracewire-static")).to_be_visible()
    await shoot(page, to, "notebook-saved")


async def run(to: Path) -> None:
    """All screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        (lab_folder := Path(folder, "lab")).mkdir()
        async with EmbeddedServer.start() as server, browser() as chromium, running_lab(lab_folder) as lab:
            model = info("demo", engine="gpu-1", hidden_size=HIDDEN, layer_count=LAYERS)
            async with (
                Bus.open(server.url) as bus,
                serving(bus, ShownEngine(partial(anyio.sleep, 0.05)), model),
                tracewire.connect(server.url) as client,
            ):
                await client.models.get("demo", timeout=60)
                await walk(lab, chromium, client, to)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write them all."""
    return write(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
