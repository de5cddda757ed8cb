"""A dashboard over a scripted engine that a test steps, and a page of it in a browser."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from playwright.async_api import Browser, Page

import tracewire
from tests.support.browser import PATIENCE_MS
from tests.support.browser import browser as started_browser
from tests.support.gateways import Served
from tests.support.gateways import serving as serving_gateway
from tests.support.scripted_engine import acts, info, serving
from tests.support.shown_engine import ShownEngine
from tests.support.until import until
from tracewire import Client
from tracewire_bus.bus import Bus


class Steps:
    """The pace of an engine: it steps as often as a test lets it."""

    def __init__(self) -> None:
        self._left = 0
        self._more = anyio.Event()

    async def __call__(self) -> None:
        """Wait for the next step."""
        while self._left == 0:
            self._more = anyio.Event()
            await self._more.wait()
        self._left -= 1

    def let(self, count: int) -> None:
        """Let the engine make so many steps more."""
        self._left += count
        self._more.set()


class Stand:
    """A gateway, a scripted engine and a client on a bus of their own."""

    def __init__(self, url: str, prefix: str, engine: ShownEngine, steps: Steps, client: Client) -> None:
        self.url = url
        self.prefix = prefix
        self.engine = engine
        self.steps = steps
        self.client = client
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]

    def gateway(self, **settings: Any) -> AbstractAsyncContextManager[Served]:
        """A gateway, each time at the same address."""
        return serving_gateway(self.url, self.prefix, port=self._port, **settings)

    async def trace(self, name: str, tokens: int = 10_000, prompt: str = "Read", **options: Any) -> str:
        """Submit a trace, which runs on by itself, and return its id."""
        given = {"live": {"alpha": 0.0}, "token_strings": True, "trace_id": name, **options}
        trace = self.client.trace("tiny", prompt, acts(), max_tokens=tokens, detach=True, **given)
        await trace.accepted()
        await trace.aclose()
        return name

    async def steered(self, alpha: float) -> None:
        """Wait until the engine has been told of this value for its next step."""
        await until(lambda: alpha in self.engine.alphas)


@asynccontextmanager
async def standing(url: str, prefix: str, **settings: Any) -> AsyncIterator[Stand]:
    """A stand whose engine makes no step by itself. `settings` are those of its adapter."""
    steps = Steps()
    engine = ShownEngine(steps)
    async with (
        Bus.open(url, prefix=prefix) as bus,
        serving(bus, engine, info("tiny", engine="shown"), **settings),
        tracewire.connect(url, prefix=prefix, name="tester") as client,
    ):
        await client.models.get("tiny", timeout=30)
        yield Stand(url, prefix, engine, steps, client)


@pytest.fixture
async def stand(embedded: str, prefix: str, request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """A stand of the test's own. An indirect parameter has settings of its adapter."""
    settings = getattr(request, "param", {})
    ready: asyncio.Future[Stand] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def hold() -> None:
        async with standing(embedded, prefix, **settings) as stand:
            ready.set_result(stand)
            await over.wait()

    # A task of its own, because fixtures are entered and left in different tasks, and a task group may not be.
    holding = asyncio.create_task(hold())
    await asyncio.wait([holding, ready], return_when=asyncio.FIRST_COMPLETED)
    if holding.done():
        await holding
    yield ready.result()
    over.set()
    await holding


@pytest.fixture
async def served(stand: Stand) -> AsyncIterator[Served]:
    """The stand's gateway."""
    async with stand.gateway() as served:
        yield served


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The browser of all tests."""
    async with started_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser) -> Callable[..., AbstractAsyncContextManager[Page]]:
    """Opens a page: `async with opened(url, color_scheme="dark") as page:`. `prepare` has the page before it loads.

    At the end, the page must have raised no error, and have broken no rule of its policy.
    """

    @asynccontextmanager
    async def page_of(
        url: str, prepare: Callable[[Page], Awaitable[None]] | None = None, **options: Any
    ) -> AsyncIterator[Page]:
        context = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE_MS)
        page = await context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: "Policy" in said.text and wrong.append(said.text))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        try:
            if prepare is not None:
                await prepare(page)
            await page.goto(url)
            yield page
            assert wrong == []
        finally:
            # The page may be loading something again: a test's route that then answers has no page to answer.
            await page.unroute_all(behavior="ignoreErrors")
            await context.close()

    return page_of
