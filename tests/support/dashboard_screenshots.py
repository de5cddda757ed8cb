"""Screenshots of the dashboard, before the demo model on a real engine.

    python -m tests.support.dashboard_screenshots [--to docs/screenshots]

Starts a Redis, `tracewire engine demo` and a gateway of its own. Two people steer: `ada` and `grace`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
from playwright.async_api import Browser, Page, expect

import tracewire
from tests.support import ROOT
from tests.support.browser import browser
from tests.support.engine_process import running_engine
from tests.support.gateways import serving
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


async def prepare(client: Client) -> None:
    """Traces to look at."""
    for name, (prompt, tokens) in PROMPTS.items():
        await start(client, name, prompt, tokens)
        await client.subscribe(name).until_done()
    await steered_by_two(client, "prose-or-code", "This module provides")
    for name in ("steer-up", "steer-down"):
        await start(client, name, "def parse(text):\n", 2000)
        await client.steer(name, alpha=15.0 if name == "steer-up" else -20.0, by="grace")
    async with client.subscribe("steer-down") as events:
        async for event in events:
            if isinstance(event, tracewire.Output) and event.index > 90:
                break
    for name in ("steer-up", "steer-down"):
        await client.pause(name, by="ada")


async def shoot(page: Page, url: str, to: Path, scheme: str) -> None:
    """Each view once."""

    async def shot(name: str) -> None:
        await page.mouse.move(0, 0)
        await page.wait_for_timeout(400)
        await page.screenshot(path=to / f"{name}-{scheme}.png")

    await page.goto(f"{url}/dashboard/")
    await expect(page.locator("tbody tr")).to_have_count(len(PROMPTS) + 3)
    await shot("list")
    await page.goto(f"{url}/dashboard/#/trace/prose-or-code")
    await expect(page.locator(".panel .badge")).to_have_text("paused")
    await expect(page.locator(".mark")).to_have_count(2)
    await page.locator(".mark").last.scroll_into_view_if_needed()
    await shot("trace")
    await page.goto(f"{url}/dashboard/#/traces/steer-up,steer-down,module-docs")
    await expect(page.locator(".panel .badge")).to_have_text(["paused", "paused", "finished"])
    await shot("side-by-side")
    await page.goto(f"{url}/dashboard/#/start")
    await page.get_by_label("Prompt").fill("This module provides")
    await page.get_by_label("Direction", exact=True).set_input_files(
        ROOT / "examples" / "demo_model" / "direction.npy"
    )
    await shot("start")


async def run(to: Path) -> None:
    """All screenshots."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedServer.start() as server, browser() as chromium:
            with running_engine(server.url, Path(folder)):
                async with tracewire.connect(server.url) as client, serving(server.url, "tw") as served:
                    await prepare(client)
                    for scheme in ("light", "dark"):
                        await shoot(await opened(chromium, scheme), served.url, to, scheme)


async def opened(chromium: Browser, scheme: str) -> Page:
    """A page in light or dark."""
    return await chromium.new_page(viewport={"width": 1280, "height": 880}, color_scheme=scheme)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "screenshots", help="folder to write to")
    anyio.run(run, parser.parse_args(arguments).to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
