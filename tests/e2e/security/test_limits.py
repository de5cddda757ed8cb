"""An engine refuses what exceeds its limits, names the limit, counts it, and serves other traces.

The submissions go to the queue as a hostile client would put them there, past the checks of the SDK.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.served import ENGINE, failure, runs, submission
from tests.support.until import until
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.domain.limit_table import Limits
from tracewire_bus.store.queue_entries import QueueFull
from tracewire_bus.store.trace_records import SteerRefused
from tracewire_bus.transport.errors import BusError
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.live_values import live_values
from tracewire_bus.wire.messages import Ablate, Block, Helper, Invoke, Submission
from tracewire_bus.wire.packing import pack, wire
from tracewire_bus.wire.refs import VECTOR, ArrayRef

PATIENCE = 60
_LIVE = pack({"alpha": 0.5})


@asynccontextmanager
async def engine(bus: Bus, limits: Limits, **options: Any) -> AsyncIterator[ScriptedEngine]:
    """A scripted engine in this process, with these limits."""
    scripted = ScriptedEngine(partial(anyio.sleep, 0.005))
    with anyio.fail_after(PATIENCE):
        async with serving(bus, scripted, info("tiny", engine=ENGINE), limits=limits, **options):
            while not await bus.registry.alive(ENGINE):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            yield scripted


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client of this test's bus."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def put(bus: Bus, trace: str, data: bytes | Submission) -> None:
    """Queue a submission without the SDK's checks."""
    await bus.command("HSET", bus.keys.record(trace), "m", "tiny")
    await bus.queue.put("tiny", trace, data if isinstance(data, bytes) else encode(data))


def _block(**fields: Any) -> Block:
    return Block(**{"name": "b", "source": "pass\n", **fields})


def _bomb(item: bytes, count: int) -> bytes:
    """A submission with a list that decodes to many times its size."""
    head = msgspec.msgpack.encode({"trace": "t", "model": "tiny"})
    return b"\x83" + head[1:] + b"\xa7invokes\xdd" + count.to_bytes(4, "big") + item * count


def _nested(depth: int) -> bytes:
    return (
        b"\x83" + msgspec.msgpack.encode({"trace": "t", "model": "tiny"})[1:] + b"\xa4live" + b"\x91" * depth + b"\xc0"
    )


_REF = ArrayRef("float32", (2**28,), bytes(16), "blob")

#: What exceeds each limit, by the limit, and the field that the refusal names.
EXCEEDING: dict[str, tuple[Callable[[], Any], str]] = {
    "values": (lambda: _bomb(b"\x80", 600_000), "submission"),
    "containers": (lambda: _bomb(b"\x80", 40_000), "submission"),
    "depth": (lambda: _nested(20_000), "submission"),
    "prompts": (lambda: submission(invokes=[Invoke(prompt="x")] * 5), "invokes"),
    "choices": (lambda: submission(invokes=[Invoke(prompt="x", sampling={"n": 5})]), "sampling.n"),
    "requests": (lambda: submission(invokes=[Invoke(prompt="x", sampling={"n": 4})] * 3), "sampling.n"),
    "prompt_tokens": (lambda: submission(invokes=[Invoke(token_ids=[1] * 101)]), "prompt"),
    "helpers": (lambda: submission(block=_block(helpers=[Helper(name="h", source="pass")] * 5)), "block"),
    "source": (lambda: submission(block=_block(source="#" * 101)), "block"),
    "sources": (lambda: submission(block=_block(helpers=[Helper(name="h", source="#" * 90)] * 4)), "block"),
    "interventions": (lambda: submission(interventions=[Ablate("residual(0)")] * 5), "interventions"),
    "edits": (lambda: submission(edits=["e"] * 5), "edits"),
    "name": (lambda: submission(client="c" * 101), "client"),
    "shared_bytes": (lambda: submission(shared=pack({"a": [1] * 200})), "shared"),
    "variable_bytes": (lambda: submission(block=_block(variables=pack({"a": _REF}))), "variables"),
    "vector_bytes": (
        lambda: submission(
            interventions=[
                Ablate("residual(0)", wire(ArrayRef("float32", (2**28,), bytes(16), f"{VECTOR}{bytes(16).hex()}")))
            ]
        ),
        "interventions",
    ),
    "attempts": (lambda: submission(max_attempts=5), "max_attempts"),
}
SMALL = Limits(
    **dict.fromkeys(("prompts", "choices", "helpers", "interventions", "edits", "attempts"), 4),
    **dict.fromkeys(("source", "name", "shared_bytes", "prompt_tokens"), 100),
    requests=10,
    sources=300,
    variable_bytes=1 << 29,
    submission_bytes=1 << 26,
)


async def test_each_limit_on_a_submission_is_the_engines(bus: Bus, client: Client) -> None:
    async with engine(bus, SMALL):
        for name, (make, field) in EXCEEDING.items():
            await put(bus, f"t-{name}", _renamed(make(), f"t-{name}"))
            error = await failure(client, f"t-{name}")
            assert error is not None, name
            assert error.field == field, (name, error)
        await runs(client)
        await until(lambda: _reached(client, {*EXCEEDING}))
        (seen,) = await client.engines.list()
        assert seen.limits["choices"] == 4
        assert "prompt_tokens" in seen.limits


