"""Wrong uses: each is an error in the caller's terms, at once, and the client serves on."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import ScriptedEngine, engine_info, tiny
from tracewire import (
    Client,
    LogitLens,
    Probe,
    Prompt,
    Steer,
    SteerRejected,
    TraceRejected,
    TracewireError,
    intervention,
)

NAN = math.nan


@intervention
def block(model, tracer, live):
    saved = [].save()


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*values: Any) -> Any:
        return function(*values)

    return wrapper


@pytest.fixture
def engine(redis_url: str, prefix: str) -> Any:
    """Runs a scripted engine."""
    return ScriptedEngine.running(redis_url, prefix, tiny, engine_info())


#: What is submitted, the field at fault, and what is said of it.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "half of a surrogate pair in a prompt": ({"prompt": "a\ud800"}, "prompt", "expected text, got half of a surrogate"),
    "and in a message": ({"prompt": [{"role": "user", "content": "\ud800"}]}, "prompt[0].content", "surrogate"),
    "and in a key of one": ({"prompt": [{"role": "user", "content": "", "\ud800": 1}]}, "prompt[0]", "surrogate"),
    "and in sampling": ({"stop": ["\ud800"]}, "sampling.stop[0]", "surrogate"),
    "and in a model's name": ({"model": "\ud800"}, "model", "its name"),
    "and in an edit's name": ({"edits": ["\ud800"]}, "edits", "names of edits"),
    "a token id beyond 64 bits": ({"prompt": [2**70]}, "prompt[0]", "expected a token id"),
    "a seed beyond 64 bits": ({"seed": 2**70}, "sampling.seed", "at most 64 bits"),
    "a temperature that is NaN": ({"temperature": NAN}, "sampling.temperature", "got NaN"),
    "and one of a prompt's own": ({"prompt": Prompt("a", top_p=NAN)}, "sampling.top_p", "got NaN"),
    "a prompt in a prompt": ({"prompt": Prompt(Prompt("a"))}, "prompt", "expected text"),  # type: ignore[arg-type]
    "an empty list in a Prompt": ({"prompt": None, "prompts": [Prompt([])]}, "prompts[0]", "is empty"),
    "a detach of text": ({"detach": "no"}, "detach", "expected True or False, got 'no'"),
    "a live parameter in a container": ({"live": {"a": {"b": 1}}}, "live.a", "or an array, got dict"),
    "a live parameter that is a keyword": ({"live": {"class": 1}}, "live", "live.NAME"),
    "a decorator above the intervention": ({"block": wrapping(block)}, "block", "take the one above"),
    "a plain function as a prompt's own block": (
        {"prompt": None, "prompts": ["a", Prompt("b", block=print)]},  # type: ignore[arg-type]
        "prompts[1].block",
        "expected an intervention",
    ),
    "a scale of text": (
        {"interventions": [Steer("residual(1)", np.ones(8), scale="big")]},  # type: ignore[arg-type]
        "interventions[0].scale",
        "expected a number or Live(name), got 'big'",
    ),
    "a name that is a number": (
        {"interventions": [Probe(1, "residual(1)")]},  # type: ignore[arg-type]
        "interventions[0].name",
        "expected a string, got 1",
    ),
    "a count that is no integer": (
        {"interventions": [LogitLens("lens", "residual(1)", top_k=1.5)]},  # type: ignore[arg-type]
        "interventions[0].top_k",
        "expected an integer, got 1.5",
    ),
    "positions that there are not": (
        {"interventions": [Probe("p", "residual(1)", positions="some")]},  # type: ignore[arg-type]
        "interventions[0].positions",
        "expected one of 'last', ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_submitted_is_refused_naming_the_field(client: Client, engine: Any, case: str) -> None:
    given, field, message = REFUSED[case]
    async with engine as serving:
        with pytest.raises(TraceRejected) as caught:
            async with client.trace(**{"model": "tiny", "prompt": "a", **given}):
                pass
        assert caught.value.field == field
        assert message in caught.value.message
        assert serving.taken == []


def test_what_is_expected_of_a_live_parameter_is_said_once(client: Client) -> None:
    with pytest.raises(tracewire.UntransportableVariable) as caught:
        client.trace("tiny", "a", live={"alpha": [1.0]})
    assert str(caught.value) == "live.alpha: expected a number, a boolean, a string, bytes or an array, got list"


#: What is called, the error, and what it says.
WRONG: dict[str, tuple[Callable[[Client], Any], type[Exception], str]] = {
    "a model that is a number": (lambda c: c.models.get(3), TypeError, "name: expected text, got 3"),
    "waiting for a text": (
        lambda c: c.models.get("x", timeout="3"),
        TypeError,
        "timeout: expected a number of seconds",
    ),
    "waiting for NaN": (lambda c: c.models.get("x", timeout=NAN), ValueError, "timeout: expected 0 seconds or more"),
    "since a number": (lambda c: c.subscribe("x", since=0), TypeError, "since: expected text, got 0"),
    "since nothing": (lambda c: c.subscribe("x", since=None), TypeError, "since: expected text, got None"),
    "names that is text": (lambda c: c.subscribe("x", names="scores"), TypeError, "not 'scores'"),
    "names that is a number": (lambda c: c.subscribe("x", names=5), TypeError, "a collection of saved names"),
    "names that are numbers": (lambda c: c.subscribe("x", names=[1]), TypeError, "and 1 is none"),
    "watching since nothing": (lambda c: c.watch(since=None), TypeError, "since: expected text"),
    "a consumer without a group": (lambda c: c.watch(consumer="a"), ValueError, "consumer: expected a group"),
    "a group without a name": (lambda c: c.watch(group=""), ValueError, "group: expected a name"),
    "a group that is a number": (lambda c: c.watch(group=5), TypeError, "group: expected text"),
    "idle for NaN": (lambda c: c.watch(group="g", idle_timeout=NAN), ValueError, "idle_timeout: expected"),
    "idle for nothing": (
        lambda c: c.watch(group="g", idle_timeout=0),
        ValueError,
        "idle_timeout: expected more than 0",
    ),
    "draining within a text": (
        lambda c: c.engines.drain("x", timeout="5"),
        TypeError,
        "timeout: expected a number of seconds",
    ),
    "dead letters after no id": (
        lambda c: c.dead_letters.list(after="x"),
        ValueError,
        "after: expected a dead letter's id",
    ),
    "no dead letters": (lambda c: c.dead_letters.list(limit=0), ValueError, "limit: expected a positive integer"),
    "no dead letter": (lambda c: c.dead_letters.resubmit("x"), tracewire.UnknownDeadLetter, "no dead letter 'x'"),
    "steering to a number": (lambda c: c.steer("x", 5), SteerRejected, "live: expected a dict of live parameters"),
    "an edit in place of a text": (
        lambda c: c.edits("tiny").install("x", block, replacing="1"),
        tracewire.EditRejected,
        "replacing: expected a version's number",
    ),
    "an edit within less than no time": (
        lambda c: c.edits("tiny").install("x", block, timeout=-1),
        ValueError,
        "timeout: expected 0 seconds or more",
    ),
    "an edit's items since some word": (
        lambda c: c.edits("tiny").watch("x", since="then"),
        ValueError,
        "since is 'start', 'now' or an item's id, not 'then'",
    ),
    "an edit that is a number": (lambda c: c.edits("tiny").watch(5), TypeError, "name: expected text"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_argument_is_named(client: Client, case: str) -> None:
    call, kind, message = WRONG[case]
    with pytest.raises(kind) as caught, anyio.fail_after(20):
        made = call(client)
        if isinstance(made, Awaitable | tracewire.Listing):
            await made
    assert message in str(caught.value)


CONNECTING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a url that is a number": ({"url": 6379}, TypeError, "url: expected text"),
    "a prefix that is a number": ({"prefix": 5}, TypeError, "prefix: expected text"),
    "a prefix with braces": ({"prefix": "a{b"}, tracewire.ConnectError, "a prefix has no braces"),
    "a lease of text": ({"lease_ttl": "10"}, TypeError, "lease_ttl: expected a number of seconds"),
    "a short lease": ({"lease_ttl": 0.5}, ValueError, "lease_ttl: expected 1 seconds or more"),
    "an endless lease": ({"lease_ttl": math.inf}, ValueError, "lease_ttl: expected"),
    "a retry_timeout of text": ({"retry_timeout": "20"}, TypeError, "retry_timeout: expected a number of seconds"),
    "less than no time": ({"retry_timeout": -1}, ValueError, "retry_timeout: expected 0 seconds or more"),
}


@pytest.mark.parametrize("case", CONNECTING)
async def test_what_nobody_can_connect_with_is_named(redis_url: str, case: str) -> None:
    given, kind, message = CONNECTING[case]
    with pytest.raises(kind, match=message):
        async with tracewire.connect(**{"url": redis_url, **given}):
            pass


async def test_an_option_of_the_url_that_there_is_not(redis_url: str) -> None:
    with pytest.raises(tracewire.ConnectError, match=r"an option that redis-py does not know.*'nonsense'"):
        async with tracewire.connect(f"{redis_url}?nonsense=1"):
            pass


async def test_a_trace_that_was_left_says_that_it_was_cancelled(client: Client, engine: Any) -> None:
    async with engine:
        async with client.trace("tiny", "a") as trace:
            pass
        with pytest.raises(TracewireError, match="closed before its end was read: it was cancelled then"):
            await trace.result()


def test_there_is_no_client_on_what_is_not_asyncio() -> None:
    """As trio would ask, on which no event loop of asyncio runs."""
    entering = tracewire.connect("redis://127.0.0.1:1").__aenter__()
    with pytest.raises(TracewireError, match="no event loop of asyncio"):
        entering.send(None)  # type: ignore[attr-defined]


async def test_another_event_loop_is_refused_and_harms_nothing(client: Client, engine: Any) -> None:
    async def elsewhere(call: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(TracewireError, match="belongs to another event loop"):
            await call()

    async with engine:
        trace = client.trace("tiny", "a")
        for call in (partial(client.models.get, "tiny"), trace.start, client.subscribe(trace.id).start):
            await anyio.to_thread.run_sync(asyncio.run, elsewhere(call))
        # A thread without a loop of its own asks this one.
        model = await anyio.to_thread.run_sync(anyio.from_thread.run, client.models.get, "tiny")
        assert model.name == "tiny"
        async with trace:
            assert (await trace.result()).text == "one two three"
