"""Engines that die, leave, or are taken for dead: their traces run again elsewhere, and end once."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.stepping import Gate, free, some, whole
from tracewire import Accepted, Client, Output, Paused, Restarted, Waiting
from tracewire.traces import presence
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, Fenced
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import decode_submission, encode
from tracewire_bus.wire.messages import Failure
from tracewire_engine.adapter.engine_api import Prepared
from tracewire_engine.protocol.messages import FinishRecord, StepRecord

PATIENCE = 60


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is missing is taken for gone soon."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)


@pytest.mark.usefixtures("_soon")
async def test_an_engine_that_dies_under_its_adapter_is_replaced(client: Client, bus: Bus) -> None:
    gate = Gate()
    async with serving(bus, dying := ScriptedEngine(gate)) as first:
        trace = client.trace("tiny", "hello", acts, max_tokens=20, detach=True)
        await client.models.get("tiny", timeout=PATIENCE)
        await trace.start()
        gate.step(5)
        await some(trace, 5)
        dying.die()
        await first.ended.wait()
        assert first.lost
        assert await bus.registry.list() == []
        async with serving(bus, free()):
            events = await whole(client, trace.id, "hello", 20)
    restarts = [event for event in events if isinstance(event, Restarted)]
    assert [(one.attempt, one.seq) for one in restarts] == [(2, 0)]
    assert "died" in restarts[0].reason
    await trace.aclose()


class _Sharing(ScriptedEngine):
    """An engine whose blocks share a process that ends in the fourth step, unless they share it with none."""

    class _Ending(ScriptedEngine.request_type):
        """Ends as the workers say it when such a process has ended."""

        alone = False

        def step(self) -> StepRecord:
            record = super().step()
            if record.index == 3 and not self.alone:
                record.ended = "error"
            return record

        def finish(self) -> FinishRecord:
            record = super().finish()
            if not self.alone:
                record.error, record.restart = Failure(type="BlockHostLost", message="it has ended"), True
            return record

    request_type = _Ending

    def __init__(self) -> None:
        super().__init__(partial(anyio.sleep, 0))
        self.tenants: list[str | None] = []

    async def prepare(self, *given: Any, tenant: str | None = "", **more: Any) -> Prepared:
        self.tenants.append(tenant)
        return await super().prepare(*given, **more)

    async def start(self, request: str, prepared: Prepared, priority: int) -> Any:
        outputs = await super().start(request, prepared, priority)
        outputs.alone = self.tenants[-1] is None
        return outputs


@pytest.mark.parametrize(("attempts", "error"), [(2, None), (1, "BlockHostLost")])
async def test_a_trace_whose_blocks_shared_a_process_that_ended_runs_again_alone(
    client: Client, bus: Bus, attempts: int, error: str | None
) -> None:
    """If it may run again."""
    engine = _Sharing()
    trace = client.trace("tiny", "hello", acts, max_tokens=20, detach=True, max_attempts=attempts)
    async with serving(bus, engine):
        await client.models.get("tiny", timeout=PATIENCE)
        await trace.start()
        if error is None:
            events = await whole(client, trace.id, "hello", 20)
            (restarted,) = [event for event in events if isinstance(event, Restarted)]
            assert "it has ended" in restarted.reason
        else:
            with anyio.fail_after(PATIENCE):
                *_, last = [event async for event in client.subscribe(trace.id)]
            assert last.error.type == error
    assert engine.tenants == ["", None][:attempts]
    await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_readers_are_told_that_a_trace_waits_for_another_engine(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine was killed, and the next one is not there for long: whoever looks after the queue says so."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    monkeypatch.setattr(recovery, "PUBLISH_AFTER_S", 0.0)
    trace = client.trace("tiny", "hello", acts, max_tokens=20, detach=True)
    await bus.submit(trace._submission)
    (taken,) = await bus.queue.take("tiny", "killed", 1, 100)
    await bus.records.open(trace.id, "killed", taken.attempt)
    async with bus.writer() as writer:
        await writer.append(trace.id, 1, 0, encode(messages.Accepted(attempt=1, seq=0, engine="killed", model="tiny")))
        subscription = client.subscribe(trace.id)
        assert isinstance(await anext(subscription), Accepted)
        look = bus.recovery("tiny")
        with anyio.fail_after(PATIENCE):
            while await look.look() != ["killed"]:
                await anyio.lowlevel.checkpoint()
            event = await anext(subscription)
        assert isinstance(event, Waiting)
        assert event.reason == "engine killed was lost while it ran this trace"
        # It could not go on behind that.
        with pytest.raises(Fenced):
            await writer.append(trace.id, 1, 1, encode(messages.Resumed(attempt=1, seq=1)))
    # The place of the word is one to go on from.
    rest = client.subscribe(trace.id, since=subscription.position)
    async with serving(bus, free()):
        events = await whole(client, trace.id, "hello", 20)
        assert isinstance(await anext(rest), Restarted)
    assert [type(event) for event in events[:3]] == [Accepted, Waiting, Restarted]
    assert (await client.get_state(trace.id)).attempt == 2


@pytest.mark.usefixtures("_soon")
async def test_an_engine_that_leaves_tells_that_its_traces_wait(client: Client, bus: Bus) -> None:
    gate = Gate()
    async with serving(bus, dying := ScriptedEngine(gate)) as adapter:
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            gate.step(5)
            await some(trace, 5)
            dying.die()
            with anyio.fail_after(PATIENCE):
                assert isinstance(await anext(trace), Waiting)
            await adapter.ended.wait()


@pytest.mark.usefixtures("_soon")
async def test_an_engine_that_is_only_slow_can_write_nothing_any_more(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Its lease ran out while it ran a trace; another has finished it when it goes on."""
    gate = Gate()
    described = info(capacity=1)
    async with (
        Bus.open(embedded, prefix=prefix) as far,
        serving(far, ScriptedEngine(gate), described, heartbeat_s=10_000, lease_s=10_000) as slow,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            gate.step(5)
            await some(trace, 5)
            await bus.registry.unregister(described.engine)
            async with serving(bus, free()):
                events = await whole(client, trace.id, "hello", 20)
                last = await bus.tail_id(trace.id)
                gate.open()
                with anyio.fail_after(PATIENCE):
                    while slow.busy:
                        await anyio.lowlevel.checkpoint()
                assert await bus.tail_id(trace.id) == last
                again = await whole(client, trace.id, "hello", 20)
    assert len(again) == len(events)
    assert await bus.queue.holders("tiny") == []
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0


@pytest.mark.usefixtures("_soon")
async def test_both_write_and_one_is_heard(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """The second engine is in the middle of the trace when the first goes on."""
    gate, other = Gate(), Gate()
    described = info(capacity=1)
    async with (
        Bus.open(embedded, prefix=prefix) as far,
        serving(far, ScriptedEngine(gate), described, heartbeat_s=10_000, lease_s=10_000) as slow,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            gate.step(5)
            await some(trace, 5)
            await bus.registry.unregister(described.engine)
            async with serving(bus, ScriptedEngine(other)):
                other.step(3)
                with anyio.fail_after(PATIENCE):
                    async for item in trace:
                        if isinstance(item, Output) and item.attempt == 2 and item.index + len(item.token_ids) == 3:
                            break
                    gate.open()
                    while slow.busy:
                        await anyio.lowlevel.checkpoint()
                # The record is the second's still, and so is the entry.
                assert not await bus.records.ended(trace.id)
                assert await bus.command("HLEN", bus.keys.queue("tiny", "taken")) == 1
                assert await bus.command("TTL", bus.keys.events(trace.id)) > 24 * 3600
                other.open()
                await whole(client, trace.id, "hello", 20)


@pytest.mark.usefixtures("_soon")
async def test_a_trace_that_is_not_to_be_restarted_fails(client: Client, bus: Bus) -> None:
    gate = Gate()
    async with serving(bus, engine := ScriptedEngine(gate)) as adapter:
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, on_engine_loss="fail", max_tokens=20) as trace:
            gate.step(2)
            await some(trace, 2)
            engine.die()
            await adapter.ended.wait()
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
    assert caught.value.type == "EngineLost"
    assert len(await bus.dead_letters.list()) == 0
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0


@pytest.mark.usefixtures("_soon")
async def test_a_trace_fails_with_its_last_engine(
    client: Client, bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to say so but its submitter."""
    monkeypatch.setattr(presence, "RECOVER_S", 0.1)
    described = info()
    async with Bus.open(embedded, prefix=prefix) as far:
        gate = Gate()
        async with serving(far, ScriptedEngine(gate), described, heartbeat_s=10_000, lease_s=10_000):
            await client.models.get("tiny", timeout=PATIENCE)
            async with client.trace("tiny", "hello", acts, on_engine_loss="fail", max_tokens=20) as trace:
                gate.step(2)
                await some(trace, 2)
                await bus.registry.unregister(described.engine)
                with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed) as caught:
                    await trace.result()
    assert caught.value.type == "EngineLost"


@pytest.mark.usefixtures("_soon")
async def test_a_trace_that_was_taken_from_its_engine_can_be_cancelled(client: Client, bus: Bus) -> None:
    """It waits, and its record still names the engine that had it, which lives."""
    gate, described = Gate(), info(capacity=1)
    async with serving(bus, ScriptedEngine(gate), described):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "other", acts, max_tokens=20, detach=True) as other:
            gate.step(2)
            await some(other, 2)
            async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
                await bus.records.open(trace.id, described.engine, 1)
                await trace.cancel()
                with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed) as caught:
                    await trace.result()
            assert caught.value.status == "cancelled"
            assert await bus.queue.waiting("tiny") == 0
            gate.open()
            await whole(client, other.id, "other", 20)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("how", ["restart", "fail"])
async def test_an_engine_that_is_shut_down_hands_over(client: Client, bus: Bus, how: Any) -> None:
    """However often that happens: it is no loss."""
    trace = client.trace("tiny", "hello", acts, max_tokens=20, on_engine_loss=how, max_attempts=2, detach=True)
    for turn in range(1 if how == "fail" else 4):
        gate = Gate()
        async with serving(bus, ScriptedEngine(gate)):
            await client.models.get("tiny", timeout=PATIENCE)
            if turn == 0:
                await trace.start()
            gate.step(2)
            with anyio.fail_after(PATIENCE):
                async for item in trace:
                    if isinstance(item, Output) and item.attempt == turn + 1 and item.index + len(item.token_ids) == 2:
                        break
    if how == "fail":
        with pytest.raises(tracewire.TraceFailed) as caught:
            await trace.result()
        assert caught.value.type == "EngineShutdown"
    else:
        assert await bus.queue.waiting("tiny") == 1
        async with serving(bus, free()):
            events = await whole(client, trace.id, "hello", 20)
        restarts = [event for event in events if isinstance(event, Restarted)]
        assert [one.attempt for one in restarts] == [2, 3, 4, 5]
        assert all("shut down" in one.reason for one in restarts)
    await trace.aclose()


@pytest.mark.usefixtures("_soon")
async def test_what_kills_its_engines_is_given_up_and_the_others_are_not(client: Client, bus: Bus) -> None:
    """A poisonous trace among others: it is tried three times, the others end as if nothing had been."""
    traces = {}
    async with serving(bus, ScriptedEngine(Gate())):
        await client.models.get("tiny", timeout=PATIENCE)
    for number in range(12):
        prompt = "die of this" if number == 5 else f"prompt {number}"
        trace = client.trace("tiny", prompt, acts, max_tokens=8, detach=True, live={"alpha": 1.0})
        await bus.submit(trace._submission)
        traces[prompt] = trace
    poison = traces.pop("die of this")
    engines = 0
    with anyio.fail_after(PATIENCE):
        while not await bus.records.ended(poison.id):
            engines += 1
            async with serving(bus, free(), poll_s=0.01) as adapter:
                while not adapter.ended.is_set() and not await bus.records.ended(poison.id):
                    await anyio.lowlevel.checkpoint()
        async with serving(bus, free(), poll_s=0.01):
            for prompt, trace in traces.items():
                await whole(client, trace.id, prompt, 8)
    assert engines in (3, 4)
    final = [event async for event in client.subscribe(poison.id)][-1]
    assert final.status == "failed"
    assert final.error.type == "EngineLost"
    assert "tried 3 times" in final.error.message
    assert len(await bus.dead_letters.list()) == 1
    ((_, flat),) = await bus.command("XRANGE", bus.keys.dead(), "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert decode_submission(fields[b"d"]).trace == poison.id
    assert "died" in fields[b"reason"].decode()


@pytest.mark.usefixtures("_soon")
async def test_two_engines_race_for_many(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    async with (
        Bus.open(embedded, prefix=prefix) as far,
        serving(bus, one := free()),
        serving(far, two := free()),
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        traces = [client.trace("tiny", f"prompt {number}", acts, max_tokens=3, detach=True) for number in range(100)]
        async with anyio.create_task_group() as group:
            for trace in traces:
                # A submission that is repeated runs once.
                group.start_soon(bus.submit, trace._submission)
                group.start_soon(far.submit, trace._submission)
        for number, trace in enumerate(traces):
            events = await whole(client, trace.id, f"prompt {number}", 3)
            assert {event.attempt for event in events} == {1}
    assert one.steps
    assert two.steps


@pytest.mark.usefixtures("_soon")
async def test_an_engine_takes_nothing_while_its_lease_is_out(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    async with (
        Bus.open(embedded, prefix=prefix) as far,
        serving(far, stale := free(), heartbeat_s=10_000, lease_s=0.2, poll_s=0.01) as adapter,
    ):
        with anyio.fail_after(PATIENCE):
            # Its entry may be over before a client has seen it.
            while adapter._lifecycle.valid_until < 0:
                await anyio.lowlevel.checkpoint()
            while await bus.registry.list():
                await anyio.lowlevel.checkpoint()
        await bus.submit(client.trace("tiny", "hello", acts, max_tokens=3, detach=True, trace_id="t")._submission)
        async with serving(bus, free()):
            events = await whole(client, "t", "hello", 3)
    assert {event.attempt for event in events} == {1}
    assert not stale.steps


@pytest.mark.usefixtures("_soon")
async def test_a_paused_trace_that_was_taken_from_its_engine_is_let_go_of(client: Client, bus: Bus) -> None:
    """It writes nothing that would be refused; whoever has it now is told to go on."""
    async with serving(bus, slow := ScriptedEngine(Gate()), info(capacity=1)) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3, detach=True) as trace:
            await trace.accepted()
            await trace.pause()
            async for item in trace:
                if isinstance(item, Paused):
                    break
            assert slow.tracked == 1
            # An engine may make some steps before a pause of an earlier attempt reaches it. This one makes none.
            gate = Gate()
            async with serving(bus, ScriptedEngine(gate), info()):
                await bus.queue.put_back("tiny", first._info.engine, "it was slow", lost=True)
                with anyio.fail_after(PATIENCE):
                    async for item in trace:
                        if isinstance(item, Paused):
                            break
                    assert item.attempt == 2
                    gate.open()
                    await trace.resume()
                    await trace.result()
                    while slow.tracked or first._claims.runs:
                        slow.step()
                        await anyio.sleep(0.01)
            assert not first.lost


@pytest.mark.usefixtures("_soon")
async def test_a_paused_trace_that_others_ended_is_let_go_of(client: Client, bus: Bus) -> None:
    async with serving(bus, slow := ScriptedEngine(Gate())) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3, detach=True) as trace:
            await trace.accepted()
            await trace.pause()
            async for item in trace:
                if isinstance(item, Paused):
                    break
            await bus.records.end(trace.id, "failed", Failure(type="EngineLost", message="it was taken for lost"))
            with anyio.fail_after(PATIENCE):
                while slow.tracked or first._claims.runs:
                    slow.step()
                    await anyio.sleep(0.01)
            assert not first.lost
            state = await client.get_state(trace.id)
            assert state.error is not None
            assert state.error.message == "it was taken for lost"


@pytest.mark.usefixtures("_soon")
async def test_an_engine_that_gets_a_trace_back_finishes_it(client: Client, bus: Bus) -> None:
    """It was taken from it and given to it again, while it ran it."""
    gate = Gate()
    described = info()
    async with serving(bus, ScriptedEngine(gate), described):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            gate.step(5)
            await some(trace, 5)
            assert await bus.queue.put_back("tiny", described.engine, "slow", lost=True) == 1
            with anyio.fail_after(PATIENCE):
                while await bus.queue.waiting("tiny"):
                    await anyio.lowlevel.checkpoint()
            gate.open()
            await whole(client, trace.id, "hello", 20)
    assert await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0
