"""What is malformed in Redis, or more than a submission may be: it costs its own trace, or nobody, and is counted."""

from __future__ import annotations

import itertools
import logging
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import tests.fuzz as fuzz
import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.domain.limits import MAX_HELPERS, MAX_INVOKES, MAX_SOURCE, LimitExceeded
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.transport.guard import LINES, Guard, Malformed
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Block, Helper, Invoke, Steer, Submission
from tracewire_bus.wire.packing import pack, wire
from tracewire_engine.adapter import block_sources as sources
from tracewire_engine.adapter.block_sources import Sources
from tracewire_engine.adapter.engine_api import Prepared, Rejection
from tracewire_engine.adapter.prompts import Prompts
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.validation import Validator

PATIENCE = 30
ENGINE = "the-engine"


@asynccontextmanager
async def served(bus: Bus, embedded: str, prefix: str) -> AsyncIterator[tuple[Adapter, Client]]:
    """An adapter in this process, and a client of another bus."""
    engine = ScriptedEngine(partial(anyio.sleep, 0.005))
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, engine, info("tiny", engine=ENGINE)) as adapter,
            tracewire.connect(embedded, prefix=prefix) as client,
        ):
            while not await bus.registry.alive(ENGINE):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            yield adapter, client


async def runs(client: Client) -> None:
    """A valid trace is none the worse."""
    async with client.trace("tiny", "valid", acts(), max_tokens=5) as trace:
        assert (await trace.result()).token_ids == expected("valid", 5)[0]


async def counted(client: Client, least: int = 1) -> None:
    """The registry says that something malformed was found."""
    while (await client.engines.list())[0].malformed < least:  # noqa: ASYNC110
        await anyio.sleep(0.01)


def submission(trace: str = "t", **fields: Any) -> Submission:
    return Submission(**{"trace": trace, "model": "tiny", "invokes": [Invoke(prompt="x")], "detach": True} | fields)


async def failure(client: Client, trace: str) -> Any:
    """What a trace has ended with."""
    async with client.subscribe(trace) as events:
        async for event in events:
            if isinstance(event, tracewire.Final):
                return event.error
    raise AssertionError(trace)


@pytest.mark.parametrize(
    "fields",
    [
        ("k", "pause", "t", "x", "n", "abc"),
        ("k", "pause", "t", "x", "n", "9" * 5000),
        ("k", "drain", "w", "soon"),
        ("t", "x"),
        ("\xff", b"\xff", "k", "steer"),
    ],
    ids=["number", "long number", "time", "kind", "bytes"],
)
async def test_a_malformed_order_ends_no_engine(fields: tuple[Any, ...], bus: Bus, embedded: str, prefix: str) -> None:
    async with served(bus, embedded, prefix) as (adapter, client):
        await bus.command("XADD", bus.keys.control("t0", ENGINE), "*", *fields)
        if b"\xff" not in fields:
            await counted(client)
        await runs(client)
        assert not adapter.stopping.is_set()


@pytest.mark.parametrize("part", ["about", "entries", "disabled", "state"])
async def test_garbage_among_the_edits_ends_no_engine(part: str, bus: Bus, embedded: str, prefix: str) -> None:
    key = bus.keys.edits("tiny", part)
    await bus.command("HSET", key, "generation", b"\xff garbage", b"\xfe", b"1", "name", "x y z", "more", "1 2 3")
    async with served(bus, embedded, prefix) as (_, client):
        await runs(client)
        if part in ("about", "state"):
            await counted(client)


async def test_queue_entries_with_a_malformed_part_are_answered(bus: Bus, embedded: str, prefix: str) -> None:
    keys = [bus.keys.queue("tiny", part) for part in ("entries", "data", "client:raw", "turns", "bell", "state")]
    async with served(bus, embedded, prefix) as (_, client), anyio.create_task_group() as group:

        async def answered(trace: str, place: int) -> None:
            error = await failure(client, trace)
            # Only its schema says what its data is.
            assert error is None if place else error.field == "schema", trace

        for place, value in itertools.product(range(11), [None, "text", -1, 1e300, [1], {}]):
            trace = f"t{place}-{value!r}"
            entry: list[Any] = ["1.1", "1700000000000000", "raw", 0, "", 1, 300, 0, 2, 0, ""]
            entry[place] = value
            await bus.command("HSET", bus.keys.record(trace), "m", "tiny")
            packed, data = msgspec.msgpack.encode(entry), encode(submission(trace))
            await bus.command("EVAL", fuzz._RAW_ENTRY, len(keys), *keys, trace, packed, data)
            group.start_soon(answered, trace, place)
        await runs(client)


