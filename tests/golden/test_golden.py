"""Two versions on one bus: what an earlier schema wrote is read, and what a later minor one may add is passed over.

`tests/golden/` has what each schema put on the bus when it was current; `record.py` there writes it down.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import tracewire
from tests.golden import record
from tests.support.scripted_engine import ScriptedEngine, expected, serving
from tracewire import Accepted, Client, Final, Output, Restarted, Steered
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import decode_event, encode, schema_text
from tracewire_bus.wire.messages import REQUEST_SCHEMA, SCHEMA, FirstToken, Invoke, Message, Submission
from tracewire_bus.wire.packing import wire

PATIENCE = 60


SCHEMAS = sorted(folder.name for folder in record.HERE.iterdir() if folder.name[0].isdigit())


#: What stands on entries of the next minor version.
NEXT = f"{SCHEMA[0]}.{SCHEMA[1] + 1}"
#: Likewise on submissions.
NEXT_REQUEST = f"{REQUEST_SCHEMA[0]}.{REQUEST_SCHEMA[1] + 1}"


def written(schema: str, file: str) -> dict[str, Any]:
    """What a schema wrote."""
    content: dict[str, Any] = json.loads((record.HERE / schema / f"{file}.json").read_text())
    return content


MESSAGES = {f"{schema}-{name}": one for schema in SCHEMAS for name, one in written(schema, "messages").items()}


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


def lacks(then: Any, now: Any, where: str = "") -> list[str]:
    """Where what was decoded then is not in what is decoded now. What a struct has more of, it may."""
    if isinstance(then, dict) and isinstance(now, dict) and "is" in then:
        return [
            problem
            for name, value in then.items()
            for problem in (
                [f"{where}.{name} is gone"] if name not in now else lacks(value, now[name], f"{where}.{name}")
            )
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [
            problem for i, pair in enumerate(zip(then, now, strict=True)) for problem in lacks(*pair, f"{where}[{i}]")
        ]
    return [] if then == now else [f"{where} was {then!r} and is {now!r}"]


def widened(value: Any) -> Any:
    """What a later version might send for a message: every struct in it has a field more."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        if config.array_like:
            tag = [] if config.tag is None else [config.tag]
            return [*tag, *(widened(getattr(value, name)) for name in value.__struct_fields__), {"added": [1]}]
        tagged = {} if config.tag is None else {config.tag_field: config.tag}
        fields = {name: widened(getattr(value, name)) for name in value.__struct_fields__}
        return {**tagged, **fields, "added": {"later": [1]}}
    if isinstance(value, list | tuple):
        return [widened(item) for item in value]
    if isinstance(value, dict):
        return {key: widened(item) for key, item in value.items()}
    return wire(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", MESSAGES)
def test_what_was_written_then_is_read_now(name: str) -> None:
    one = MESSAGES[name]
    read = record.decoded(one["decodes"], bytes.fromhex(one["data"]))
    assert lacks(one["value"], json.loads(json.dumps(record.plain(read)))) == []


@pytest.mark.parametrize("name", record.every_message())
def test_what_a_later_minor_version_adds_is_passed_over(name: str) -> None:
    decodes, message = record.every_message()[name]
    plain = record.plain(record.decoded(decodes, encode(message)))
    later = msgspec.msgpack.encode(widened(message))
    assert b"added" in later
    assert record.plain(record.decoded(decodes, later)) == plain


def test_a_message_that_is_not_written_down_is_noticed() -> None:
    """Each struct of the schema stands in some golden file: whoever adds one adds it to `record.py`."""
    seen: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("is"), str):
                seen.add(value["is"])
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    for decodes, message in record.every_message().values():
        look(record.plain(record.decoded(decodes, encode(message))))

    def concrete(kind: type[Message]) -> set[str]:
        # What the SDK exports has its name for a module.
        below = [concrete(child) for child in kind.__subclasses__() if vars(messages).get(child.__name__) is child]
        # Bases, the forms in which what is encoded already is passed on, and a bare array.
        bare = below or kind.__name__.startswith("Raw") or kind is FirstToken
        own = set() if bare else {record.RECORDED.get(kind.__name__, kind.__name__)}
        return own.union(*below)

    assert concrete(Message) - seen == set(), "add them to every_message() in tests/golden/record.py"


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_bus_that_an_earlier_version_was_at_work_on_is_taken_over(
    schema: str, client: Client, bus: Bus, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended is read whole; what its engine left in the middle runs again here, and what waited runs here."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    await record.restore(bus, prefix, written(schema, "bus"))

    (old,) = await client.models.list()
    assert (old.name, old.engines) == ("tiny", ("engine-old",))
    state = await client.get_state("ended")
    assert state.status == "finished"
    assert state.token_ids == expected("ended", record.TOKENS)[0]
    fold = Fold(verifying=True)
    for _, flat in await bus.command("XRANGE", bus.keys.events("ended"), "-", "+"):
        fold.apply(decode_event(dict(zip(flat[::2], flat[1::2], strict=True))[b"d"]))
    # Its digests are of the schema that it was written in.
    assert fold.manifest
    fold.verify()
    events = [event async for event in client.subscribe("ended")]
    assert [type(event).__name__ for event in events].count("Final") == 1
    assert [change.values for event in events if isinstance(event, Steered) for change in event.changes] == [
        {"alpha": 1.5}
    ]
    half = await client.get_state("middle")
    # From a snapshot, and what came behind it.
    assert half.token_ids == expected("middle", record.TOKENS)[0][: len(half.token_ids)]
    assert len(half.token_ids) >= record.SO_FAR - 1
    (letter,) = await client.dead_letters.list()
    assert letter.submission.invokes == [Invoke(prompt="buried")]
    reader = bus.control("engine-old")
    orders = await reader.read(1000)
    await reader.aclose()
    assert [(order.kind, order.trace) for order in orders] == [
        ("steer", "middle"),
        ("pause", "middle"),
        ("resume", "middle"),
    ]

    async with client.watch(since="start") as watch:
        told = [(event.type, event.trace_id) for event in [await anext(watch) for _ in range(8)]]
        assert sorted(kind for kind, trace in told if trace == "ended") == sorted(
            ["queued", "accepted", "paused", "resumed", "final"]
        )
        await bus.registry.unregister("engine-old")
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0))):
            with anyio.fail_after(PATIENCE):
                for trace, attempts in (("middle", [1, 2]), ("waiting", [1])):
                    tail = [event async for event in client.subscribe(trace)]
                    assert isinstance(tail[-1], Final)
                    assert tail[-1].status == "finished"
                    assert sorted({event.attempt for event in tail if isinstance(event, Output | Accepted)}) in (
                        attempts,
                        attempts[1:],
                    )
                    again = await client.get_state(trace)
                    assert again.token_ids == expected(trace, record.TOKENS)[0]
                    if trace == "middle":
                        assert any(isinstance(event, Restarted) for event in tail)
                        # It begins with what the earlier engine had been steered to and had not read.
                        (begun,) = [event for event in tail if isinstance(event, Accepted) and event.attempt == 2]
                        assert begun.live == {"alpha": 2.5}
    assert await bus.queue.waiting("tiny") == 0


