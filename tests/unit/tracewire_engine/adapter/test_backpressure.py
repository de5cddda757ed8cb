"""An adapter that has too much waiting for Redis pauses its engine as a whole.

`test_trace_lag.py` has what comes before that, `test_service_redis_loss.py` the same with a Redis that is away.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import acts
from tests.support.until import until
from tracewire import Client
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_an_engine_that_refuses_to_be_held_is_asked_again(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was told to stop does, with an error of its own type: nobody else's traces end by that."""
    monkeypatch.setattr("tracewire_engine.adapter.backpressure.RETRY_S", 0.0)
    held = anyio.Event()

    async def told() -> bool:
        """The registry says what waits for Redis, and that the engine is held for it."""
        (found,) = [one for one in await client.engines.list() if one.name != "registered"]
        return found.waiting_bytes > 10 and found.state == "holding"

    class Refusing(PlayedEngine):
        refusals = 1

        async def pause_all(self) -> None:
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("the engine is shutting down")
            held.set()

    engine = Refusing()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, buffer_bytes=10) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as trace,
        ):
            await trace.accepted()
            ((request, outputs),) = engine.requests.items()
            nothing = msgspec.Raw(msgspec.msgpack.encode([]))
            engine.report(Report(steps=[StepRecord(request, 0, 0, nothing)]))
            await held.wait()
            assert adapter.engine_paused
            await until(told)
            outputs.put("x")
            engine.report(Report(finishes=[FinishRecord(request, 0, nothing, steps=1)]))
            outputs.put("", "stop", 0)
            assert (await trace.result()).text == "x"


@pytest.mark.usefixtures("registered")
async def test_saves_of_tokens_that_are_far_ahead_do_not_pause_the_engine_for_good(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused engine would never sample these tokens. The trace is ended, and another one goes on."""
    monkeypatch.setattr("tracewire_engine.adapter.backpressure.STUCK_S", 0.0)
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, buffer_bytes=1 << 16) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as ahead,
        ):
            await ahead.accepted()
            ((first, _),) = engine.requests.items()
            async with client.trace("tiny", "hello", acts, detach=True) as other:
                await other.accepted()
                (second,) = engine.requests.keys() - {first}
                deltas = msgspec.Raw(msgspec.msgpack.encode([["s", ["x"], bytes(1 << 15)]]))
                for _ in range(8):
                    # Each takes the place of the one before.
                    engine.report(Report(steps=[StepRecord(first, 0, 1000, deltas)]))
                engine.report(Report(steps=[StepRecord(first, 0, index, deltas) for index in (1001, 1002)]))
                with pytest.raises(tracewire.TraceFailed, match="tokens which the model has not sampled") as failed:
                    await ahead.result()
                assert failed.value.type == "EngineError"
                await until(lambda: _goes_on(adapter))
                nothing = msgspec.Raw(msgspec.msgpack.encode([]))
                engine.report(Report(steps=[StepRecord(second, 0, 0, nothing)]))
                engine.requests[second].put("x")
                engine.report(Report(finishes=[FinishRecord(second, 0, nothing, steps=1)]))
                engine.requests[second].put("", "stop", 0)
                assert (await other.result()).text == "x"


async def _goes_on(adapter: Any) -> bool:
    return not adapter.engine_paused
