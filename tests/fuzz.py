"""Malformed and mutated entries in all that an engine reads from Redis, against a live adapter: `python -m tests.fuzz`.

Three processes: an embedded Redis; an adapter with a scripted engine behind its seam, which measures its own event
loop; and this one, which writes the entries and has valid traces run meanwhile, whose tokens and digests it compares.
Everything is drawn from one seed, which it prints.

Three times are told of the adapter's event loop, each the longest: `callback_cpu_ms`, how long one callback kept the
loop's thread busy; `held_ms`, how late the loop came while its process was busy for as long; `late_ms`, how late it
came for whatever reason, such as other processes on the machine. A run of as many valid entries says what they are
without the malformed ones (`--control`).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import logging
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np

import tracewire
from tests.support.memory_in_use import in_use_mib
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info
from tracewire.errors import TracewireError
from tracewire.gateway.json_values import to_json
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.process_memory import settle_memory
from tracewire_bus.store.submission_queue import Queue
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.messages import (
    Append,
    Block,
    DecodedOutput,
    Edit,
    Final,
    Helper,
    Invoke,
    Set,
    Submission,
)
from tracewire_bus.wire.packing import pack, wire
from tracewire_bus.wire.refs import VECTOR, ArrayRef, encode_ref
from tracewire_engine.adapter.engine_api import Prepared, Rejection
from tracewire_engine.adapter.service import Adapter, Settings

__all__ = ["Mutator", "main", "run"]

MODEL = "tiny"
#: How many entries are written at once.
_TOGETHER = 128
_packed = msgspec.msgpack.encode
#: A callback of the adapter's loop that takes more processor time than this, in seconds, is a stall.
STALL_S = 0.1

# --- the adapter's process --------------------------------------------------------------------------------------------


class Engine(ScriptedEngine):
    """A scripted engine whose requests end soon, as a model's do at its longest sequence."""

    async def prepare(self, submission: Submission, index: int, *more: Any, **named: Any) -> Prepared:
        """As the seam has it."""
        tokens = submission.invokes[index].sampling.get("max_tokens", 16)
        if not isinstance(tokens, int) or not 0 < tokens <= 256 or len(submission.invokes) > 4:
            raise Rejection("sampling.max_tokens", "expected 1 to 256 tokens, of at most 4 prompts")
        try:
            # Sampling params of vLLM's have types, and an `Accepted` repeats them.
            _packed(submission.invokes[index].sampling)
        except (TypeError, OverflowError) as error:
            raise Rejection("sampling", f"expected plain values: {error}") from None
        return await super().prepare(submission, index, *more, **named)


class Loop:
    """Measures the event loop that it runs on."""

    def __init__(self) -> None:
        self.callback_cpu = self.held = self.late = 0.0
        #: How many callbacks took more than `STALL_S`.
        self.stalls = 0
        self.longest: list[str] = []
        self.measuring = False
        self._began = 0.0
        self._stack: list[str] = []
        self.collecting = 0.0
        self._collecting = 0.0

    def watch_callbacks(self) -> None:
        """Measure each callback of the loop from now on."""
        run, loops = asyncio.Handle._run, threading.get_ident()

        def measured(handle: asyncio.Handle) -> None:
            self._began, self._stack = time.monotonic(), []
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            self._began = 0.0
            self.stalls += took > STALL_S and self.measuring
            if took > self.callback_cpu and self.measuring:
                self.callback_cpu, self.longest = took, self._stack

        def collected(phase: str, _: dict[str, int]) -> None:
            if phase == "start":
                self._collecting = time.thread_time()
            elif self.measuring:
                self.collecting = max(self.collecting, time.thread_time() - self._collecting)

        gc.callbacks.append(collected)

        def look() -> None:
            while True:
                time.sleep(0.01)
                if self._began and time.monotonic() - self._began > 0.04 and not self._stack:
                    # Without the lines of source, which would stay in memory.
                    frames = traceback.walk_stack(sys._current_frames()[loops])
                    stack = traceback.StackSummary.extract(frames, lookup_lines=False)
                    self._stack = [
                        f"{one.filename.rpartition('/')[2]}:{one.lineno} {one.name}" for one in stack[:8][::-1]
                    ]

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        threading.Thread(target=look, daemon=True).start()

    async def tick(self) -> None:
        """Measure how late the loop comes, for ever."""
        while True:
            began, busy = time.monotonic(), time.process_time()
            await asyncio.sleep(0.005)
            late = time.monotonic() - began - 0.005
            if self.measuring:
                self.late = max(self.late, late)
                self.held = max(self.held, min(late, time.process_time() - busy))


