"""Large arrays of declared interventions: stored once by a client, and referred to by every trace that has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage, engine_info, tiny
from tests.support.scripted_engine import ScriptedEngine, info, serving
from tests.support.vectors import encoded
from tracewire import Ablate, Clamp, Client, Patch, Probe, Steer, TraceRejected
from tracewire.traces import vectors
from tracewire.traces.vectors import ReferredArrays, ReferredLists
from tracewire_bus.bus import Bus
from tracewire_bus.domain import limits
from tracewire_bus.domain.limit_table import Limits
from tracewire_bus.store.vectors import MISSING, VECTOR_BYTES, Vectors
from tracewire_bus.transport.errors import NotAllowed
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import Submission
from tracewire_bus.wire.refs import ArrayRef

Engine = Callable[..., Any]

PATIENCE = 60
HIDDEN = 2048
#: Of an engine that fetches vectors, and of those that do not.
NEW = {"hidden_size": HIDDEN, "schema": schema_text()}
OLD = [{"hidden_size": HIDDEN, "schema": schema} for schema in ("2.1", "1.2", "")]


def vector(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal(HIDDEN).astype(np.float32)


def declared() -> list[Any]:
    """Of each kind, with four vectors, two of them used twice."""
    return [
        Steer("residual(0)", vector(0)),
        Clamp("residual(1)", vector(0), min=0.0),
        Ablate("residual(2)", np.stack([vector(1), vector(2)])),
        Probe("p", "residual(0)", weight=vector(3), bias=0.5),
        Probe("q", "residual(0)", weight=vector(3)),
    ]


class Taken:
    """The submissions that an engine took, with the arrays that it fetched for their references."""

    def __init__(self) -> None:
        self.submissions: list[Submission] = []
        self.arrays: list[list[Any]] = []

    async def __call__(self, stage: Stage) -> None:
        self.submissions.append(stage.submission)
        given = [
            getattr(one, name)
            for one in stage.submission.interventions
            for name in ("vector", "direction", "weight")
            if hasattr(one, name)
        ]
        self.arrays.append([await stage.bus.vectors.fetch(one) if isinstance(one, ArrayRef) else one for one in given])
        await tiny(stage)

    @property
    def references(self) -> list[int]:
        """How many references each submission has."""
        return [
            sum(
                isinstance(getattr(one, name), ArrayRef)
                for one in taken.interventions
                for name in one.__struct_fields__
            )
            for taken in self.submissions
        ]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[set[ArrayRef]]:
    """What each call has written to Redis."""
    found: list[set[ArrayRef]] = []
    write = Vectors._write

    async def noted(self: Vectors, payloads: dict[ArrayRef, bytes]) -> None:
        found.append(set(payloads))
        await write(self, payloads)

    monkeypatch.setattr(Vectors, "_write", noted)
    return found


async def run(client: Client, interventions: list[Any], model: str = "tiny") -> Any:
    with anyio.fail_after(PATIENCE):
        async with client.trace(model, "hello", interventions=interventions, max_tokens=2) as trace:
            return await trace.result()


async def test_traces_refer_to_arrays_that_are_stored_once(
    client: Client, engine: Engine, writes: list[set[ArrayRef]]
) -> None:
    taken = Taken()
    async with engine(taken, **NEW):
        await client.models.get("tiny", timeout=PATIENCE)
        async with anyio.create_task_group() as group:
            for _ in range(12):
                group.start_soon(run, client, declared())
        await run(client, declared())
        await run(client, [Steer("residual(0)", vector(9)), *declared()])
    assert [len(one) for one in writes] == [3, 1]
    assert taken.references == [5] * 13 + [6]
    wanted = [vector(0), vector(0), np.stack([vector(1), vector(2)]), vector(3), vector(3)]
    for arrays in taken.arrays:
        for mine, other in zip(arrays[-5:], wanted, strict=True):
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other)


async def test_a_list_that_comes_again_is_looked_at_once(
    client: Client, engine: Engine, writes: list[set[ArrayRef]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    referring = ReferredArrays._referring

    def noted(self: ReferredArrays, one: Any, where: str) -> Any:
        looks.append(one)
        return referring(self, one, where)

    stores: list[int] = []
    store = Vectors.store

    async def stored(self: Vectors, payloads: Any) -> None:
        stores.append(len(payloads))
        await store(self, payloads)

    monkeypatch.setattr(ReferredArrays, "_referring", noted)
    monkeypatch.setattr(Vectors, "store", stored)
    taken, same = Taken(), [one for one in declared() if not isinstance(one, Ablate)]
    async with engine(taken, **NEW):
        await client.models.get("tiny", timeout=PATIENCE)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(run, client, same)
        assert len(looks) == 4
        # The client finds that an array has changed.
        same[0].vector[7] = 9.0
        await run(client, same)
        assert len(looks) == 8
        # Redis may have lost the arrays.
        client._session.open_bus().vectors.forget()
        await run(client, same)
        before = len(stores)
        await run(client, same)
        assert len(stores) == before
    assert [len(one) for one in writes] == [2, 1, 3]
    changed = vector(0)
    changed[7] = 9.0
    assert [float(arrays[0][7]) for arrays in taken.arrays] == [float(vector(0)[7])] * 3 + [9.0] * 3
    assert all(np.array_equal(arrays[1], vector(0)) for arrays in taken.arrays)


async def test_an_intervention_without_arrays_may_change_between_two_traces(client: Client, engine: Engine) -> None:
    taken, steer, probe = Taken(), Steer("residual(0)", vector(0)), Probe("p", "residual(0)")
    async with engine(taken, **NEW):
        for at in ("residual(0)", "residual(0)", "residual(1)"):
            probe.at = at
            await run(client, [steer, probe])
    assert [one.interventions[1].at for one in taken.submissions] == ["residual(0)", "residual(0)", "residual(1)"]


def test_lists_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_LISTS_BYTES", 5000)
    monkeypatch.setattr(vectors, "_LISTS", 3)
    lists = ReferredLists()
    known = []
    for size in (1000, 1000, 1000, 1000, 4000, 6000):
        given: list[Any] = [Probe("p", "residual(0)")]
        known.append(given)
        payload = bytes(size)
        lists.keep(given, {encoded(np.zeros(size))[0]: vectors._Array(payload, "", False)}, [Probe("q", "residual(0)")])
    assert [lists.get(one) is not None for one in known] == [False, False, False, True, True, False]


async def test_small_arrays_and_live_ones_stay_where_they_are(
    client: Client, engine: Engine, writes: list[set[ArrayRef]]
) -> None:
    taken = Taken()
    async with engine(taken, hidden_size=VECTOR_BYTES // 8, schema=schema_text()):
        await run(client, [Steer("residual(0)", np.ones(VECTOR_BYTES // 8, np.float32))])
        async with client.trace(
            "tiny",
            "hello",
            interventions=[Steer("residual(0)", tracewire.Live("way"))],
            live={"way": np.ones(VECTOR_BYTES // 8, np.float64)},
        ) as trace:
            await trace.result()
    assert taken.references == [0, 0]
    assert not writes


@pytest.mark.parametrize("old", OLD, ids=lambda one: one["schema"] or "none")
async def test_an_engine_that_knows_no_vectors_gets_arrays(
    client: Client, bus: Bus, engine: Engine, writes: list[set[ArrayRef]], old: dict[str, Any]
) -> None:
    """If any engine of the model is such."""
    taken = Taken()
    await bus.registry.register(engine_info(engine="old", **old), ttl_s=600)
    async with engine(taken, **NEW):
        await run(client, declared())
    assert taken.references == [0]
    assert np.array_equal(taken.arrays[0][0], vector(0))
    assert not writes


async def test_a_client_that_may_not_store_vectors_sends_arrays(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(self: Vectors, payloads: Any) -> None:
        raise NotAllowed("no permissions to access a key")

    monkeypatch.setattr(Vectors, "_write", refuse)
    taken = Taken()
    async with engine(taken, **NEW):
        with caplog.at_level(logging.WARNING, "tracewire"):
            await run(client, declared())
    assert taken.references == [0]
    assert "does not let this client store vectors" in caplog.text


def wrong(number: float) -> np.ndarray[Any, Any]:
    value = vector(0)
    value[1000] = number
    return value


@pytest.mark.parametrize(
    "one",
    [
        Steer("residual(0)", wrong(np.nan)),
        Clamp("residual(0)", wrong(np.inf), min=0.0),
        Ablate("residual(0)", wrong(-np.inf)),
        Probe("p", "residual(0)", weight=wrong(np.nan)),
        Probe("p", "residual(0)", weight=np.ones((HIDDEN, HIDDEN), np.float32), bias=wrong(np.nan)),
        Steer("residual(0)", np.ones(HIDDEN + 1)),
        Steer("residual(0)", np.ones((2, HIDDEN))),
    ],
)
@pytest.mark.parametrize("again", [False, True])
async def test_bad_arrays_are_refused_in_the_same_words(
    client: Client, bus: Bus, writes: list[set[ArrayRef]], one: Any, again: bool
) -> None:
    found = []
    for name, described in (("new", NEW), ("old", OLD[0])):
        await bus.registry.register(engine_info(name, engine=name, **described), ttl_s=600)
        for _ in range(1 + again):
            with pytest.raises(TraceRejected) as caught:
                await run(client, [Ablate("residual(1)"), one], name)
        found.append((caught.value.field, caught.value.message))
    assert found[0] == found[1]
    assert found[0][0].startswith("interventions[1].")
    assert not writes


async def test_arrays_that_are_too_large_together_are_refused(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch, writes: list[set[ArrayRef]]
) -> None:
    monkeypatch.setattr(limits, "DEFAULTS", Limits(vector_bytes=4 * 4 * HIDDEN))
    await bus.registry.register(engine_info(engine="new", **NEW), ttl_s=600)
    with pytest.raises(TraceRejected, match="at most 32768 bytes") as caught:
        await run(client, [Steer("residual(0)", vector(number)) for number in range(5)])
    assert caught.value.field == "interventions"
    assert not writes


async def test_what_a_client_sends_again_has_its_arrays(client: Client, engine: Engine) -> None:
    """Redis may have lost the vectors with the submission."""
    async with engine(Taken(), **NEW), client.trace("tiny", "hello", interventions=declared()) as trace:
        (_, guarded) = client._session.presence._guarded[trace.id]
        assert encoded(vector(0))[1] == guarded.submission.interventions[0].vector.data  # type: ignore[union-attr]
        await trace.result()


async def test_a_missing_vector_is_a_rejection_after_which_it_is_stored_again(
    client: Client, bus: Bus, tmp_path: Path
) -> None:
    """With the real adapter: the first has the vectors' files, the next ones do not."""

    engines = [ScriptedEngine(lambda: anyio.lowlevel.checkpoint()) for _ in range(2)]
    for number, scripted in enumerate(engines):
        scripted.inputs = tmp_path / str(number)
        scripted.inputs.mkdir()

    async def works() -> None:
        # The scripted engine reads nothing.
        assert (await run(client, declared()[:3])).status == "finished"

    key = bus.keys.vector(encoded(np.stack([vector(1), vector(2)]))[0].blob)
    async with serving(bus, engines[0], info(**NEW)):
        await client.models.get("tiny", timeout=PATIENCE)
        await works()
        await bus.command("DEL", key)
        await works()
    async with serving(bus, engines[1], info(**NEW)):
        await client.models.get("tiny", timeout=PATIENCE)
        with pytest.raises(TraceRejected, match="submit the trace again") as caught:
            await works()
        assert caught.value.field == "interventions[2].direction"
        assert caught.value.type == MISSING
        assert not await bus.command("EXISTS", key)
        await works()
        assert await bus.command("EXISTS", key)


