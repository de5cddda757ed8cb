"""Vectors of declared interventions are files in the link's folder, fetched once and kept within a budget."""

# ruff: noqa: ASYNC240
from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.vectors import encoded
from tests.unit.tracewire_engine.worker.test_remote_inputs import Carried
from tracewire_bus.bus import Bus
from tracewire_bus.store.vectors import MISSING, Vectors
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire.messages import Ablate, Clamp, Declared, Probe, Steer, StopWhen
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter import vector_files
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.vector_files import VectorFiles
from tracewire_engine.protocol.input_files import vector_path

PATIENCE = 60


def vector(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal(2000).astype(np.float32)


async def stored(bus: Bus, array: Any) -> ArrayRef:
    ref, payload = encoded(array)
    await bus.vectors.store({ref: payload})
    return ref


def steers(*refs: ArrayRef) -> list[Declared]:
    return [Steer("residual(0)", ref) for ref in refs]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[ArrayRef]:
    """What was fetched."""
    found: list[ArrayRef] = []
    fetch = Vectors.fetch

    async def noted(self: Vectors, ref: ArrayRef) -> Any:
        found.append(ref)
        return await fetch(self, ref)

    monkeypatch.setattr(Vectors, "fetch", noted)
    return found


async def test_a_vector_is_fetched_once_for_all_traces(bus: Bus, tmp_path: Path, fetched: list[ArrayRef]) -> None:
    ref = await stored(bus, vector(0))
    files = VectorFiles(bus.vectors, tmp_path)
    path = vector_path(tmp_path, ref)

    async def trace() -> None:
        async with files.of([*steers(ref, ref), StopWhen("p", above=1.0), Probe("p", "residual(1)", weight=ref)]):
            assert path.read_bytes() == vector(0).tobytes()
            assert path.stat().st_mode & 0o077 == 0

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(trace)
    await trace()
    assert fetched == [ref]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (lambda ref: Steer("residual(0)", ref), "vector"),
        (lambda ref: Clamp("residual(0)", ref, min=0.0), "direction"),
        (lambda ref: Ablate("residual(0)", ref), "direction"),
        (lambda ref: Probe("p", "residual(0)", weight=ref), "weight"),
        (lambda ref: Probe("p", "residual(0)", weight=np.ones((2, 8)), bias=ref), "bias"),
    ],
)
@pytest.mark.parametrize("problem", ["missing", "tampered", "infinite"])
async def test_a_bad_vector_is_a_rejection_that_names_its_field(
    bus: Bus, tmp_path: Path, place: Any, field: str, problem: str
) -> None:
    value = vector(0)
    if problem == "infinite":
        value[77] = np.inf
    ref = await stored(bus, value)
    key = bus.keys.vector(ref.blob)
    if problem == "missing":
        await bus.command("DEL", key)
    if problem == "tampered":
        await bus.command("HSET", key, 0, vector(1).tobytes())
    files = VectorFiles(bus.vectors, tmp_path)
    for _ in range(2):
        with pytest.raises(Rejection) as caught:
            async with files.of([Ablate("residual(0)"), place(ref)]):
                pytest.fail("it ran")
        assert caught.value.failure.field == f"interventions[1].{field}"
        message = caught.value.failure.message
        if problem == "infinite":
            assert message == "expected finite numbers, got NaN or an infinity in it"
        else:
            assert "submit the trace again" in message
            assert caught.value.failure.type == MISSING
        assert not list(tmp_path.iterdir())
    assert not files._files