class Tracebacks(logging.Handler):
    """Keeps the last lines of the tracebacks in the log: each is of an error that the adapter did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if record.exc_info and len(self.seen) < 20:
            where = traceback.extract_tb(record.exc_info[2])[-3:]
            frames = " < ".join(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in reversed(where))
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r} in {frames}"[:700])


async def _serve(options: argparse.Namespace) -> None:
    loop, tracebacks = Loop(), Tracebacks()
    logging.getLogger("tracewire").addHandler(tracebacks)
    loop.watch_callbacks()
    engine = Engine(partial(anyio.sleep, 0.01))
    described = info(MODEL, 512)
    settings = Settings(heartbeat_s=0.5, lease_s=10.0, drain_s=0.0)
    begun_mib = growth_mib = 0.0
    async with Bus.open(options.url, prefix=options.prefix) as bus, anyio.create_task_group() as group:
        adapter = Adapter(engine, described, bus, settings)

        async def watch_signals() -> None:
            nonlocal begun_mib, growth_mib
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
                async for number in signals:
                    while number == signal.SIGTERM and adapter._writer.restorer._kept:  # noqa: ASYNC110
                        # What Redis has acknowledged in the last seconds stays for a while.
                        await anyio.sleep(0.05)
                    # Beside the loop, which is measured.
                    now_mib = await anyio.to_thread.run_sync(in_use_mib)
                    if number == signal.SIGTERM:
                        growth_mib = now_mib - begun_mib
                        adapter.stop()
                    begun_mib, loop.measuring = now_mib, True

        group.start_soon(watch_signals)
        group.start_soon(engine.run)
        group.start_soon(loop.tick)
        # As the engine's command does.
        settle_memory()
        print(f"ready {described.engine}", flush=True)
        await adapter.run()
        group.cancel_scope.cancel()
    told = {
        "callback_cpu_ms": round(loop.callback_cpu * 1000, 1),
        "stalls": loop.stalls,
        "held_ms": round(loop.held * 1000, 1),
        "late_ms": round(loop.late * 1000, 1),
        "garbage_ms": round(loop.collecting * 1000, 1),
        "longest_callback": loop.longest,
        "cpu_s": round(time.process_time(), 1),
        "malformed": bus.guard.malformed,
        "tracebacks": tracebacks.seen,
        "growth_mib": round(growth_mib, 1),
    }
    print(json.dumps(told), flush=True)


# --- mutations --------------------------------------------------------------------------------------------------------


class Mutator:
    """Makes malformed messages of valid ones. All of it is drawn from `chosen`."""

    def __init__(self, chosen: random.Random) -> None:
        self.chosen = chosen
        self.count: Counter[str] = Counter()

    def value(self) -> Any:
        """Something that hardly fits where it comes to stand."""
        chosen = self.chosen
        code, payload = chosen.randrange(-3, 8), chosen.randbytes(chosen.randrange(20))
        return chosen.choice(
            [
                *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1),
                *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
                *("", "x", "all", "\0", "a" * 300, "*" * 40 + "#", "residual(99)", "../..", "\u202e", "1.1"),
                *(b"", b"\xff", b"\x80", chosen.randbytes(30), [], {}, [[]], [1, "a"], {"a": 1}, {1: {2: 3}}),
                msgspec.Raw(b"\xa3\xed\xa0\x80"),  # half of a surrogate pair, as no text can have it
                msgspec.Raw(b"\xa2\xff\xfe"),
                msgspec.Raw(b"\x82\xa1a\x01\xa1a\x02"),
                msgspec.Raw(b"\x81" + _packed(msgspec.msgpack.Ext(3, bytes(9))) + b"\x01"),
                msgspec.Raw(b"\xdf\xff\xff\xff\xff"),
                msgspec.Raw(b"\xdd\x7f\xff\xff\xff"),
                msgspec.Raw(b"\xc1"),
                msgspec.Raw(b"\x91" * chosen.randrange(1, 3000) + b"\xc0"),
                msgspec.msgpack.Ext(code, payload),
                msgspec.msgpack.Ext(3, payload + bytes(600)),
                msgspec.msgpack.Ext(1, struct.pack("<H", 12) + _packed(("float32", (0, 2**63)))),
                msgspec.msgpack.Ext(5, _packed(("float32", (2**40, 2**40), bytes(16), "b", "n"))),
                wire((1, (2, [3j]))),
            ]
        )

    def mutated(self, tree: Any) -> Any:
        """`tree` (plain data) with one part of it changed."""
        places: list[tuple[Any, Any]] = []

        def walk(node: Any, depth: int = 0) -> None:
            if isinstance(node, dict | list):
                for key in list(node) if isinstance(node, dict) else range(len(node)):
                    places.append((node, key))
                    walk(node[key], depth + 1)

        walk(tree)
        if not places:
            return self.value()
        node, key = self.chosen.choice(places)
        found = node[key]
        what = self.chosen.choice(["remove", "replace", "replace", "wrap", "repeat", "packed", "text"])
        self.count[what] += 1
        if what == "remove":
            del node[key]
        elif what == "wrap":
            node[key] = self.chosen.choice([[found], {"a": found}, msgspec.Raw(b"\x91" * 60 + _packed(found))])
        elif what == "repeat":
            node[key] = [found] * self.chosen.choice([2, 40, 300])
        elif what == "packed" and isinstance(found, bytes):
            # A value within the value.
            try:
                node[key] = _packed(self.mutated(msgspec.msgpack.decode(found)))
            except (ValueError, TypeError, RecursionError):
                node[key] = self.bytes(found)
        elif what == "text" and isinstance(found, str):
            node[key] = "".join(self.chosen.choice([one, "*", "\n", "(", "\x00", "é"]) for one in found[:200])
        else:
            node[key] = self.value()
        return tree

    def bytes(self, data: bytes) -> bytes:
        """`data` cut short, lengthened, with bytes changed, or others altogether."""
        chosen = self.chosen
        match chosen.randrange(5):
            case 0:
                return data[: chosen.randrange(len(data) + 1)]
            case 1:
                return data + chosen.randbytes(chosen.randrange(1, 20))
            case 2:
                return chosen.randbytes(chosen.randrange(200))
            case 3:
                return chosen.choice(
                    [b"", b"\xc0", b"\x80", b"\x90", b"1", b"-1", b"nan", b"9" * 5000, b"1e400", b"\xff"]
                )
        changed = bytearray(data)
        for _ in range(chosen.randrange(1, 4)):
            if changed:
                changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        return bytes(changed)

    def message(self, data: bytes) -> bytes:
        """An encoded message, malformed."""
        if self.chosen.random() < 0.3:
            return self.bytes(data)
        tree = msgspec.msgpack.decode(data)
        for _ in range(self.chosen.choice([1, 1, 1, 2, 4])):
            tree = self.mutated(tree)
            if isinstance(tree, msgspec.Raw):
                return bytes(tree)
        try:
            return _packed(tree)
        except (TypeError, ValueError, RecursionError):
            return self.bytes(data)

    def huge(self) -> bytes:
        """A submission that would take long, or much memory, if nobody looked at how much it is."""

        def submission(**fields: Any) -> bytes:
            return _packed({"trace": "huge", "model": MODEL, "invokes": [{"prompt": "x"}], **fields})

        def many(item: bytes, count: int) -> msgspec.Raw:
            return msgspec.Raw(b"\xdd" + struct.pack(">I", count) + item * count)

        def source(text: str) -> bytes:
            return submission(block={"name": "b", "source": text})

        def steers(*shape: int) -> list[dict[str, Any]]:
            # Nobody has stored it.
            ref = ArrayRef("float32", shape, bytes(16), VECTOR + bytes(16).hex())
            return [{"do": "steer", "at": "model.layers.1.mlp", "vector": encode_ref(ref)}]

        steer = {"do": "steer", "at": "model.layers.*." + "*" * 60 + "#", "vector": 1.0}
        return self.chosen.choice(
            [
                lambda: submission(invokes=many(b"\x80", 1_000_000)),
                lambda: submission(invokes=[{"messages": [{"content": many(b"\x90", 1_000_000)}]}]),
                lambda: submission(invokes=[{"token_ids": many(b"\xcd\x10\x10", 400_000)}]),
                lambda: submission(live=_packed({"a": many(b"\x80", 500_000)})),
                lambda: submission(shared=_packed({"a": many(b"\x90", 29_000)})),
                lambda: submission(interventions=[steer] * 64),
                lambda: submission(interventions=many(_packed(steer), 20_000)),
                lambda: submission(interventions=steers(8)),
                lambda: submission(interventions=steers(2**60)),
                lambda: submission(context={"a": "x" * 40_000_000}),
                lambda: source("(lambda:0)\n" * 9000),
                lambda: source("class A:0\n" * 9900),
                lambda: source("a\n" * 50_000),
                lambda: source("model.wrong\n" * 8000),
                lambda: source("x" * 2_000_000),
                lambda: source("(" * 5000),
                lambda: source("-" * 90_000 + "1"),
                lambda: submission(block={"name": "b", "source": "pass", "paths": {"m": "x." * 20_000}}),
                lambda: submission(
                    block={"name": "b", "source": "pass", "helpers": [{"name": "h", "source": "pass"}] * 5000}
                ),
            ]
        )()


def _plain_submission(trace: str) -> Submission:
    block = Block(
        name="acts",
        source="acts = [].save()\nfor step in tracer.iter[:]:\n    acts.append(model.model.layers[2].output)\n",
        variables=pack({"a": np.zeros(4, np.float32), "b": [1, (2, 3)]}),
        helpers=[Helper(name="h", source="def h():\n    return 1\n")],
        paths={"layer": "model.layers.1"},
    )
    return Submission(
        trace=trace,
        model=MODEL,
        invokes=[Invoke(prompt="a", sampling={"max_tokens": 4, "temperature": 0.5, "seed": 1})],
        block=block,
        live=pack({"alpha": 0.5, "vector": np.zeros(4, np.float32)}),
        deadline_s=5.0,
        max_attempts=2,
        context={"traceparent": "00"},
        client="fuzz",
        priority=1,
        detach=True,
    )


# --- what is written --------------------------------------------------------------------------------------------------

#: Puts an entry on a queue as it is given, packed.
_RAW_ENTRY = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], 1, string.rep('0', 16) .. ARGV[1])
redis.call('ZADD', KEYS[4], 1, 'raw')
redis.call('RPUSH', KEYS[5], 1)
local waiting = tonumber(redis.call('HGET', KEYS[6], 'waiting')) or 0
redis.call('HSET', KEYS[6], 'waiting', waiting + 1)
return 1
"""


