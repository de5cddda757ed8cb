"""Fifty traces at once in one page."""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import pytest
from playwright.async_api import Browser, expect

from tests.e2e.dashboard.conftest import Stand
from tests.support import ROOT
from tests.support.browser import chromium
from tests.support.dashboard_load import loaded
from tests.support.gateways import Served
from tracewire.gateway.dashboard_files import FOLDER

#: Runs `frames.js` on a made-up clock: painting what a frame has drawn takes `costs[frame]` milliseconds for each draw.
_FRAMES = """async ([text, panels, costs]) => {
  let now = 0;
  let due = [];
  window.requestAnimationFrame = (call) => due.push(call);
  performance.now = () => now;
  const { inFrame } = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  let drawn = [];
  const works = Array.from({ length: panels }, (_, number) => () => drawn.push(number));
  return costs.map((cost) => {
    works.forEach(inFrame);
    const [calls, begun] = [due, now];
    [due, drawn] = [[], []];
    for (const call of calls) call(now);
    now += Math.max(16, cost * drawn.length);
    return [now - begun, drawn];
  });
}"""


async def test_a_frame_draws_as_much_as_the_browser_can_paint(browser: Browser) -> None:
    page = await browser.new_page()
    costs = [15] * 120 + [0] * 60
    given = [(FOLDER / "js" / "frames.js").read_text(), 50, costs]
    frames: list[tuple[float, list[int]]] = await page.evaluate(_FRAMES, given)
    await page.close()
    # Eight draws of 15 ms are too much, which the page learns within a few frames.
    assert frames[0][0] == 120
    slow = frames[6:120]
    assert max(took for took, _ in slow) <= 45
    # No panel starves: each is drawn as often as any other.
    counts = [sum(panel in drawn for _, drawn in slow) for panel in range(50)]
    assert min(counts) >= max(counts) - 1
    assert min(counts) >= 2
    # Where painting costs nothing, all are drawn in each frame again.
    assert len(frames[-1][1]) == 50


#: Counts the elements that are added to the page and removed from it.
_NODES = """() => {
  window.nodes = { added: 0, removed: 0 };
  new MutationObserver((records) => {
    const elements = (list) => [...list].filter((one) => one.nodeType === Node.ELEMENT_NODE).length;
    for (const { addedNodes, removedNodes } of records) {
      nodes.added += elements(addedNodes);
      nodes.removed += elements(removedNodes);
    }
  }).observe(document.querySelector("main"), { childList: true, subtree: true });
}"""


async def test_a_token_adds_one_element(stand: Stand, served: Served, opened: Any) -> None:
    names = [await stand.trace(f"t{number}") for number in range(6)]
    stand.steps.let(5)
    async with opened(
        f"{served.url}/dashboard/#/traces/{','.join(names)}", viewport={"width": 1280, "height": 2400}
    ) as page:
        tokens = page.locator(".block .t")
        await expect(tokens).to_have_count(6 * 5)
        # All menus, plots and heat maps are there.
        await expect(page.locator(".heat-scroll canvas")).to_have_count(6)
        await expect(page.locator(".u-over")).to_have_count(6)
        await page.evaluate(_NODES)
        stand.steps.let(100)
        await expect(tokens).to_have_count(6 * 105)
        counted = await page.evaluate("nodes")
    # Plots, heat maps and labels change in place.
    assert counted == {"added": 6 * 100, "removed": 0}


async def test_the_command_prints_figures() -> None:
    chromium()
    command = [sys.executable, "-m", "tests.support.dashboard_load", "--traces", "4", "--tokens", "60"]
    # They run for long enough to be seen, however long the page takes to open.
    command += ["--rate", "3", "--json"]
    done = await anyio.run_process(command, cwd=ROOT, stderr=None)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["traces"], found["incomplete"]) == (4, [])
    assert all(found[part]["frames"] > 0 for part in ("empty", "live", "ended"))
    assert found["ratio"] > 0


@pytest.mark.parametrize("view", ["side-by-side", "list"])
@pytest.mark.full
async def test_fifty_traces_at_once_drop_few_frames_and_no_text(view: str, record_property: Any) -> None:
    """The frames a second, beside those of the page without traces in the same run."""
    found = await loaded(traces=50, tokens=300, rate=20.0, view=view)
    record_property("figures", found)
    print(found)
    assert found["incomplete"] == []
    assert found["ratio"] >= 0.25


@pytest.mark.full
async def test_fifty_traces_in_view_at_once_have_all_of_their_text(record_property: Any) -> None:
    """In a window of 10,000 lines, which no screen has."""
    found = await loaded(traces=50, tokens=300, rate=20.0, height=10_000)
    record_property("figures", found)
    print(found)
    assert found["incomplete"] == []
