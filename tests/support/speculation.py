"""Engines that draft tokens, and what is asked of them beside an engine that does not."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tests.support.blocks import parallel as blocks
from tests.support.drafted_kinds import of_number
from tests.support.engine_inside import counts
from tests.support.parallel.scenarios import same
from tracewire import Client, Model

__all__ = ["GREEDY", "NGRAM", "apart", "came_to", "check_same", "compared", "drafting", "text"]

#: n-grams of the text so far, which need no other model.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

GREEDY = {"temperature": 0.0, "ignore_eos": True}

_TEXTS = (
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\n",
    "import os\nimport sys\nimport re\nimport json\n",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef",
    "The module provides a file object. The module provides",
    "class A:\n    def __init__(self):\n        self.a = 1\n\nclass B:\n    def",
)


def text(number: int) -> str:
    """A text that repeats itself, so that what comes next can be drafted; another one for each number."""
    return f"# {number}\n{_TEXTS[number % len(_TEXTS)]}"


#: Saves that are sums of products in float32, of which a step with other rows has other last bits, or have such
#: numbers in them: how far these may be apart, in parts of the greatest element. All others are the same bit for bit.
_SUMS = dict.fromkeys(
    ("linear", "one", "norm", "norms", "moments", "mean", "prompt", "coordinates", "top", "picked", "score"), 1e-05
)
_SUMS |= {"seen": 1e-5}
#: What comes behind edits that are such sums, of bfloat16, whose steps are of 2^-8. Seldom one of them is rounded to
#: the other side, and all that comes behind differs a little. In float32 it does not (`test_declared.py`).
_SUMS |= {f"near_{name}": 2.0**-6 for name in ("before", "behind", "after")}


def apart(one: dict[str, Any], other: dict[str, Any], tolerance: float | None = None) -> list[str]:
    """Where the saves of two requests with the same tokens differ by more than rounding.

    `tolerance`: for all saves, in place of their own.
    """
    if one.keys() != other.keys():
        return [f"{list(one)} and {list(other)}"]
    allowed = {name: _SUMS.get(name, 0.0) if tolerance is None else tolerance for name in one}
    return [line for name in one for line in same(one[name], other[name], tolerance=allowed[name], path=f".{name}")]


class _Compared:
    """What a number of requests came to on an engine.

    Every second is plain. Of the others, every second has a block, the others declared interventions of each kind in
    turn.
    """

    def __init__(self, client: Client, model: Model, tokens: int) -> None:
        self._client, self._model, self._tokens = client, model, tokens
        #: By number: the tokens, the saves, and what `Accepted` said of drafts.
        self.found: Found = {}

    async def run(self, count: int, at_once: int) -> None:
        """Run so many requests."""
        room = anyio.Semaphore(at_once)
        async with anyio.create_task_group() as group:
            for number in range(count):
                await room.acquire()
                group.start_soon(self._one, number, room)

    async def _one(self, number: int, room: anyio.Semaphore) -> None:
        block = blocks.logits_and_samples if number % 4 == 1 else None
        declared = of_number(number // 4) if number % 4 == 3 else []
        sampling = {**GREEDY, "max_tokens": self._tokens + number % 7}
        try:
            async with self._client.trace(
                self._model, text(number), block, interventions=declared, **sampling
            ) as trace:
                result = await trace.result()
                state = await self._client.get_state(trace.id)
        finally:
            room.release()
        self.found[number] = result.token_ids, result.saves, state.accepted.drafts


Found = dict[int, tuple[list[int], Any, list[Any]]]


async def came_to(client: Client, count: int, at_once: int, tokens: int) -> Found:
    """What `count` requests come to on an engine, of which `at_once` run at a time. Each generates `tokens` or more.

    By number: the tokens, the saves, and what `Accepted` said of drafts.
    """
    one = _Compared(client, await client.models.get("demo", timeout=60), tokens)
    await one.run(count, at_once)
    return one.found


def check_same(drafted: Found, known: Found) -> None:
    """The requests came to the same with drafts as without. All of them were drafted but those with blocks."""
    assert drafted.keys() == known.keys()
    for number, (token_ids, saves, drafts) in drafted.items():
        assert token_ids == known[number][0], number
        differ = apart(known[number][1], saves)
        assert not differ, (number, differ)
        assert known[number][2] == []
        assert [one.tokens for one in drafts] == [0 if number % 4 == 1 else 3], number


async def compared(ours: Client, theirs: Client, count: int, at_once: int, tokens: int) -> None:
    """Requests come to the same on an engine with drafts, which is `ours`, and on one without."""
    drafted = await came_to(ours, count, at_once, tokens)
    check_same(drafted, await came_to(theirs, count, at_once, tokens))


@asynccontextmanager
async def drafting(engine: Any, client: Client, model: Model) -> AsyncIterator[dict[str, int]]:
    """Two plain traces, which are drafted, run meanwhile. How many drafts there were stands in what is given."""
    found: dict[str, int] = {}
    before = await counts(engine)

    async def beside(number: int) -> None:
        async with client.trace(model, text(number), **GREEDY, max_tokens=1900) as trace:
            await trace.result()

    async with anyio.create_task_group() as group:
        for number in range(2):
            group.start_soon(beside, number)
        yield found
        group.cancel_scope.cancel()
    after = await counts(engine)
    found.update({name: after[name] - before[name] for name in ("drafted", "taken", "steps")})