class Writer:
    """Writes malformed entries wherever an engine reads."""

    def __init__(self, bus: Bus, engine: str, seed: int) -> None:
        self._bus = bus
        self._keys = bus.keys
        self._engine = engine
        self._seed = seed
        self.written: Counter[str] = Counter()
        self.mutations: Counter[str] = Counter()
        self._victims = [""]
        self._kinds = {
            "submission": 40,
            "raw_entry": 8,
            "order": 25,
            "record": 10,
            "edit": 5,
            "registry": 8,
            "beside": 8,
        }

    async def write(self, number: int) -> None:
        """Write the entry of this number, which the seed and the number alone determine."""
        one = copy.copy(self)
        one._number = number
        one.chosen = random.Random(f"{self._seed}/{number}")
        one.mutator = Mutator(one.chosen)
        (kind,) = one.chosen.choices([*self._kinds], [*self._kinds.values()])
        self.written[kind] += 1
        await getattr(one, kind)()
        self.mutations += one.mutator.count

    def _name(self) -> str:
        return f"fuzz-{self._number}"

    async def valid(self, number: int) -> None:
        """One valid submission, for a run to compare with."""
        self.written["valid"] += 1
        await self._bus.submit(_plain_submission(f"valid-{number}"))

    async def submission(self) -> None:
        """A submission, through the queue's own script."""
        chosen, trace = self.chosen, self._name()
        submission = _plain_submission(trace)
        if chosen.random() < 0.1:
            # The scripted engine knows no shared values: those that could be some would wait for it.
            submission.shared = self.mutator.bytes(b"\x81\xa1a\x90")[:3]
        data = encode(submission)
        data = self.mutator.huge() if chosen.randrange(500) == 0 else self.mutator.message(data)
        if chosen.random() < 0.05:
            trace = chosen.choice(["", "\0", "a" * 300, "}{", "\n", "final", f"{trace}\u00e9"]) + str(self._number)
        schema = chosen.choice(["1.1"] * 9 + ["", "9.0", "x", "1.99", "9" * 30, "1"])
        queue: Queue = self._bus.queue
        try:
            await queue.put(MODEL, trace, data, schema=schema, client=f"c{chosen.randrange(5)}", tries=2)
        except BusError as error:
            # Redis takes no submission that is larger than engines take.
            if "LIMIT submission-bytes" not in str(error):
                raise
            self.mutations["refused by Redis"] += 1

    async def raw_entry(self) -> None:
        """An entry whose own data is malformed, of a submission that is not."""
        chosen, trace = self.chosen, self._name().encode()
        entry = ["1.1", "1700000000000000", "raw", 0, "", self._number, 300, 0, 2, 0, ""]
        if chosen.random() < 0.5:
            entry[chosen.randrange(len(entry))] = self.mutator.value()
            try:
                packed = _packed(entry)
            except (TypeError, ValueError):
                packed = b"\xc1"
        else:
            packed = self.mutator.bytes(_packed(entry))
        if chosen.random() < 0.1:
            trace += b"\xff\xfe"
        keys = [self._keys.queue(MODEL, part) for part in ("entries", "data", "client:raw", "turns", "bell", "state")]
        data = encode(_plain_submission(trace.decode("utf-8", "replace")))
        await self._bus.command("EVAL", _RAW_ENTRY, len(keys), *keys, trace, packed, data)

    async def order(self) -> None:
        """An order on one of the engine's control streams."""
        chosen = self.chosen
        trace = chosen.choice([*self._victims, "nobody", "", "a" * 500])
        change = _packed([chosen.choice([1, 2, 2**40, -1]), "me", 1, {"alpha": 0.25, "vector": wire(np.ones(4, "f4"))}])
        fields: dict[bytes, bytes] = {
            b"k": chosen.choice([b"steer", b"steer", b"pause", b"resume", b"cancel", b"later"]),
            b"t": trace.encode(),
            b"d": self.mutator.message(change),
            b"b": b"me",
            b"r": b"why",
            b"n": b"%d" % chosen.randrange(5),
        }
        for _ in range(chosen.randrange(3)):
            name = chosen.choice([*fields])
            if chosen.random() < 0.3:
                fields[name] = b""
            else:
                fields[name] = self.mutator.bytes(fields[name])
        if chosen.random() < 0.05:
            # Anybody may ask an engine to drain. Not like this.
            fields.update({b"k": b"drain", b"w": chosen.choice([b"x", b"-1", b"nan", b"\xff"])})
        elif chosen.random() < 0.2:
            del fields[chosen.choice([*fields])]
        flat = [part for pair in fields.items() for part in pair] or [b"", b""]
        if chosen.random() < 0.1:
            flat += flat[:2]
        tag = self._keys.tag(trace) if chosen.random() < 0.9 else chosen.choice(self._keys.tags)
        await self._bus.command("XADD", self._keys.control(tag, self._engine), "*", *flat)

    async def record(self) -> None:
        """A valid submission whose record is malformed, before it is taken or while it runs."""
        chosen, trace = self.chosen, self._name()
        submission = _plain_submission(trace)
        submission.invokes[0].sampling["max_tokens"] = chosen.choice([4, 200])
        record, field = self._keys.record(trace), chosen.choice("ampcetvxzrlf")
        name: bytes = {"l": b"l:alpha", "f": b"f:alpha", "z": b"zn"}.get(field, field.encode())
        value = self.mutator.bytes(b"1")
        if field == "l" and chosen.random() < 0.5:
            name, value = b"l:" + chosen.randbytes(3), self.mutator.message(_packed(0.5))
        garbage = ("HSET", record, name, value)
        if chosen.random() < 0.5:
            if chosen.random() < 0.3:
                await self._bus.command(
                    "ZADD", self._keys.changes(trace), 1, self.mutator.bytes(_packed([1, "m", 1, {}]))
                )
            await self._bus.command("HSET", record, "m", MODEL, "v", 1)
            await self._bus.command(*garbage)
            await self._bus.queue.put(MODEL, trace, encode(submission), client="records", tries=2)
        else:
            await self._bus.submit(submission)
            await self._bus.command(*garbage)
            self._victims.append(trace)
            del self._victims[1:-20]

    async def edit(self) -> None:
        """One of the model's edits."""
        chosen, keys = self.chosen, self._keys
        name = f"e{chosen.randrange(12)}".encode() if chosen.random() < 0.9 else chosen.randbytes(4)
        edit = encode(Edit(name=name.decode("utf-8", "replace"), scope="asked", block=_plain_submission("e").block))
        commands: list[tuple[Any, ...]] = [
            ("HSET", keys.edits(MODEL, "entries"), name, self.mutator.message(edit)),
            ("HSET", keys.edits(MODEL, "about"), name, self.mutator.bytes(b"1 2 1700000000000 1.1")),
            ("HSET", keys.edits(MODEL, "disabled"), name, self.mutator.bytes(b"why")),
            ("HSET", keys.edits(MODEL, "state"), "generation", self.mutator.bytes(b"%d" % self._number)),
            ("HDEL", keys.edits(MODEL, "entries"), name),
        ]
        await self._bus.command(*chosen.choice(commands))
        await self._bus.command("HSET", keys.edits(MODEL, "state"), "generation", self._number)
        await self._bus.command("XADD", keys.edits(MODEL, "changes"), "*", "g", chosen.randbytes(3))

    async def registry(self) -> None:
        """What other engines say of themselves, and what they hold."""
        chosen, keys = self.chosen, self._keys
        other = chosen.choice([b"other-%d" % chosen.randrange(30), chosen.randbytes(6), b"\xff", b""])
        said = encode(info(MODEL, 4, engine="other-1"))
        commands: list[tuple[Any, ...]] = [
            ("SADD", keys.engines(), other),
            ("SET", keys.engine("").encode() + other, self.mutator.message(said), "PX", 3000),
            ("SET", keys.engine("").encode() + other + b":now", self.mutator.message(said), "PX", 3000),
            ("SADD", keys.queue(MODEL, "holders"), other),
            ("HSET", keys.queue(MODEL, "taken"), self.mutator.bytes(b"fuzz-1"), other),
        ]
        await self._bus.command(*chosen.choice(commands))

    async def beside(self) -> None:
        """Counters, leases, deadlines, the firehose, and lists of what has ended."""
        chosen, keys = self.chosen, self._keys
        tag, raw = chosen.choice(keys.tags), self.mutator.bytes(b"17")
        state = chosen.choice(["waiting", "number", "turn", "since", "span", "count"])
        commands: list[tuple[Any, ...]] = [
            ("HSET", keys.queue(MODEL, "state"), state, raw),
            ("SADD", keys.queue(MODEL, "leases"), raw),
            ("SADD", keys.queue(MODEL, "lease:") + "x", raw),
            ("ZADD", keys.queue(MODEL, "turns"), 1, raw),
            ("ZADD", keys.queue(MODEL, "suspects"), 1, raw),
            ("ZADD", keys.deadlines(tag), 1, raw),
            ("XADD", keys.firehose(tag), "*", raw, raw, "a", raw, "p", raw),
            ("HSET", keys.ended_bytes(tag), chosen.choice([b"", raw]), raw),
            ("ZADD", keys.ended(tag), 1, raw),
            ("XADD", keys.dead(), "*", raw, raw),
            ("RPUSH", keys.queue(MODEL, "bell"), raw),
        ]
        await self._bus.command(*chosen.choice(commands))


