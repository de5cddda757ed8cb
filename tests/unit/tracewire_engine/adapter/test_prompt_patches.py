"""Patches from other prompts of a trace: which request starts when, and what workers are told of each."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.played_engine import PlayedEngine
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Patch, Probe, When
from tracewire_bus.wire.packing import decoder
from tracewire_engine.adapter.engine_api import Choice, Rejection
from tracewire_engine.adapter.prompt_patches import LateOutputs, PromptPatches
from tracewire_engine.protocol.messages import Placed

DECLARED = [
    Probe("p", "residual(1)"),
    Patch("residual(1)", prompt=1, source=[2, 0], positions=[0, 1], when=When(every=2), into=[0]),
    Patch("residual(2)", np.ones(4, np.float32)),
]


def placed(patches: PromptPatches, invoke: int) -> list[Placed]:
    encoded = msgspec.msgpack.encode([Placed(one) for one in normalize(DECLARED)])
    again = patches.declared(encoded, invoke)
    assert again is not None
    found: list[Placed] = decoder(list[Placed])(again)
    return found


def test_each_prompt_gives_takes_or_neither() -> None:
    patches = PromptPatches(DECLARED, 3, "run")
    taking, giving, neither = (placed(patches, invoke) for invoke in range(3))
    for one in (taking, giving, neither):
        assert (one[0].kept, one[2].kept) == (None, None)
    assert (taking[1].kept, taking[1].gives) == (("run", 1), False)
    assert taking[1].intervention == DECLARED[1]
    # An array stays as it was encoded.
    last = taking[2].intervention
    assert isinstance(last, Patch)
    assert last.values.tolist() == [1.0] * 4
    assert (giving[1].kept, giving[1].gives) == (("run", 1), True)
    given = giving[1].intervention
    assert isinstance(given, Patch)
    assert (given.positions, given.source, given.when) == ([2, 0], None, None)
    assert neither[1].kept is None


def test_without_such_patches_nothing_is_decoded() -> None:
    patches = PromptPatches(DECLARED[::2], 1, "run")
    assert patches.declared(b"anything", 0) == b"anything"
    with pytest.raises(Rejection, match="0 to 0") as caught:
        PromptPatches(DECLARED, 1, "run")
    assert caught.value.failure.field == "interventions[1].prompt"


class _Outputs:
    cached_tokens, prompt_logprobs = 3, [{}]

    async def get(self) -> tuple[list[Choice], bool]:
        return [Choice(0, [1], "x")], False

    def size(self) -> int:
        return 7


async def test_a_request_starts_when_those_have_put_out_a_token_whose_values_it_takes() -> None:
    declared = [Patch("residual(1)", prompt=0, into=2), Patch("residual(1)", prompt=1, into=2)]
    patches, started = PromptPatches(declared, 3, "run"), []

    async def start() -> Any:
        started.append(len(started))
        return _Outputs()

    assert isinstance(await patches.start(0, start, lambda: False), _Outputs)
    late = await patches.start(2, start, lambda: False)
    assert isinstance(late, LateOutputs)
    assert (late.cached_tokens, late.prompt_logprobs, late.size()) == (0, [], 0)
    found: list[Any] = []

    async def read() -> None:
        found.append(await late.get())

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        patches.note(0)
        await anyio.lowlevel.checkpoint()
        assert started == [0]
        patches.note(2)
        patches.note(1)
    assert started == [0, 1]
    assert found == [([Choice(0, [1], "x")], False)]
    assert (late.begun, late.cached_tokens, late.prompt_logprobs, late.size()) == (True, 3, [{}], 7)


async def test_a_request_of_a_trace_that_ends_before_does_not_start() -> None:
    patches = PromptPatches([Patch("residual(1)", prompt=0)], 2, "run")

    async def start() -> Any:
        raise AssertionError

    late = await patches.start(1, start, lambda: True)
    patches.release()
    assert await late.get() == ([], True)


async def test_the_workers_drop_what_they_keep_when_the_attempt_is_over() -> None:
    told: list[Any] = []

    class Engine(PlayedEngine):
        async def steer(self, changes: Any, over: list[str], since: float) -> None:
            told.append((changes, over))

    await PromptPatches([Patch("residual(1)", prompt=0)], 2, "run").forget(Engine())
    await PromptPatches([], 2, "other").forget(Engine())
    assert told == [({}, ["run"])]