async def test_a_trace_that_a_later_minor_version_writes_is_followed(client: Client, bus: Bus, prefix: str) -> None:
    """Every event has fields more, a kind of event comes that is not known here, and entries have fields more."""
    keys = written(SCHEMAS[-1], "bus")
    name = next(key for key in keys if key.endswith(":events:ended"))
    await record.restore(bus, prefix, {name: keys[name]})
    entries = await bus.command("XRANGE", bus.keys.events("ended"), "-", "+")
    await bus.command("DEL", bus.keys.events("ended"))

    seq = 0
    for _, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        event = decode_event(fields[b"d"])
        if event.seq == 4:
            novel = msgspec.msgpack.encode(["novelty", 1, seq, {"what": "ever"}])
            await bus.command("XADD", bus.keys.events("ended"), f"1-{seq}", "v", NEXT, "d", novel, "w", "more")
            seq += 1
        event.seq = seq
        data = msgspec.msgpack.encode(widened(event))
        await bus.command("XADD", bus.keys.events("ended"), event.id, "v", NEXT, "d", data, "w", "more")
        seq += 1

    events = [event async for event in client.subscribe("ended")]
    assert len(events) == len(entries)
    ids, saved = expected("ended", record.TOKENS)
    # Its digests agree, too.
    state = await client.get_state("ended")
    assert (state.status, state.token_ids) == ("finished", ids)
    assert [list(map(float, array)) for array in state.saves["acts"]] == saved