# --- valid traces, and consumers --------------------------------------------------------------------------------------


class Valid:
    """Valid traces that run all the while, one after another in each of some tasks."""

    def __init__(self, client: tracewire.Client) -> None:
        self._client = client
        self.verified = 0
        self.wrong: list[str] = []
        self.over = False

    async def run(self, task: int) -> None:
        """Until `over`."""
        number = 0
        while not self.over:
            number += 1
            prompt = f"valid {task}/{number}"
            try:
                async with self._client.trace(MODEL, prompt, acts(), max_tokens=24) as trace:
                    result = await trace.result()  # compares the digests
            except Exception as error:
                self.wrong.append(f"{prompt}: {error!r}"[:500])
                continue
            tokens, saved = expected(prompt, 24)
            if result.token_ids == tokens and [list(one) for one in result.saves["acts"]] == saved:
                self.verified += 1
            else:
                self.wrong.append(f"{prompt}: other tokens or saves than it should have")


async def consume(client: tracewire.Client, bus: Bus, seed: int, count: int) -> list[str]:
    """Have consumers read streams with malformed entries. Returns what was raised that a caller could not expect."""
    mutator = Mutator(random.Random(seed))
    wrong: list[str] = []
    for number in range(count):
        trace = f"stream-{number}"
        item = wire(np.ones(3, np.float32))
        first, second = Set(path=("s",), value=[item]), Append(path=("s",), items=[item])
        events = [
            DecodedOutput(attempt=1, seq=0, token_ids=[1], text="a", deltas=[[Set(path=("s",), value=[item])]]),
            DecodedOutput(
                attempt=1, seq=1, index=1, token_ids=[2], text="b", deltas=[[Append(path=("s",), items=[item])]]
            ),
            Final(attempt=1, seq=2, status="finished"),
        ]
        await bus.command("HSET", bus.keys.record(trace), "m", MODEL)
        which = mutator.chosen.randrange(len(events))
        for place, event in enumerate(events):
            data = encode(event)
            id_ = tracewire_final if isinstance(event, Final) else f"1-{place}"
            await bus.command(
                *("XADD", bus.keys.events(trace), id_, "v", schema_text(), "d"),
                mutator.message(data) if place == which else data,
            )
        try:
            async with client.subscribe(trace, since="start") as events_of:
                async for one in events_of:
                    # As a gateway answers.
                    to_json(getattr(one, "delta", None), "small", trace)
            await client.get_state(trace)
        except TracewireError:
            pass
        except Exception as error:
            wrong.append(f"{trace}: {error!r}"[:500])
    return wrong


