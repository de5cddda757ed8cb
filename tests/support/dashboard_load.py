"""Many traces in one page of the dashboard: what the browser draws late, and whether it has all text in the end.

    python -m tests.support.dashboard_load [--traces 50] [--tokens 600] [--rate 20] [--view list] [--json]

A scripted engine, a gateway and a Redis run as processes of their own. Each trace puts out `--rate` tokens a second.
The browser shows all of them side by side, or with `--view list` in the list of traces. It measures its frames three
times: `empty` are those of the list before there is a trace, `live` those of the page while the traces run, and `ended`
those of the same page afterwards. `ratio` is the frames a second of `live` to those of `empty`.
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

#: Counts frames until `counting` is another count: the time from each to the next.
_COUNT = """() => {
  const frames = window.counting = [];
  let last = null;
  const frame = (now) => {
    if (window.counting !== frames) return;
    if (last !== null) frames.push(now - last);
    last = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""
#: How many frames of a page that stands still are measured.
_STILL = 180
#: What shows a trace in each view, and its text in there.
_VIEWS = {"side-by-side": (".panel", ".block .t"), "list": ("tbody tr", ".tail")}
#: Seconds of the page's main thread, by Chromium's names.
_WORK = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration")
_TEXT = "(shown, text) => [...shown.querySelectorAll(text)].map((one) => one.textContent).join('')"


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


async def loaded(
    traces: int = 50, tokens: int = 600, rate: float = 20.0, height: int = 1000, view: str = "side-by-side"
) -> dict[str, Any]:
    """Figures of one run. `incomplete` names the traces whose text in the page is not the whole."""
    shown, text = _VIEWS[view]
    async with _stand(rate) as (url, client), browser() as chromium:
        size: Any = {"viewport": {"width": 1600, "height": height}}
        page = await chromium.new_page(**size)
        await page.goto(f"{url}/dashboard/")
        await page.get_by_text("No trace was submitted").wait_for()
        empty = await _still(page)
        await page.close()
        names = [f"t{number}" for number in range(traces)]
        for name in names:
            given = {"max_tokens": tokens, "detach": True, "trace_id": name, "live": {"alpha": 0.0}}
            trace = client.trace("tiny", "Read", acts(), token_strings=True, **given)
            await trace.start()
            await trace.aclose()
        page = await chromium.new_page(**size)
        await page.goto(f"{url}/dashboard/" if view == "list" else f"{url}/dashboard/#/traces/{','.join(names)}")
        painted = await page.evaluate("performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])")
        await until(lambda: _all_in_view(page, shown, f"one.querySelector('{text}')?.textContent"))
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        begun = monotonic()
        await page.evaluate(_COUNT)
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(client.subscribe(name).until_done)
        live = await _frames(page)
        seconds = monotonic() - begun
        metrics = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
        await until(lambda: _all_in_view(page, shown, "one.querySelector('.badge').textContent === 'finished'"))
        ended = await _still(page)
        incomplete = await _incomplete(page, view, names, tokens)
    return {
        "view": view,
        "traces": traces,
        "tokens": tokens,
        "rate": rate,
        "tokens_a_second": round(traces * tokens / seconds),
        "first_paint_ms": dict(painted),
        "empty": empty,
        "live": live,
        "ended": ended,
        "ratio": round(live["frames_a_second"] / empty["frames_a_second"], 2),
        **{name: round(metrics[name], 2) for name in _WORK},
        "incomplete": incomplete,
    }


async def _still(page: Page) -> dict[str, float]:
    """The frames of a page in which nothing happens."""
    await page.evaluate(_COUNT)
    await until(lambda: page.evaluate(f"counting.length >= {_STILL}"))
    return await _frames(page)


async def _frames(page: Page) -> dict[str, float]:
    """Figures of the frames since the last count began."""
    frames: list[float] = sorted(
        await page.evaluate("() => { const found = counting; counting = null; return found; }")
    )
    if not frames:
        raise RuntimeError("the traces had ended before the page showed all of them: more tokens would last longer")
    return {
        "frames": len(frames),
        "frames_a_second": round(1000 * len(frames) / sum(frames), 1),
        "ms_median": round(frames[len(frames) // 2], 1),
        "ms_p95": round(frames[int(len(frames) * 0.95)], 1),
        "ms_max": round(frames[-1], 1),
        "over_50_ms": sum(frame > 50 for frame in frames),
        "over_100_ms": sum(frame > 100 for frame in frames),
    }


async def _all_in_view(page: Page, shown: str, fits: str) -> bool:
    """Whether all traces in view are so."""
    there = f"[...document.querySelectorAll('{shown}')].filter((one) => one.getBoundingClientRect().top < innerHeight)"
    return await page.evaluate(f"{there}.length > 0 && {there}.every((one) => Boolean({fits}))")


async def _incomplete(page: Page, view: str, names: list[str], tokens: int) -> list[str]:
    """The traces whose text is not the whole once a person has scrolled to them.

    The list shows the ends of the texts of the traces that were in view while they ran.
    """
    whole = "".join(token_at("Read", index, 0.0) for index in range(tokens))
    shown, text = _VIEWS[view]
    title = "heading" if view == "side-by-side" else "link"
    wrong = []
    for name in names:
        one = page.locator(shown).filter(has=page.get_by_role(title, name=name, exact=True))
        if view == "list" and not await one.evaluate("(one) => one.getBoundingClientRect().bottom < innerHeight"):
            continue
        await one.scroll_into_view_if_needed()
        await one.locator(".badge", has_text="finished").wait_for()

        async def has_all(one: Any = one) -> bool:
            said = await one.evaluate(_TEXT, text)
            return said == whole if view == "side-by-side" else bool(said) and whole.strip().endswith(said.strip())

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
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each trace")
    parser.add_argument("--height", type=int, default=1000, help="of the window, in pixels: 10000 shows 50 traces")
    parser.add_argument("--view", choices=_VIEWS, default="side-by-side", help="what the page shows")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    found = anyio.run(loaded, options.traces, options.tokens, options.rate, options.height, options.view)
    print(json.dumps(found) if options.json else "\n".join(f"{name:20} {value}" for name, value in found.items()))
    return 1 if found["incomplete"] else 0


if __name__ == "__main__":
    sys.exit(main())
