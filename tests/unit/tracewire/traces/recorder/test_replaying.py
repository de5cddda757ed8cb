"""A recording runs again, and the report names the first token that differs, and what else differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client
from tracewire_bus.wire.messages import Append, DecodedOutput, Delta, Set, Versions

PATIENCE = 60


def script(*tokens: int, value: float = 1.0, **accepted: Any) -> Any:
    async def played(stage: Stage) -> None:
        await stage.accept(**accepted)
        for index, token in enumerate(tokens):
            saved = value * token
            delta = Append(path=("s",), items=[saved]) if index else Set(path=("s",), value=[saved])
            deltas: list[Delta] = [delta]
            await stage.publish(
                DecodedOutput(attempt=1, seq=stage.seq, index=index, token_ids=[token], text="x", deltas=[deltas])
            )
        await stage.final()

    return played


async def test_a_run_that_is_the_same_says_so(client: Client, engine: Callable[..., Any]) -> None:
    with anyio.fail_after(PATIENCE):
        async with engine(script(1, 2, sampling=[{"temperature": 0.0}])):
            trace = client.trace("tiny", "x")
            await trace.until_done()
            recording = await trace.record()
            found = await client.replay(recording)
    assert (found.same, found.status, found.notes) == (True, "finished", [])
    assert str(found) == "all 2 tokens are the same"
    assert found.trace_id != recording.trace_id


async def test_what_differs_is_named(client: Client, engine: Callable[..., Any]) -> None:
    with anyio.fail_after(PATIENCE):
        async with engine(script(1, 2, 3, versions=Versions(torch="1", vllm="5", weights="aa"), dtype="bfloat16")):
            trace = client.trace("tiny", "x")
            await trace.until_done()
            recording = await trace.record()
        again = script(1, 2, 4, value=1.5, versions=Versions(torch="1", weights="bb"), dtype="float32")
        async with engine(again, model="other"):
            found = await client.replay(recording, model="other")
    assert not found.same
    lines = str(found).splitlines()
    assert lines[:2] == [
        "token 2 differs: recorded 3, got 4",
        "s at item 0 differs by up to 0.5 (0.5 of the recorded value)",
    ]
    assert "note: the model's files differ: their digest was aa, and is bb" in lines
    assert "note: the engine does not tell its vllm, which was 5" in lines
    assert "note: the dtype was bfloat16, and is float32" in lines


@pytest.mark.usefixtures("registered")
async def test_what_is_no_recording_is_refused(client: Client) -> None:
    with pytest.raises(TypeError, match=r"recording: expected one of Recording.open"):
        await client.replay("t.twrec")  # type: ignore[arg-type]
    with pytest.raises(tracewire.UnknownTrace):
        await client.fork("nobody", [{}])
