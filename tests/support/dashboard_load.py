"""Many traces in one page of the dashboard: what the browser draws late, and whether it has all text in the end.

    python -m tests.support.dashboard_load [--traces 50] [--tokens 600] [--rate 60] [--json]

A scripted engine, a gateway and a Redis run as processes of their own. The page has all traces side by side. Each of
them puts out `--rate` tokens a second. While they run, the page counts its frames and its tasks of more than 50 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

import anyio
from playwright.async_api import Page

import tracewire
from tests.support.browser import browser
from tests.support.scripted_engine import acts
from tests.support.shown_engine import token_at
from tests.support.until import until
from tracewire_bus.transport.embedded import EmbeddedServer

__all__ = ["loaded"]

_COUNT = """() => {
  window.counted = {frames: [], long: []};
  let last = performance.now();
  const frame = (now) => { counted.frames.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new PerformanceObserver((list) => counted.long.push(...list.getEntries().map((one) => one.duration)))
    .observe({type: "longtask"});
}"""
#: Seconds of the page's main thread, by Chromium's names.
_WORK = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration")
_TEXT = "(panel) => [...panel.querySelectorAll('.block .t')].map((one) => one.textContent).join('')"


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A process of ours, and what it says when it is ready."""
    started = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        word, _, rest = started.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(f"{arguments[0]} has not started: {word} {rest}")
        yield rest
    finally:
        started.terminate()
        started.wait(60)


@asynccontextmanager
async def _stand(rate: float) -> AsyncIterator[tuple[str, tracewire.Client]]:
    """The URL of a gateway, and a client of its bus."""
    async with EmbeddedServer.start() as server:
        with (
            process("tests.support.shown_engine", "--url", server.url, "--rate", str(rate)),
            process("tracewire.cli", "gateway", "--url", server.url, "--port", "0", "--drain", "0") as url,
        ):
            async with tracewire.connect(server.url) as client:
                await client.models.get("tiny", timeout=60)
                yield url, client


async def loaded(traces: int = 50, tokens: int = 600, rate: float = 60.0, height: int = 1000) -> dict[str, Any]:
    """Figures of one run. `incomplete` names the traces whose text in the page is not the whole."""
    async with _stand(rate) as (url, client), browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1600, "height": height})
        names = [f"t{number}" for number in range(traces)]
        for name in names:
            given = {"max_tokens": tokens, "detach": True, "trace_id": name, "live": {"alpha": 0.0}}
            trace = client.trace("tiny", "Read", acts(), token_strings=True, **given)
            await trace.start()
            await trace.aclose()
        await page.goto(f"{url}/dashboard/#/traces/{','.join(names)}")
        await page.evaluate(_COUNT)
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        begun = monotonic()
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(client.subscribe(name).until_done)
        seconds = monotonic() - begun
        metrics = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
        await until(lambda: _settled(page))
        counted = await page.evaluate("counted")
        painted = await page.evaluate("performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])")
        incomplete = await _incomplete(page, names, tokens)
    frames = sorted(counted["frames"])
    return {
        "traces": traces,
        "tokens": tokens,
        "rate": rate,
        "tokens_a_second": round(traces * tokens / seconds),
        "first_paint_ms": dict(painted),
        "frames": len(frames),
        "frame_ms_median": round(frames[len(frames) // 2], 1),
        "frame_ms_p95": round(frames[int(len(frames) * 0.95)], 1),
        "frame_ms_max": round(frames[-1], 1),
        "frames_over_100_ms": sum(frame > 100 for frame in frames),
        "long_tasks": len(counted["long"]),
        "long_tasks_ms_max": max(counted["long"], default=0),
        **{name: round(metrics[name], 2) for name in _WORK},
        "incomplete": incomplete,
    }


async def _settled(page: Page) -> bool:
    """Whether all panels in view have ended."""
    states = "[...document.querySelectorAll('.panel')].filter((one) => one.getBoundingClientRect().top < innerHeight)"
    return await page.evaluate(f"{states}.every((one) => one.querySelector('.badge').textContent === 'finished')")


async def _incomplete(page: Page, names: list[str], tokens: int) -> list[str]:
    """The traces whose text is not the whole once a person has scrolled to them."""
    whole = "".join(token_at("Read", index, 0.0) for index in range(tokens))
    wrong = []
    for name in names:
        panel = page.locator(".panel").filter(has=page.get_by_role("heading", name=name, exact=True))
        await panel.scroll_into_view_if_needed()
        await panel.locator(".badge", has_text="finished").wait_for()

        async def has_all(panel: Any = panel) -> bool:
            return await panel.evaluate(_TEXT) == whole

        try:
            await until(has_all)
        except TimeoutError:
            wrong.append(name)
    return wrong


def main() -> int:
    """Run once, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rate", type=float, default=60.0, help="tokens a second of each trace")
    parser.add_argument("--height", type=int, default=1000, help="of the window, in pixels: 10000 shows 50 traces")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    found = anyio.run(loaded, options.traces, options.tokens, options.rate, options.height)
    print(json.dumps(found) if options.json else "\n".join(f"{name:20} {value}" for name, value in found.items()))
    return 1 if found["incomplete"] else 0


if __name__ == "__main__":
    sys.exit(main())
