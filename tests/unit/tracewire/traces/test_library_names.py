"""Names of the library in interventions: resolved once to a version, checked, and sent to an engine as its arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage, tiny
from tests.support.scripted_engine import ScriptedEngine, info, serving
from tracewire import Ablate, Clamp, Client, Coordinates, Hold, Live, Probe, Project, Steer, TraceRejected
from tracewire.traces.library_names import EntryName, layers_of, parsed, space_of
from tracewire_bus.bus import Bus
from tracewire_bus.store.library import Library
from tracewire_bus.store.vectors import Vectors
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import Submission
from tracewire_bus.wire.refs import ArrayRef

Engine = Callable[..., Any]

PATIENCE = 60
VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)


class Taken:
    """The submissions that an engine took."""

    def __init__(self) -> None:
        self.submissions: list[Submission] = []

    async def __call__(self, stage: Stage) -> None:
        self.submissions.append(stage.submission)
        await tiny(stage)


async def run(client: Client, *interventions: Any, **options: Any) -> Any:
    with anyio.fail_after(PATIENCE):
        return await client.trace("tiny", "hello", interventions=interventions, max_tokens=2, **options).result()


async def refused(client: Client, *interventions: Any, **options: Any) -> TraceRejected:
    with pytest.raises(TraceRejected) as error:
        await run(client, *interventions, **options)
    return error.value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("calm", EntryName("", "calm", None)),
        ("calm@3", EntryName("", "calm", 3)),
        ("red:calm@12", EntryName("red", "calm", 12)),
        ("a.b-c_1", EntryName("", "a.b-c_1", None)),
    ],
)
def test_names(text: str, name: EntryName) -> None:
    assert parsed(text) == name
    assert str(name) == text


@pytest.mark.parametrize("text", ["", ":a", "a:", "a@", "a@0", "a@b", "a b", "a@1@2", "../a", "residual(3)", "a:b:c}"])
def test_what_is_no_name(text: str) -> None:
    assert parsed(text) is None


def test_the_space_of_a_trace_is_its_tenants() -> None:
    assert [space_of(id_) for id_ in ("red:1", "red:a:1", "1", "")] == ["red", "red", "", ""]


def test_layers_of_arrays() -> None:
    assert layers_of(["vector.10", "vector.2", "weight", "W.enc"]) == {"vector": [2, 10]}


async def test_a_name_stands_for_the_newest_version_and_the_trace_says_which(client: Client, engine: Engine) -> None:
    taken = Taken()
    await client.library.put("calm", VECTOR, at="residual(2)", model="tiny")
    await client.library.put("calm", -VECTOR, at="residual(2)", model="tiny")
    async with engine(taken):
        await run(client, Steer("residual(2)", "calm"), Clamp("residual(2)", "calm@1", min=0.0))
    (one,) = taken.submissions
    assert one.library == {"interventions[0].vector": "calm@2", "interventions[1].direction": "calm@1"}
    vectors = [one.interventions[0].vector, one.interventions[1].direction]
    assert [vector[0] for vector in vectors] == [1, -1]


async def test_the_engine_says_it_to_all_consumers(client: Client, bus: Bus) -> None:
    await client.library.put("calm", np.ones(info("tiny").hidden_size))
    async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0)), info("tiny", engine="e1")):
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "x", interventions=[Steer("residual(0)", "calm")], max_tokens=2)
        assert (await trace.accepted()).library == {"interventions[0].vector": "calm@1"}
        await trace.result()


async def test_each_kind_of_field(client: Client, engine: Engine) -> None:
    taken = Taken()
    await client.library.put("line", VECTOR)
    await client.library.put("plane", np.eye(2, 8), kind="subspace")
    await client.library.put("seen", {"weight": VECTOR, "bias": 0.5}, kind="probe")
    await client.library.put("layers", {1: VECTOR, 3: -VECTOR})
    declared = [
        Ablate("residual(1)", "plane"),
        Probe("a", "residual(*)", weight="seen"),
        Probe("b", "residual(1)", weight="seen", bias=2.0),
        Probe("c", "residual(1)", weight="line"),
        Steer("residual(3)", "layers", scale=Live("alpha")),
        Steer("residual(-3)", "layers"),
        Steer("model.layers.1.mlp", "line"),
        Clamp("residual(1)", Live("place"), min=0.0),
        Ablate("model.layers.1.mlp"),
        Project("residual(1)", "plane"),
        Coordinates("d", "residual(1)", "line"),
        Hold("e", "residual(1)", "line", probe="c", target=1.0, min=-5.0, max=5.0),
    ]
    async with engine(taken):
        await run(client, *declared, live={"alpha": 1.0, "place": VECTOR})
    one = taken.submissions[0]
    assert one.interventions[0].direction.shape == (2, 8)
    assert [float(probe.bias) if probe.bias is not None else None for probe in one.interventions[1:4]] == [
        0.5,
        2.0,
        None,
    ]
    assert [steer.vector[0] for steer in one.interventions[4:7]] == [1, -1, -1]
    assert list(one.library) == [
        f"interventions[{at}].{name}"
        for at, name in enumerate(("direction", "weight", "weight", "weight", "vector", "vector", "vector"))
    ] + ["interventions[9].basis", "interventions[10].basis", "interventions[11].vector"]


async def test_what_does_not_fit_is_refused_by_its_field(client: Client, engine: Engine) -> None:
    await client.library.put("calm", VECTOR, at="residual(2)", model="tiny")
    await client.library.put("narrow", VECTOR[:4])
    await client.library.put("foreign", VECTOR, model="other")
    await client.library.put("deep", VECTOR, at="residual(40)")
    await client.library.put("layers", {1: VECTOR, 3: VECTOR})
    await client.library.put("plane", np.eye(2, 8), kind="subspace")
    await client.library.put("gone", VECTOR)
    await client.library.remove("gone@1")
    async with engine(tiny):
        for one, field, message in (
            (Steer("residual(2)", "clam"), "vector", "the library has no entry 'clam'; the nearest is 'calm@1'"),
            (Steer("residual(2)", "calm@9"), "vector", "no entry 'calm@9'"),
            (Steer("residual(2)", "a b"), "vector", "expected an array, or the name of an entry"),
            (Steer("residual(2)", "gone@1"), "vector", "was removed from the library by one"),
            (Steer("residual(3)", "calm"), "vector", "calm@1 belongs to 'residual(2)', and not to 'residual(3)'"),
            (Steer("residual(*)", "calm"), "vector", "and not to 'residual(*)'"),
            (Steer("model.layers.2.mlp", "calm"), "vector", "and not to 'model.layers.2.mlp'"),
            (Steer("residual(2)", "foreign"), "vector", "foreign@1 is of the model 'other', and not of 'tiny'"),
            (Steer("residual(2)", "narrow"), "vector", "hidden size is 8"),
            (Steer("residual(2)", "deep"), "vector", "which this model does not have"),
            (Steer("residual(2)", "layers"), "vector", "each of the layers 1, 3"),
            (Steer("residual(*)", "layers"), "vector", "name one layer in each intervention"),
            (Steer("residual(2)", "plane"), "vector", "of the kind 'subspace', and Steer takes 'vector'"),
            (Steer("residual(99)", "calm"), "at", "the model has 4 layers"),
            (Probe("p", "residual(2)", weight="nothing"), "weight", "no entry 'nothing'"),
            (Ablate("residual(2)", "nothing"), "direction", "no entry 'nothing'"),
        ):
            error = await refused(client, Steer("residual(2)", VECTOR), one)
            assert error.field == f"interventions[1].{field}"
            assert message in error.message


async def test_a_tenants_trace_finds_its_own_and_then_the_shared_ones(client: Client, engine: Engine) -> None:
    taken = Taken()
    await client.library.put("calm", VECTOR)
    await client.library.put("red:calm", -VECTOR)
    await client.library.put("shared", VECTOR)
    steers = [Steer("residual(1)", "calm"), Steer("residual(1)", "shared"), Steer("residual(1)", "red:calm")]
    async with engine(taken):
        await run(client, *steers, trace_id="red:1")
        await run(client, *steers[:1], trace_id="blue:1")
    assert list(taken.submissions[0].library.values()) == ["red:calm@1", "shared@1", "red:calm@1"]
    assert list(taken.submissions[1].library.values()) == ["calm@1"]
    # Whoever may read the entries of all tenants does not mix them.
    await client.library.put("blue:calm", VECTOR)
    error = await refused(client, Steer("residual(1)", "blue:calm"), trace_id="red:2")
    assert error.field == "interventions[0].vector"
    assert "expected an entry of the trace's tenant 'red' or a shared one, got 'blue:calm'" in str(error)


async def test_an_array_is_fetched_from_redis_once(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    fetch = Library.fetch

    async def noted(self: Library, *given: Any) -> Any:
        fetched.append(given[1])
        return await fetch(self, *given)

    monkeypatch.setattr(Library, "fetch", noted)
    await client.library.put("calm", VECTOR)
    async with engine(tiny):
        for _ in range(3):
            await run(client, Steer("residual(1)", "calm"), Steer("residual(2)", "calm@1"))
    assert fetched == ["vector"]


async def test_a_large_array_is_stored_for_engines_once_and_every_trace_refers_to_it(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[ArrayRef] = []
    write = Vectors._write

    async def noted(self: Vectors, payloads: dict[ArrayRef, bytes]) -> None:
        written.extend(payloads)
        await write(self, payloads)

    monkeypatch.setattr(Vectors, "_write", noted)
    taken = Taken()
    large = np.random.default_rng(0).standard_normal(2048).astype(np.float32)
    await client.library.put("large", large)
    async with engine(taken, hidden_size=2048, schema=schema_text()):
        for _ in range(3):
            await run(client, Steer("residual(1)", "large"))
    refs = [one.interventions[0].vector for one in taken.submissions]
    assert len(written) == 1
    assert refs == written * 3
    # The digest by which engines keep an array is that of the entry.
    stored = await client._session.open_bus().library.find("", "large")
    assert stored is not None
    assert stored.entry is not None
    assert stored.entry.arrays["vector"].digest == written[0].digest


async def test_arrays_that_are_not_used_are_given_up(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracewire.traces import library_names

    monkeypatch.setattr(library_names, "KEPT_BYTES", 2 * VECTOR.nbytes)
    async with engine(tiny):
        for name in "abc":
            await client.library.put(name, VECTOR)
            await run(client, Steer("residual(1)", name))
    assert len(client._session.library._kept) == 2


async def test_an_array_that_redis_has_lost_is_the_fields(client: Client, bus: Bus, engine: Engine) -> None:
    await client.library.put("calm", VECTOR)
    stored = await bus.library.find("", "calm")
    assert stored is not None
    await bus.command("DEL", bus.keys.library_arrays("", stored.upload))
    async with engine(tiny):
        error = await refused(client, Steer("residual(1)", "calm"))
    assert (error.field, "lost" in error.message) == ("interventions[0].vector", True)


async def test_an_edit_has_the_array_that_its_name_stood_for(client: Client, engine: Engine, bus: Bus) -> None:
    await client.library.put("calm", VECTOR, at="residual(2)")
    edits = client.edits("tiny")
    async with engine(tiny, edits=10**9):
        await client.models.get("tiny", timeout=PATIENCE)
        edit = await edits.install("calm", interventions=[Steer("residual(2)", "calm")])
        assert edit.interventions[0].vector[0] == -1
        with pytest.raises(tracewire.EditRejected) as wrong:
            await edits.install("calm", interventions=[Steer("residual(3)", "calm")])
        assert wrong.value.field == "interventions[0].vector"
