"""An adapter that has too much waiting for Redis pauses its engine as a whole.

`test_trace_lag.py` has what comes before that, `test_service_redis_loss.py` the same with a Redis that is away.
"""

from __future__ import annotations

import anyio
import msgspec
import pytest

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