tracewire_final = "18446744073709551615-18446744073709551615"


# --- all of it --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _adapter(url: str, prefix: str) -> AsyncIterator[tuple[Any, str]]:
    command = [sys.executable, "-m", "tests.fuzz", "--serve", "--url", url, "--prefix", prefix]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            line = await _line(process)
            yield process, line.split()[1]
        finally:
            if process.returncode is None:
                process.terminate()


async def _line(process: Any) -> str:
    text = b""
    while not text.endswith(b"\n"):
        text += await process.stdout.receive(1 if not text else 65536)
    return text.decode().splitlines()[-1]


async def run(count: int, seed: int, *, control: bool = False, prefix: str = "fuzz", url: str = "") -> dict[str, Any]:
    """Write `count` entries. Returns what came of it."""
    if not url:
        async with EmbeddedServer.start() as server:
            return await run(count, seed, control=control, prefix=prefix, url=server.url)
    began = time.monotonic()
    async with (
        _adapter(url, prefix) as (process, engine),
        Bus.open(url, prefix=prefix) as bus,
        tracewire.connect(url, prefix=prefix) as client,
    ):
        while not await bus.registry.alive(engine):  # noqa: ASYNC110
            await anyio.sleep(0.05)
        writer, valid = Writer(bus, engine, seed), Valid(client)
        process.send_signal(signal.SIGUSR1)
        lost = ""
        async with anyio.create_task_group() as group:
            for task in range(4):
                group.start_soon(valid.run, task)
            for first in range(0, count, _TOGETHER):
                async with anyio.create_task_group() as batch:
                    for number in range(first, min(count, first + _TOGETHER)):
                        batch.start_soon(writer.valid if control else writer.write, number)
                while process.returncode is None and await bus.queue.waiting(MODEL) > 256:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                if process.returncode is not None:
                    lost = f"the adapter ended with status {process.returncode}"
                    break
                if first <= count // 5 < first + _TOGETHER:
                    # The count in the queue's state may be among what was written.
                    with anyio.move_on_after(120):
                        while await bus.command("ZCARD", bus.keys.queue(MODEL, "turns")):  # noqa: ASYNC110
                            await anyio.sleep(0.02)
                    # What the adapter has in use from here on is its growth.
                    process.send_signal(signal.SIGUSR1)
            unwritten = valid.verified
            # All that waits is answered, and valid traces still run.
            with anyio.move_on_after(120):
                while not lost and (  # noqa: ASYNC110
                    valid.verified < unwritten + 8 or await bus.command("ZCARD", bus.keys.queue(MODEL, "turns"))
                ):
                    await anyio.sleep(0.1)
            valid.over = True
            if lost:
                group.cancel_scope.cancel()
        registered = next((one for one in await client.engines.list(model=MODEL) if one.name == engine), None)
        wrong = [] if control else await consume(client, bus, seed, min(200, max(50, count // 100)))
        loop: dict[str, Any] = {}
        if not lost:
            process.terminate()
            loop = json.loads(await _line(process))
            await process.wait()
    return {
        "seed": seed,
        "entries": count,
        "written": dict(writer.written),
        "mutations": dict(writer.mutations),
        "adapter": lost or "served to the end",
        "registered": registered is not None,
        "malformed_in_registry": registered.malformed if registered else None,
        "loop": loop,
        "growth_mib": loop.get("growth_mib", 0.0),
        "valid": {"verified": valid.verified, "after_the_last_entry": valid.verified - unwritten, "wrong": valid.wrong},
        "consumers_wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print nothing but the result, as JSON")
    parser.add_argument("--control", action="store_true", help="write valid entries instead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help="a Redis to use instead of one of its own")
    parser.add_argument("--prefix", default="fuzz")
    options = parser.parse_args(arguments)
    if options.serve:
        anyio.run(_serve, options)
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    if not options.json:
        print(f"seed {seed}", flush=True)
    found = anyio.run(
        partial(run, options.count, seed, control=options.control, prefix=options.prefix, url=options.url)
    )
    print(json.dumps(found, indent=2))
    wrong = found["valid"]["wrong"] or found["consumers_wrong"] or not found["registered"]
    return 1 if wrong or found["adapter"] != "served to the end" else 0


if __name__ == "__main__":
    sys.exit(main())
