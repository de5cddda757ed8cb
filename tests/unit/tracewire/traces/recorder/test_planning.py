"""The submission by which a recorded trace runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.cli import WORDS, steered_story
from tests.support.queue import settled
from tracewire import Client, Recording
from tracewire.traces.recorder.planning import Place, planned_again, planned_fork
from tracewire_bus.wire.packing import unpack

PATIENCE = 60


@pytest.fixture
async def recording(client: Client, engine: Callable[..., Any]) -> Recording:
    """A trace of ten tokens, which was steered to 3.0 at token 4, to 4.0 at token 5 and so on."""
    trace = client.trace("tiny", "x", live={"alpha": 0.5}, n=1, temperature=0.7, deadline=60)
    with anyio.fail_after(PATIENCE):
        async with engine(steered_story), trace:
            async for item in trace:
                # The story ends after its tenth token, which the sixth change lets out.
                if isinstance(item, tracewire.Output) and 3 <= item.index < len(WORDS) - 1:
                    await trace.steer(alpha=float(item.index), by="me")
            return await trace.record()


def changes(submission: Any) -> list[tuple[int, dict[str, Any], str]]:
    return [(one.index, unpack(one.values), one.by) for one in submission.schedule]


async def test_the_whole_trace_again(recording: Recording) -> None:
    again = planned_again(recording, "another", "other-model")
    assert again.trace != recording.trace_id
    assert (again.model, again.client, again.deadline_s, unpack(again.live)) == (
        *("other-model", "another", None),
        {"alpha": 0.5},
    )
    assert changes(again)[:2] == [(4, {"alpha": 3.0}, "me"), (5, {"alpha": 4.0}, "me")]
    assert again.invokes[0].sampling["temperature"] == 0.7


async def test_a_fork_is_the_trace_up_to_its_token(recording: Recording) -> None:
    fork = planned_fork(recording, "me", Place(6), {"alpha": 9.0}, logprobs=3)
    assert fork.invokes[0].forced_tokens == recording.state().token_ids[:6]
    assert fork.invokes[0].sampling["logprobs"] == 3
    assert changes(fork) == [(4, {"alpha": 3.0}, "me"), (5, {"alpha": 4.0}, "me"), (6, {"alpha": 9.0}, "me")]
    assert changes(planned_fork(recording, "me", Place(2), {})) == []


@pytest.mark.parametrize(
    ("place", "said"),
    [(Place(11), "at: .* from 0 to 10"), (Place(-1), "at: "), (Place(0, 1), "invoke: "), (Place(0, 0, 1), "choice: ")],
)
async def test_what_the_trace_does_not_have_is_named(recording: Recording, place: Place, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        planned_fork(recording, "me", place, {})


async def test_a_cut_trace_runs_as_far_as_it_came(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept(sampling=[{"seed": 7}])
        await stage.output("abc", [], [], [])
        await stage.final("failed")

    with anyio.fail_after(PATIENCE):
        async with engine(script), client.trace("tiny", "x", max_tokens=50) as trace:
            await trace.until_done()
            cut = await trace.record()
            await settled(client._session.open_bus())
            nothing = await client.record(trace.id)
    assert planned_again(cut, "me").invokes[0].sampling == {"max_tokens": 3, "seed": 7}
    with pytest.raises(tracewire.InvalidRecording, match="lacks the submission"):
        planned_again(nothing, "me")


async def test_a_trace_that_was_cut_asks_for_no_more_tokens_than_it_had(
    client: Client, engine: Callable[..., Any]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for word in ("one", " two"):
            await stage.output(word)
        await stage.final("cancelled")

    with anyio.fail_after(PATIENCE):
        async with engine(script), client.trace("tiny", "x", max_tokens=96, min_tokens=64) as trace:
            await trace.until_done()
            again = planned_again(await trace.record(), "another")
    assert (again.invokes[0].sampling["max_tokens"], again.invokes[0].sampling["min_tokens"]) == (2, 2)
