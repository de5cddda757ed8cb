"""Screenshots of the dashboard, before the demo model on a real engine.

    python -m tests.support.dashboard_screenshots [--to docs/screenshots]

Starts a Redis, `tracewire engine demo` and a gateway of its own. Two people steer: `ada` and `grace`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from playwright.async_api import Browser, Page, expect

import tracewire
from tests.support import ROOT
from tests.support.browser import browser
from tests.support.engine_process import running_engine
from tests.support.gateways import serving
from tests.support.screenshot_command import write
from tracewire import Client, Live, LogitLens, Probe, Steer
from tracewire_bus.transport.embedded import EmbeddedServer

DIRECTION = np.load(ROOT / "examples" / "demo_model" / "direction.npy").astype(np.float32)
#: Traces by their names, with their prompts and how many tokens each has.
PROMPTS = {
    "parse-line": ("def parse_line(line):\n", 160),
    "module-docs": ("This module provides", 160),
    "class-node": ('class Node:\n    """', 160),
    "return-value": ("Return the", 160),
    "open-file": ("import os\n\ndef open_file(path", 160),
}


#: The part of the window that the list takes.
LIST = {"x": 0, "y": 0, "width": 1280, "height": 500}


async def start(client: Client, name: str, prompt: str, tokens: int, seed: int = 3) -> str:
    """Submit a trace that can be steered, with a probe and lenses."""
    interventions = [
        Steer("residual(4)", DIRECTION, scale=Live("alpha")),
        Probe("projection", "residual(4)", weight=DIRECTION),
        Probe("norm", "residual(*)", reduce="norm"),
        LogitLens("lens", "residual(*)", top_k=3),
    ]
    given = {"live": {"alpha": 0.0}, "token_strings": True, "detach": True, "trace_id": name, "by": "ada"}
    sampling = {"max_tokens": tokens, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    trace = client.trace("demo", prompt, interventions=interventions, **given, **sampling)
    await trace.accepted()
    await trace.aclose()
    return name


async def steered_by_two(client: Client, name: str, prompt: str) -> None:
    """Steer a trace twice while it runs, and pause it."""
    await start(client, name, prompt, 1200, seed=5)
    async with client.subscribe(name) as events:
        async for event in events:
            if not isinstance(event, tracewire.Output):
                continue
            last = event.index + len(event.token_ids)
            if event.index <= 48 < last:
                await client.steer(name, alpha=20.0, by="ada")
            elif event.index <= 110 < last:
                await client.steer(name, alpha=-15.0, by="grace")
            elif event.index <= 170 < last:
                await client.pause(name, by="ada")
                return


async def reached(client: Client, name: str, tokens: int) -> None:
    """Wait until a trace has so many tokens."""
    async with client.subscribe(name) as events:
        async for event in events:
            if isinstance(event, tracewire.Output) and event.index + len(event.token_ids) > tokens:
                return


async def run_to_end(client: Client) -> None:
    """Traces that have ended, and one that two people have steered."""
    for name, (prompt, tokens) in PROMPTS.items():
        await start(client, name, prompt, tokens)
        await client.subscribe(name).until_done()
    await steered_by_two(client, "prose-or-code", "This module provides")


async def shoot_list(pages: list[Page], client: Client, url: str, to: Path) -> None:
    """The list, while traces run."""
    for page in pages:
        await page.goto(f"{url}/dashboard/")
        await expect(page.locator("tbody tr")).to_have_count(len(PROMPTS) + 1)
    for number, name in enumerate(("steer-up", "steer-down", "plain-code")):
        await start(client, name, list(PROMPTS.values())[number][0], 1900)
    await client.steer("steer-up", alpha=15.0, by="grace")
    await client.steer("steer-down", alpha=-20.0, by="grace")
    await reached(client, "plain-code", 60)
    for page in pages:
        await page.screenshot(path=to / f"list-{await scheme_of(page)}.png", clip=LIST)
    for name in ("steer-up", "steer-down", "plain-code"):
        await client.pause(name, by="ada")


async def scheme_of(page: Page) -> str:
    """`light` or `dark`."""
    return await page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")


async def shoot(page: Page, url: str, to: Path) -> None:
    """The other views."""

    async def shot(name: str) -> None:
        await page.mouse.move(0, 0)
        await page.wait_for_timeout(400)
        await page.screenshot(path=to / f"{name}-{await scheme_of(page)}.png")

    await page.goto(f"{url}/dashboard/#/trace/prose-or-code")
    await expect(page.locator(".panel .badge")).to_have_text("paused")
    await expect(page.locator(".mark")).to_have_count(2)
    await page.locator(".mark").first.scroll_into_view_if_needed()
    await page.evaluate("scrollTo(0, 0)")
    await shot("trace")
    await page.goto(f"{url}/dashboard/#/traces/steer-up,steer-down,plain-code")
    await expect(page.locator(".panel .badge")).to_have_text(["paused", "paused", "paused"])
    await shot("side-by-side")
    await page.goto(f"{url}/dashboard/#/start")
    await page.get_by_label("Prompt").fill("This module provides")
    await page.get_by_label("Direction", exact=True).set_input_files(ROOT / "examples" / "demo_model" / "direction.npy")
    await page.get_by_role("heading", name="Start a trace").click()
    await shot("start")


async def run(to: Path) -> None:
    """All screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedServer.start() as server, browser() as chromium:
            with running_engine(server.url, Path(folder)):
                async with tracewire.connect(server.url) as client, serving(server.url, "tw") as served:
                    await run_to_end(client)
                    pages = [await opened(chromium, scheme) for scheme in ("light", "dark")]
                    await shoot_list(pages, client, served.url, to)
                    for page in pages:
                        await shoot(page, served.url, to)


async def opened(chromium: Browser, scheme: str) -> Page:
    """A page in light or dark."""
    return await chromium.new_page(viewport={"width": 1280, "height": 940}, color_scheme=scheme)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write them all."""
    return write(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