async def _reached(client: Client, names: set[str]) -> bool:
    (seen,) = await client.engines.list()
    return names <= seen.limits_reached.keys()


def _renamed(data: bytes | Submission, trace: str) -> bytes:
    if isinstance(data, Submission):
        return encode(msgspec.structs.replace(data, trace=trace))
    return data.replace(b"\xa1t", bytes([0xA0 | len(trace)]) + trace.encode(), 1)


async def test_redis_takes_no_submission_that_is_larger_than_engines_take(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(submission_bytes=1000)):
        with pytest.raises(BusError, match=r"submission-bytes: a submission has at most 1000 bytes, got 1001"):
            await bus.queue.put("tiny", "large", bytes(1001), limit=0)
        with pytest.raises(BusError, match="name: a name is too long"):
            await bus.queue.put("tiny", "x" * 2000, b"")
        await runs(client)


async def test_the_queue_has_the_engines_limit_whatever_a_caller_says(bus: Bus) -> None:
    described = info("tiny", engine=ENGINE)
    described.queue_limit, described.limits = 4, {"client_waiting": 2}
    await bus.registry.register(described, ttl_s=60)
    for trace in ("a", "b"):
        await bus.queue.put("tiny", trace, b"", client="me", limit=1_000_000, tries=10**6)
    with pytest.raises(QueueFull):
        await bus.queue.put("tiny", "c", b"", client="me", limit=1_000_000)
    # Another client has room until the queue is full for it, too.
    for number in range(2):
        await bus.queue.put("tiny", f"d{number}", b"", client=f"client-{number}", limit=1_000_000)
    with pytest.raises(QueueFull):
        for number in range(9):
            await bus.queue.put("tiny", f"e{number}", b"", client="late", limit=1_000_000)
    taken = await bus.queue.take("tiny", ENGINE, 1, 0)
    assert taken[0].tries == 100


async def test_changes_of_live_parameters_are_bounded_by_the_engine(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(steers_waiting=10**6, steers_per_s=3)) as scripted:
        async with client.trace("tiny", "x", live={"alpha": 0.0}, max_tokens=100_000) as trace:
            await until(lambda: _began(scripted))
            # The engine has written its limits into the record.
            await until(lambda: bus.command("HGET", bus.keys.record(trace.id), "lr"))
            values = live_values({"alpha": 1.0})
            with pytest.raises(SteerRefused, match="steers-per-s") as refused:
                for _ in range(100):
                    await bus.records.steer(trace.id, values, by="me")
            assert refused.value.reason == "busy"
            large = {"alpha": msgspec.structs.replace(values["alpha"], packed=pack("x" * 2_000_000))}
            with pytest.raises(SteerRefused, match="the limit is 1048576"):
                # The form is the one that was declared, as far as the sender says.
                await bus.records.steer(trace.id, large, by="me")
        await runs(client)


async def test_a_change_that_expands_keeps_no_trace_waiting(bus: Bus, client: Client) -> None:
    """Its value is a megabyte of empty lists, and its sender says that it is a number."""
    async with engine(bus, Limits()) as scripted:
        async with client.trace("tiny", "x", live={"alpha": 0.0}, max_tokens=100_000) as trace:
            await until(lambda: _began(scripted))
            await until(lambda: bus.command("HGET", bus.keys.record(trace.id), "lr"))
            bomb = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000
            value = msgspec.structs.replace(live_values({"alpha": 1.0})["alpha"], packed=bomb)
            await bus.records.steer(trace.id, {"alpha": value}, by="me")
            await until(lambda: bus.guard.malformed)
            assert await trace.steer(alpha=2.0) == 2
        await runs(client)


async def _began(scripted: ScriptedEngine) -> bool:
    return scripted.tracked > 0


async def test_a_trace_that_saves_too_much_fails_and_the_engine_goes_on(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(trace_save_bytes=2000)):
        with pytest.raises(tracewire.TraceFailed, match="at most 2000 bytes") as failed:
            async with client.trace("tiny", "x", acts(), max_tokens=100_000) as trace:
                await trace.result()
        assert failed.value.type == "LimitExceeded"
        await runs(client)


async def test_a_trace_that_is_paused_for_too_long_fails(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(paused_s=1)):
        with pytest.raises(tracewire.TraceFailed, match=r"at most 1 s \(--limit paused-s\)"):
            async with client.trace("tiny", "x", max_tokens=100_000) as trace:
                await trace.pause()
                await trace.result()
        await runs(client)


async def test_a_trace_ends_by_the_engines_deadline_whatever_it_asks_for(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(deadline_s=1)):
        for deadline in (None, 10_000.0):
            with pytest.raises(tracewire.TraceExpired, match=r"--limit deadline-s"):
                async with client.trace("tiny", "x", max_tokens=100_000, deadline=deadline) as trace:
                    await trace.result()


async def test_a_client_runs_as_many_traces_as_it_may(bus: Bus, client: Client) -> None:
    async with engine(bus, Limits(client_traces=1)), client.trace("tiny", "x", max_tokens=100_000) as trace:
        await until(lambda: bus.command("HGET", bus.keys.record(trace.id), "e"))
        with pytest.raises(tracewire.TraceRejected, match="may have 1") as refused:
            await client.trace("tiny", "y", max_tokens=1).result()
        assert refused.value.field == "client"
        # Another client is none the worse.
        await client.trace("tiny", "z", max_tokens=1, by="another").result()
