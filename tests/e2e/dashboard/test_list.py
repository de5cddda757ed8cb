"""The list of traces when what it reads comes late, or in another order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
from playwright.async_api import Page, Route, WebSocketRoute, expect

from tests.e2e.dashboard.conftest import Stand
from tests.support.gateways import Served
from tests.support.shown_engine import token_at
from tests.support.until import until

Opened = Callable[..., Any]


class Held:
    """The page's socket. The messages that are `wanted` wait until `release`, as do later ones of their streams."""

    def __init__(self, wanted: Callable[[dict[str, Any]], bool] = lambda _: False) -> None:
        self._wanted = wanted
        #: All messages of both sides.
        self.seen: list[dict[str, Any]] = []
        self._waiting: list[Callable[[], None]] = []
        self._streams: set[int] = set()
        self._free = False

    async def route(self, page: Page) -> None:
        """Stand between the page and the gateway."""
        await page.route_web_socket("**/ws", self._connect)

    def _connect(self, socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        socket.on_message(lambda text: self._pass(json.loads(text), lambda: server.send(text)))
        server.on_message(lambda text: self._pass_frame(json.loads(text), socket))

    def _pass_frame(self, messages: list[dict[str, Any]], page: WebSocketRoute) -> None:
        for message in messages:
            self._pass(message, lambda one=message: page.send(json.dumps([one])))

    def _pass(self, message: dict[str, Any], send: Callable[[], None]) -> None:
        self.seen.append(message)
        if not self._free and (self._wanted(message) or message["id"] in self._streams):
            self._streams.add(message["id"])
            self._waiting.append(send)
        else:
            send()

    def held(self) -> bool:
        """Whether a message waits."""
        return bool(self._waiting)

    def has(self, value: str) -> bool:
        """Whether an order or an event of this name was sent."""
        return any(value in (one.get("do"), one.get("event", {}).get("type")) for one in self.seen)

    def opened(self) -> bool:
        """Whether the gateway has opened a stream."""
        return any(one.get("open") for one in self.seen)

    def release(self) -> None:
        """Let go of what waits, and hold nothing from now on."""
        self._free = True
        for send in self._waiting:
            send()


def text_of(tokens: int) -> str:
    """What a trace has said."""
    return "".join(token_at("Read", index, 0.0) for index in range(tokens))


async def test_a_row_shows_the_text_that_came_before_it_was_followed(
    stand: Stand, served: Served, opened: Opened
) -> None:
    held = Held(lambda message: message.get("do") == "follow")
    async with opened(f"{served.url}/dashboard/", prepare=held.route) as page:
        await expect(page.locator("#connection")).to_have_text("Live")
        await stand.trace("late", 10_000)
        await until(held.held)
        stand.steps.let(5)
        subscription = stand.client.subscribe("late")
        async for event in subscription:
            if event.type == "output" and event.index + len(event.token_ids) == 5:
                break
        held.release()
        # The engine makes no further step: no later text can bring this one.
        await expect(page.locator(".tail")).to_have_text(text_of(5).strip())


async def test_a_trace_that_ends_before_its_text_is_read_keeps_its_text(
    stand: Stand, served: Served, opened: Opened
) -> None:
    held = Held(lambda message: message.get("event", {}).get("type") == "output")
    async with opened(f"{served.url}/dashboard/", prepare=held.route) as page:
        await expect(page.locator("#connection")).to_have_text("Live")
        await stand.trace("short", 5)
        await until(lambda: held.has("follow"))
        stand.steps.let(5)
        await until(held.held)
        await expect(page.locator(".badge")).to_have_text("finished")
        held.release()
        await expect(page.locator(".tail")).to_have_text(text_of(5).strip())


async def test_a_trace_that_is_submitted_while_the_list_opens_is_there(
    stand: Stand, served: Served, opened: Opened
) -> None:
    await stand.trace("early", 5)
    held = Held(lambda message: message.get("do") == "watch")
    async with opened(f"{served.url}/dashboard/", prepare=held.route) as page:
        await expect(page.locator("tbody tr")).to_have_count(1)
        await until(held.held)
        await stand.trace("between", 10_000)
        stand.steps.let(5)
        assert await stand.client.subscribe("early").until_done() == "finished"
        held.release()
        await expect(page.locator("tbody tr th")).to_have_text(["between", "early"])
        await expect(page.locator(".badge")).to_have_text(["running", "finished"])


async def test_a_trace_that_ends_while_the_list_loads_has_ended(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine", 5)
    answered, go_on = anyio.Event(), anyio.Event()

    async def slowly(route: Route) -> None:
        answer = await route.fetch()
        answered.set()
        await go_on.wait()
        await route.fulfill(response=answer)

    seen = Held()

    async def prepare(page: Page) -> None:
        await seen.route(page)
        await page.route("**/traces?*", slowly)

    async with opened(f"{served.url}/dashboard/", prepare=prepare) as page:
        await answered.wait()
        # From here on the page misses no event.
        await until(seen.opened)
        stand.steps.let(5)
        await until(lambda: seen.has("final"))
        go_on.set()
        await expect(page.locator(".badge")).to_have_text("finished")


async def test_a_row_that_comes_back_into_view_shows_the_latest_text(
    stand: Stand, served: Served, opened: Opened
) -> None:
    for number in range(40):
        await stand.trace(f"t{number}")
    oldest = f"{served.url}/dashboard/"
    async with opened(oldest, viewport={"width": 1280, "height": 400}) as page:
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="t0", exact=True))
        await expect(page.locator("tbody tr")).to_have_count(40)
        made = 0
        for steps in (5, 100):
            await page.locator("h1").scroll_into_view_if_needed()
            stand.steps.let(steps)
            made += steps
            await until(lambda made=made: stand.engine.steps >= made)
            await row.scroll_into_view_if_needed()
            shown = row.locator(".tail")
            await expect(shown).to_contain_text(text_of(made)[-20:].strip())
            assert text_of(made).strip().endswith((await shown.text_content() or "").strip())
