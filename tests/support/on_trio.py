"""The client's and the bus's tests once more, on trio: `pytest -k trio`. pytest-asyncio runs them on asyncio.

`tests/conftest.py` has these hooks. Each async test of `ROOMS` that starts no engine is collected twice. The second
item has `trio` in its id. One run of trio serves the item's own fixtures and the test; fixtures of wider scopes stay
those of asyncio, since they hand out URLs and processes. A test that has the engine's adapter in its
process stays with asyncio.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import outcome
import pytest
import trio

__all__ = ["ROOMS", "TrioFunction", "pytest_fixture_setup", "pytest_generate_tests", "pytest_pycollect_makeitem"]

_TESTS = Path(__file__).resolve().parents[1]
#: Folders whose tests run on trio, too.
ROOMS = tuple(_TESTS / room for room in ("unit/tracewire", "unit/tracewire_bus"))
#: What runs in a process or on a thread of its own, or in a notebook's kernel, which is asyncio's.
_ELSEWHERE = tuple(_TESTS / "unit" / "tracewire" / room for room in ("blocking", "cli", "gateway", "notebook"))
#: Modules whose contexts run an adapter.
_ADAPTERS = frozenset(f"tests.support.{module}" for module in ("drained", "redis_loss", "scripted_engine", "served"))
#: Modules whose tests on trio are left to `make test-full`: what they are about is done by Redis, or takes long.
_LONG = frozenset({"test_cluster", "test_errors", "test_finished", "test_intake", "test_reader", "test_urls"})


class _InOrder(random.Random):
    """Has trio step tasks in the order in which they became ready, as asyncio does. Left to itself it takes the
    last one first half of the time, and a test could not say which of two tasks is first.
    """

    def random(self) -> float:
        """Always less than a half."""
        return 0.0


class Runner:
    """One run of trio, which goes on only while `run` is called."""

    def __init__(self) -> None:
        scheduling = trio._core._run
        # Hypothesis has trio sort the tasks by their age and shuffle them, once it is imported.
        scheduling._r, scheduling._ALLOW_DETERMINISTIC_SCHEDULING = _InOrder(), False
        self._turns: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._give, self._take = trio.open_memory_channel[Callable[[], Awaitable[Any]]](1)
        self._came: list[outcome.Outcome[Any]] = []
        self._ended: list[outcome.Outcome[None]] = []
        trio.lowlevel.start_guest_run(
            self._main, run_sync_soon_threadsafe=self._turns.put, done_callback=self._ended.append
        )

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async for job in self._take:
                self._came.append(await outcome.acapture(job))

    def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
        """Await `function` in the run's main task."""
        self._give.send_nowait(lambda: function(*arguments, **named))
        try:
            while not self._came and not self._ended:
                self._turns.get()()
        except BaseException:
            # pytest-timeout raises here.
            self._token.run_sync_soon(self._scope.cancel)
            raise
        return self._came.pop().unwrap() if self._came else self._ended[0].unwrap()

    def close(self) -> None:
        """End the run. Raises what trio found wrong with it."""
        self._give.close()
        while not self._ended:
            self._turns.get()()
        self._ended[0].unwrap()


class TrioFunction(pytest.Function):
    """A test that runs on trio."""

    runner: Runner

    def setup(self) -> None:
        """Start trio, then the fixtures."""
        self.runner = Runner()
        self.addfinalizer(self.runner.close)
        super().setup()

    def runtest(self) -> None:
        """Run the test."""
        self.runner.run(self.obj, **{name: self.funcargs[name] for name in self._fixtureinfo.argnames})


def _generator(runner: Runner, function: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Iterator[Any]]:
    def fixture(**arguments: Any) -> Iterator[Any]:
        generator = function(**arguments)
        yield runner.run(generator.__anext__)
        with pytest.raises(StopAsyncIteration):
            runner.run(generator.__anext__)

    return fixture


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Have an async fixture of a test on trio run there."""
    function: Any = fixturedef.func
    if isinstance(request.node, TrioFunction) and fixturedef.scope == "function":
        runner = request.node.runner
        if inspect.isasyncgenfunction(function):
            fixturedef.func = _generator(runner, function)
        elif inspect.iscoroutinefunction(function):
            fixturedef.func = lambda **arguments: runner.run(function, **arguments)
    try:
        return (yield)
    finally:
        fixturedef.func = function


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test that can run on trio collected twice. The first item keeps its id."""
    if _runs_on_trio(metafunc.definition):
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", ("asyncio", "trio"), ids=(pytest.HIDDEN_PARAM, "trio"))


def _runs_on_trio(test: pytest.Function) -> bool:
    return (
        inspect.iscoroutinefunction(test.obj)
        and any(test.path.is_relative_to(room) for room in ROOMS)
        and not any(test.path.is_relative_to(room) for room in _ELSEWHERE)
        and not _has_an_adapter(test.obj)
        and "starts_engine" not in test.fixturenames
    )


def _has_an_adapter(function: Any) -> bool:
    """Whether a test runs the engine's adapter, which asyncio runs, in its own process."""
    used = (function.__globals__.get(name) for name in function.__code__.co_names)
    contexts = (one for one in used if getattr(one, "__module__", None) in _ADAPTERS)
    return any(inspect.isasyncgenfunction(inspect.unwrap(one)) for one in contexts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Generator[None, Any, Any]:
    """Take the items of trio back from pytest-asyncio."""
    made = yield
    return [_on_trio(item) for item in made] if isinstance(made, list) else made


def _on_trio(item: Any) -> Any:
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("backend") != "trio":
        return item
    twin = TrioFunction.from_parent(
        item.parent,
        name=item.name,
        callspec=callspec,
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        originalname=item.originalname,
    )
    twin.own_markers = [mark for mark in item.own_markers if mark.name != "asyncio"]
    if item.path.stem in _LONG:
        twin.add_marker("full")
    return twin