@pytest.mark.parametrize("name", ["v", "zn", "t", "l:alpha"])
async def test_a_malformed_record_fails_its_own_trace(name: str, bus: Bus, embedded: str, prefix: str) -> None:
    await bus.command("HSET", bus.keys.record("t"), "m", "tiny", name, b"\xc1 garbage")
    await bus.queue.put("tiny", "t", encode(submission(live=pack({"alpha": 0.5}))))
    async with served(bus, embedded, prefix) as (_, client):
        error = await failure(client, "t")
        assert "in Redis is malformed" in error.message
        assert bus.keys.record("t") in error.message
        await runs(client)
        await counted(client)


async def test_holders_and_running_records_that_are_malformed_end_no_engine(
    bus: Bus, embedded: str, prefix: str
) -> None:
    async with served(bus, embedded, prefix) as (adapter, client):
        await bus.command("SADD", bus.keys.queue("tiny", "holders"), b"\xff\xfe")
        async with client.trace("tiny", "hang", acts(), max_tokens=5) as trace:
            await trace.accepted()
            await bus.command("HSET", bus.keys.record(trace.id), "a", "no number")
            await counted(client, 2)
            await runs(client)
        assert not adapter.lost


async def test_what_engines_register_is_passed_over_where_it_is_malformed(bus: Bus, embedded: str, prefix: str) -> None:
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("SADD", bus.keys.engines(), b"\xff", "other")
        await bus.command("SET", bus.keys.heartbeat("other"), b"\xc1")
        assert [engine.name for engine in await client.engines.list()] == [ENGINE]


async def test_a_change_that_does_not_fit_reaches_no_worker(bus: Bus, embedded: str, prefix: str) -> None:
    """In the workers it would fail for all traces that are steered with it."""
    changes = [{"alpha": "text"}, {"beta": 1.0}, {"alpha": msgspec.Raw(b"\xd4\x7f\x00")}]
    async with (
        served(bus, embedded, prefix) as (adapter, client),
        client.trace("tiny", "hang", acts(), live={"alpha": 0.0}) as trace,
    ):
        await trace.accepted()
        key = bus.keys.control(bus.keys.tag(trace.id), ENGINE)
        for number, values in enumerate(changes, 1):
            change = msgspec.msgpack.encode([number, "me", 1, values])
            await bus.command("XADD", key, "*", "k", "steer", "t", trace.id, "d", change)
        await counted(client, len(changes))
        run: Any = adapter._claims.runs[trace.id]
        assert run.live.version == 0


async def test_a_malformed_event_is_the_consumers_error_of_its_own(bus: Bus, embedded: str, prefix: str) -> None:
    async with tracewire.connect(embedded, prefix=prefix) as client:
        assert await fuzz.consume(client, bus, 3, 300) == []
        # A path that no dict takes.
        step = [[["s", [["a"]], 1]]]
        event = ["o", 1, 0, 0, 0, 0, [1], "a", 0.0, None, None, None, step]
        await bus.command("HSET", bus.keys.record("p"), "m", "tiny")
        await bus.command("XADD", bus.keys.events("p"), "1-0", "v", "1.1", "d", msgspec.msgpack.encode(event))
        async with client.subscribe("p") as events:
            with pytest.raises(tracewire.BrokenStream):
                _ = (await anext(events)).delta


def test_the_log_names_some_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    with caplog.at_level(logging.WARNING, "tracewire"):
        for number in range(1000):
            assert guard.read(int, b"\xffx", key="tw:key", entry=f"1-{number}") is None
    assert guard.malformed == 1000
    assert len(caplog.records) == LINES
    assert "'1-0' of 'tw:key'" in caplog.messages[0]
    assert "no more of them for a minute" in caplog.messages[-1]
    with pytest.raises(Malformed, match="'a' of 'tw:record' in Redis is malformed: invalid literal"):
        guard.demand(int, "x", key="tw:record", entry="a")


# --- how much a submission may be -------------------------------------------------------------------------------------