async def test_an_adapter_checks_what_a_client_of_another_kind_sends(bus: Bus, tmp_path: Path) -> None:
    from tracewire_bus.domain.intervention_checks import normalize
    from tracewire_bus.wire.codec import decode_event
    from tracewire_bus.wire.messages import Invoke
    from tracewire_bus.wire.refs import encode_ref

    stored = {}
    for value in (vector(0), wrong(np.nan), np.ones(HIDDEN + 1, np.float32)):
        ref, payload = encoded(value)
        await bus.vectors.store({ref: payload})
        stored[ref] = value
    good, infinite, wide = stored
    elsewhere = ArrayRef("float32", (HIDDEN,), bytes(16), "ab12")
    scripted = ScriptedEngine(lambda: anyio.lowlevel.checkpoint())
    scripted.inputs = tmp_path
    cases = [
        (good, ""),
        (infinite, "expected finite numbers"),
        (wide, "hidden size"),
        (elsewhere, "belongs to a trace"),
    ]
    async with serving(bus, scripted, info(**NEW)) as served:
        await served.serving.wait()
        for number, (ref, says) in enumerate(cases):
            (steer,) = normalize([Steer("residual(0)", encode_ref(ref))])
            sent = Submission(
                trace=f"t{number}",
                model="tiny",
                invokes=[Invoke(prompt="x", sampling={"max_tokens": 2})],
                interventions=[steer],
                detach=True,
            )
            await bus.submit(sent)
            with anyio.fail_after(PATIENCE):
                async for entry in bus.read(sent.trace):
                    event = decode_event(entry.data)  # type: ignore[union-attr]
            assert event.status == ("rejected" if says else "finished")  # type: ignore[union-attr]
            if says:
                assert event.error.field == "interventions[0].vector"  # type: ignore[union-attr]
                assert says in event.error.message  # type: ignore[union-attr]


async def test_an_array_that_another_trace_saved_is_downloaded_for_the_next(client: Client, engine: Engine) -> None:
    """A reference of a result goes into an intervention as it is, and travels as an array or as a vector."""
    taken: list[Any] = []

    async def script(stage: Stage) -> None:
        await stage.accept()
        taken.append(stage.submission.interventions)
        await stage.save("!", {"hs": await stage.store(np.ones(8, np.float32), "hs")})
        await stage.final()

    async with engine(script):
        first = await client.trace("tiny", "a").result()
        (ref,) = first.saves["hs"]
        assert isinstance(ref, ArrayRef)
        await client.trace("tiny", "a", interventions=[Patch("residual(0)", ref), Steer("residual(1)", ref)]).result()
        one, other = taken[-1]
        assert one.values.tolist() == other.vector.tolist() == [1.0] * 8
        lost = ArrayRef("float32", (8,), bytes(16), "gone", "hs", ref._load)
        with pytest.raises(TraceRejected) as caught:
            await client.trace("tiny", "a", interventions=[Patch("residual(0)", lost)]).result()
    assert caught.value.field == "interventions[0].values"
    assert len(taken) == 2