async def test_a_redis_that_is_away_is_no_fault_of_a_vector(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, ref = VectorFiles(bus.vectors, tmp_path), await stored(bus, vector(0))

    async def away(*_: Any) -> Any:
        raise BusUnavailable("Redis does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Vectors, "fetch", away)
        with pytest.raises(BusUnavailable):
            await files.of(steers(ref)).__aenter__()
    async with files.of(steers(ref)):
        assert vector_path(tmp_path, ref).exists()


async def test_a_made_up_dtype_or_shape_does_not_reach_the_workers(bus: Bus, tmp_path: Path) -> None:
    """Neither before the vector is there nor after."""
    ref = await stored(bus, vector(0))
    made_up = [ArrayRef("int32", (2000,), ref.digest, ref.blob), ArrayRef("float32", (1000, 2), ref.digest, ref.blob)]
    files = VectorFiles(bus.vectors, tmp_path)
    for known in (False, True):
        for one in made_up:
            with pytest.raises(Rejection, match="does not match"):
                async with files.of(steers(one)):
                    pytest.fail("it ran")
        assert vector_path(tmp_path, ref).exists() is known
        async with files.of(steers(ref)):
            assert vector_path(tmp_path, ref).read_bytes() == vector(0).tobytes()


async def test_files_are_kept_within_a_budget_and_none_in_use_is_removed(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[ArrayRef]
) -> None:
    monkeypatch.setattr(vector_files, "KEPT_BYTES", 3 * 8000)
    refs = [await stored(bus, vector(number)) for number in range(6)]
    files = VectorFiles(bus.vectors, tmp_path)

    def there() -> set[int]:
        return {number for number, ref in enumerate(refs) if vector_path(tmp_path, ref).exists()}

    async with files.of(steers(refs[0])):
        # Another trace that uses it ends.
        async with files.of(steers(refs[0], refs[0])):
            pass
        for number in (1, 2, 3):
            async with files.of(steers(refs[number])):
                pass
        assert there() == {0, 2, 3}
        # What was used last stays longest.
        async with files.of(steers(refs[2])):
            pass
        async with files.of(steers(refs[4])):
            pass
        assert there() == {0, 2, 4}
        async with files.of(steers(*refs)):
            assert there() == {0, 1, 2, 3, 4, 5}
    assert len(there()) == 3
    assert 5 in there()
    assert files._bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * 8000
    assert [refs.index(ref) for ref in fetched] == [0, 1, 2, 3, 4, 1, 3, 5]


async def test_vectors_are_carried_once_and_dropped_when_removed(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_files, "KEPT_BYTES", 8000)
    one, other = [await stored(bus, vector(number)) for number in range(2)]
    carrier = Carried()
    files = VectorFiles(bus.vectors, tmp_path, carrier)
    for _ in range(2):
        async with files.of(steers(one)):
            assert vector_path(carrier.held, one).read_bytes() == vector(0).tobytes()
    assert carrier.calls == ["carry"]
    async with files.of(steers(other)):
        pass
    assert carrier.calls == ["carry", "carry", "drop"]
    assert not vector_path(carrier.held, one).exists()
    assert vector_path(carrier.held, other).exists()


async def test_a_vector_that_is_fetched_again_while_others_are_dropped_stays(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers keep what the second trace has sent them, until that is removed."""
    monkeypatch.setattr(vector_files, "KEPT_BYTES", 2 * 8000)
    dropping, go_on = anyio.Event(), anyio.Event()

    class Slow(Carried):
        async def drop(self, path: Path) -> None:
            dropping.set()
            await go_on.wait()
            await super().drop(path)

    refs = [await stored(bus, vector(number)) for number in range(4)]
    files = VectorFiles(bus.vectors, tmp_path, carrier := Slow())
    async with files.of(steers(*refs[:2])):
        pass

    async def evicts() -> None:
        async with files.of(steers(*refs[2:])):
            pass

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(evicts)
            await dropping.wait()
            async with files.of(steers(refs[1])):
                go_on.set()
                while carrier.calls[-1] != "drop":
                    await anyio.wait_all_tasks_blocked()
                assert vector_path(carrier.held, refs[1]).read_bytes() == vector(1).tobytes()
    assert not vector_path(carrier.held, refs[0]).exists()
    async with files.of(steers(refs[1])):
        assert vector_path(carrier.held, refs[1]).read_bytes() == vector(1).tobytes()


async def test_who_waits_for_a_trace_that_is_cancelled_fetches_it_itself(bus: Bus, tmp_path: Path) -> None:
    ref = await stored(bus, vector(0))
    carrying = anyio.Event()

    class Interrupted(Carried):
        async def carry(self, path: Path) -> None:
            if not carrying.is_set():
                carrying.set()
                await anyio.sleep_forever()
            await super().carry(path)

    carrier = Interrupted()
    files = VectorFiles(bus.vectors, tmp_path, carrier)
    scope = anyio.CancelScope()
    done = anyio.Event()

    async def first() -> None:
        with scope:
            async with files.of(steers(ref)):
                pytest.fail("it was not carried")

    async def second() -> None:
        async with files.of(steers(ref)):
            assert vector_path(carrier.held, ref).read_bytes() == vector(0).tobytes()
        done.set()

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await carrying.wait()
            group.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await done.wait()