def many(item: bytes, count: int) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + struct.pack(">I", count) + item * count)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"invokes": many(b"\x80", 1_000_000)}, "submission", "500000 values"),
        ({"invokes": [{"messages": [{"content": many(b"\x90", 40_000)}]}]}, "submission", "30000 lists"),
        ({"live": msgspec.msgpack.encode({"a": many(b"\x90", 40_000)})}, "live", "30000 lists"),
        ({"shared": pack({(n, n): 0 for n in range(2000)})}, "shared", "1024 keys that are tuples"),
        (
            {"block": {"name": "b", "source": "0", "variables": pack([{(n, n) for n in range(2000)}])}},
            None,
            "1024 keys",
        ),
        ({"invokes": [{"prompt": "x"}] * (MAX_INVOKES + 1)}, "invokes", "at most 1024 prompts, got 1025"),
        ({"context": {"a": "x" * 40_000_000}}, "submission", "may take 33554432"),
        ({"block": {"name": "b", "source": "x" * (MAX_SOURCE + 1)}}, "block", "longer than 100000 characters"),
        ({"deadline_s": float("nan")}, "deadline", "expected seconds from now, got nan"),
        ({"edits": ["e"] * 65}, "edits", "at most 64 edits, got 65"),
        ({"invokes": msgspec.Raw(b"\x91" * 200 + b"\xc0")}, "submission", "could not be decoded"),
    ],
)
async def test_an_engine_refuses_what_is_too_much_by_its_field(
    fields: dict[str, Any], field: str | None, says: str, bus: Bus, embedded: str, prefix: str
) -> None:
    data = msgspec.msgpack.encode({"trace": "t", "model": "tiny", "invokes": [{"prompt": "x"}], **fields})
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny")
        await bus.queue.put("tiny", "t", data)
        error = await failure(client, "t")
        assert says in error.message
        assert field is None or error.field == field
        await runs(client)


async def test_a_client_is_told_before_it_submits(bus: Bus, embedded: str, prefix: str) -> None:
    helpers = [Helper(name="h", source="pass")] * (MAX_HELPERS + 1)
    for fields, field in [
        ({"invokes": [Invoke(prompt="x")] * (MAX_INVOKES + 1)}, "invokes"),
        ({"interventions": [Steer(at="residual(1)", vector=1.0)] * 65}, "interventions"),
        ({"block": Block(name="b", source="pass", helpers=helpers)}, "block"),
        ({"block": Block(name="b", source="x" * (MAX_SOURCE + 1))}, "block"),
        ({"invokes": [Invoke(prompt="x", block=Block(name="b", source="x" * MAX_SOURCE))] * 11}, "block"),
        ({"invokes": [Invoke(prompt="x" * 40_000_000)]}, "submission"),
    ]:
        with pytest.raises(LimitExceeded) as caught:
            await bus.submit(submission(**fields))
        assert caught.value.field == field
    async with served(bus, embedded, prefix) as (_, client):
        with pytest.raises(tracewire.TraceRejected, match="33554432") as refused:
            async with client.trace("tiny", "x" * 40_000_000):
                pass
        assert refused.value.field == "submission"


@pytest.mark.parametrize(
    ("vector", "light"),
    [
        (np.ones(100_000, np.float32), True),
        (np.ones(300_000, np.float32), False),
        ([1] * 9000, False),
    ],
    ids=["a vector", "a large vector", "many numbers"],
)
async def test_only_what_holds_much_is_looked_at_on_a_thread(
    vector: Any, light: bool, bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, what comes in a burst would come one by one."""
    placing: list[int] = []
    place = Validator._place

    def noted(self: Validator, *arguments: Any) -> bytes | None:
        placing.append(threading.get_ident())
        return place(self, *arguments)

    monkeypatch.setattr(Validator, "_place", noted)
    data = encode(submission(interventions=[Steer(at="residual(1)", vector=wire(vector))]))
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny")
        await bus.queue.put("tiny", "t", data)
        # The model has one number in each position.
        assert (await failure(client, "t")).field.startswith("interventions")
    assert [thread == threading.get_ident() for thread in placing] == [light]


async def test_a_long_source_is_looked_at_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python compiles without letting the event loop run."""
    described = info()
    looked = Sources(described, ModuleTree(described))
    here: list[str] = []
    examine = sources._examine

    def noted(tree: ModuleTree, source: str, names: tuple[str, ...]) -> Any:
        here.append(source)
        return examine(tree, source, names)

    monkeypatch.setattr(sources, "_examine", noted)
    assert await looked.examine("pass", ("model",)) == (None, None)
    assert here == ["pass"]
    long = "x = 1\n" * 5000
    assert (await looked.examine(long + "model.wrong", ("model",))).problem.path == "wrong"  # type: ignore[union-attr]
    assert (await looked.examine(long + "(", ("model",))).error[0] == "SyntaxError"  # type: ignore[index]
    slow = await looked.examine("(lambda:0)\n" * 9000, ())
    assert slow.error is not None
    assert "to compile, and may take" in slow.error[2]
    assert here == ["pass"]


async def test_a_chat_template_runs_on_a_thread_and_bounded() -> None:
    threads: list[int] = []

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            threads.append(threading.get_ident())
            return "text"

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1]

        def get_vocab(self) -> dict[str, int]:
            return {"text": 1}

    prompts = Prompts(Tokenizer(), SimpleNamespace(max_model_len=100))
    message = {"role": "user", "content": "hello"}
    assert await prompts.token_ids(Invoke(messages=[message]), "") == [1]
    assert threads
    assert threads[0] != threading.get_ident()
    with pytest.raises(Rejection) as caught:
        await prompts.token_ids(Invoke(messages=[message] * 200), "")
    assert caught.value.failure.field == "messages"
    assert len(threads) == 1


