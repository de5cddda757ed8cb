"""A wrong argument is named, in the caller's terms."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import tracewire
from tests.support.captured import block
from tracewire import Client, SteerRejected

NAN = math.nan


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