async def test_orders_entries_and_lifecycles_of_a_later_minor_version_are_passed_over(client: Client, bus: Bus) -> None:
    tag = bus.keys.tags[0]
    control = bus.keys.control(tag, "e")
    await bus.command("XADD", control, "*", "k", "dance", "t", "t", "z", "1")
    await bus.command("XADD", control, "*", "k", "cancel", "t", "t", "b", "somebody", "r", "", "z", "1")
    reader = bus.control("e")
    assert [order.kind for order in await reader.read(1000)] == ["cancel"]
    await reader.aclose()

    _, engine = record.every_message()["engine"]
    later = widened(msgspec.structs.replace(engine, schema=NEXT, state="pondering"))  # type: ignore[type-var]
    await bus.command("SET", bus.keys.engine("e"), msgspec.msgpack.encode(later))
    await bus.command("SADD", bus.keys.engines(), "e")
    assert [model.name for model in await client.models.list()] == ["m"]

    await bus.command("XADD", bus.keys.firehose(tag), "*", "k", "blessed", "t", "t", "m", "m", "q", "1")
    async with client.watch(since="start") as watch:
        event = await anext(watch)
    assert (event.type, event.trace_id) == ("blessed", "t")


@pytest.mark.parametrize(
    ("schema", "body", "status", "says"),
    [
        pytest.param(NEXT_REQUEST, {}, "finished", None, id="fields more"),
        pytest.param(
            NEXT_REQUEST, {"interventions": [{"do": "dance"}]}, "rejected", "dance", id="a strange intervention"
        ),
        pytest.param(f"{REQUEST_SCHEMA[0] + 1}.0", {}, "rejected", "update it", id="a later major version"),
    ],
)
async def test_a_submission_of_a_later_version_runs_or_is_refused_with_the_reason(
    client: Client, bus: Bus, schema: str, body: dict[str, Any], status: str, says: str | None
) -> None:
    submission = Submission(trace="t", model="tiny", invokes=[Invoke(prompt="later", sampling={"max_tokens": 3})])
    await bus.records._connections.commands(bus.records.create_command(submission, {}))
    data = msgspec.msgpack.encode({**widened(submission), **body})
    await bus.queue.put("tiny", "t", data, schema=schema)
    async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0))):
        with anyio.fail_after(PATIENCE):
            events = [event async for event in client.subscribe("t")]
    final = events[-1]
    assert isinstance(final, Final)
    assert final.status == status
    if says is not None:
        assert final.error is not None
        assert says in final.error.message


def test_the_schema_that_is_written_now_is_written_down_or_newer() -> None:
    """A schema that was changed has a new minor number; `python -m tests.golden.record` writes it down."""
    latest = max(tuple(map(int, name.split("."))) for name in SCHEMAS)
    assert latest <= SCHEMA
    assert latest[0] == SCHEMA[0]
    assert schema_text() == f"{SCHEMA[0]}.{SCHEMA[1]}"