class Params:
    """vLLM's check of a constraint, played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event | None = None) -> None:
        self.vllm_engine = pytest.importorskip("tracewire_engine.adapter.vllm_engine")
        self.sampling = pytest.importorskip("tracewire_engine.adapter.sampling")
        self.threads: list[int] = []
        self.began = threading.Event()
        self._hangs = hangs
        monkeypatch.setattr(self.vllm_engine.SamplingParams, "verify", self._verify())
        self.engine = object.__new__(self.vllm_engine.VllmEngine)
        self.engine._traced = {}
        config = SimpleNamespace(model_config=None, speculative_config=None, structured_outputs_config=None)
        processor = SimpleNamespace(tokenizer=None)
        self.engine.llm = SimpleNamespace(vllm_config=config, input_processor=processor, add_request=self._add)
        self.engine._constraints = self.sampling.ConstraintChecks(self.engine.llm)

    def _verify(self) -> Any:
        def verify(params: Any, *configs: Any) -> None:
            if params.structured_outputs is not None:
                self.threads.append(threading.get_ident())
                self.began.set()
                if self._hangs is not None:
                    self._hangs.wait(PATIENCE)

        return verify

    async def _add(self, request: str, prompt: Any, params: Any, **_: Any) -> Any:
        # On the event loop, as vLLM does it.
        params.verify(None, None, None, None)
        assert params.clone().structured_outputs.regex == "a+"

    async def start(self) -> None:
        """A request whose constraint vLLM looks at."""
        params = self.sampling.sampling_params(Invoke(prompt="x", sampling={"structured_outputs": {"regex": "a+"}}), "")
        await self.engine.start("r", Prepared(None, 1, params, 1, {}), 0)


async def test_vllm_looks_at_a_constraint_once_and_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Params(monkeypatch)
    await played.start()
    assert len(played.threads) == 1
    assert played.threads[0] != threading.get_ident()


async def test_a_constraint_that_vllm_looks_at_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    played = Params(monkeypatch, hangs)
    monkeypatch.setattr(played.sampling, "CONSTRAINT_S", 0.05)
    try:
        with anyio.fail_after(PATIENCE), pytest.raises(played.vllm_engine.Rejection) as caught:
            await played.start()
        assert played.began.is_set()
        assert caught.value.failure.field == "sampling.structured_outputs"
        assert "0.05 s" in caught.value.failure.message
    finally:
        hangs.set()


# --- all of it --------------------------------------------------------------------------------------------------------


def check(found: dict[str, Any]) -> None:
    """What a fuzz must find, by its seed."""
    assert found["adapter"] == "served to the end", found
    assert found["registered"], found
    assert not found["valid"]["wrong"], found
    assert found["valid"]["after_the_last_entry"] >= 8, found
    assert not found["consumers_wrong"], found
    assert found["malformed_in_registry"] > 0, found


async def test_a_fuzz_of_what_an_engine_reads(embedded: str, prefix: str) -> None:
    check(await fuzz.run(2000, 20261123, prefix=prefix, url=embedded))


@pytest.mark.full
async def test_a_long_fuzz_of_what_an_engine_reads() -> None:
    found = await fuzz.run(100_000, 20261124)
    check(found)
    assert found["loop"]["callback_cpu_ms"] < 100, found
