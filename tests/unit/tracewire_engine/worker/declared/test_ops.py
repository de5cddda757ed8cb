"""What requests bring alike is decoded, and on the device, once."""

from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from tests.support.vectors import by_reference
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Ablate, Clamp, Declared, Live, Probe, Steer
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared import ops
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests


def test_one_vector_of_many_requests_is_on_the_device_once() -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    vector = np.arange(8, dtype=np.float32)
    found = []
    for scale in (1.0, 2.0):
        (one,) = normalize([Steer("residual(0)", vector, scale=scale)])
        encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)])])
        found += Declaration(f"r{scale}", 0, encoded, LiveRun(""), known).ops
    first, second = found
    assert first.matrix is second.matrix
    assert (first.numbers, second.numbers) == ((1.0,), (2.0,))


def test_what_requests_bring_alike_is_decoded_once_but_for_what_is_live() -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    vector = np.arange(8, dtype=np.float32)

    def two(*interventions: Declared) -> list[Declaration]:
        encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)]) for one in normalize(interventions)])
        runs = [LiveRun(f"run{index}") for index in range(2)]
        for index, run in enumerate(runs):
            run.values["scale"] = float(index)
        return [Declaration(f"r{run.name}", 0, encoded, run, known) for run in runs]

    alike, other = two(Steer("residual(0)", vector, scale=3.0))
    assert alike.ops[0] is other.ops[0]
    first, second = two(Steer("residual(0)", vector, scale=Live("scale")))
    assert (first.ops[0].numbers, second.ops[0].numbers) == ((0.0,), (1.0,))
    # One that is renewed leaves the others as they are.
    alike.live.values["scale"] = 7.0
    first.live.values["scale"] = 7.0
    assert not alike.update_live(known.vectors)
    assert first.update_live(known.vectors)
    assert (first.ops[0].numbers, second.ops[0].numbers) == ((7.0,), (1.0,))


REFERRED: list[Declared] = [
    Steer("", np.linspace(-1, 2, 8), scale=0.5),
    Clamp("", np.linspace(-1, 2, 8, dtype=np.float16), min=0.0),
    Ablate("", np.eye(8, dtype=np.float32)[:3] + 1, keep=0.5),
    Probe("p", "", weight=np.arange(8), bias=0.5),
    Probe("p", "", weight=np.ones((3, 8), np.float32), bias=np.arange(3), activation="softmax"),
    Probe("p", "", weight=np.ones((3, 8)).astype(ml_dtypes.bfloat16)),
]


@pytest.mark.parametrize("one", REFERRED, ids=lambda one: type(one).__name__)
def test_a_reference_is_the_array_bit_for_bit(tmp_path: Path, one: Declared) -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    known.vectors.folder = tmp_path
    (plain,) = normalize([one])
    referred = by_reference(plain, tmp_path)
    assert list(tmp_path.iterdir())
    by_value, by_name = (
        Declaration("r", 0, msgspec.msgpack.encode([Placed(of, [("layer.0.output", True)])]), LiveRun(""), known).ops[0]
        for of in (plain, referred)
    )
    assert by_name.key == by_value.key
    assert by_name.numbers == by_value.numbers
    for name in ("matrix", "bias"):
        mine, other = getattr(by_name, name), getattr(by_value, name)
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def test_a_reference_is_read_once_and_a_missing_file_ends_its_request_only(tmp_path: Path) -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    known.vectors.folder = tmp_path

    def declare(value: float, at: str = "layer.0.output") -> Declaration:
        (plain,) = normalize([Steer("", np.full(8, value, np.float32))])
        referred = by_reference(plain, tmp_path)
        if value < 0:
            for path in tmp_path.iterdir():
                path.unlink()
        encoded = msgspec.msgpack.encode([Placed(referred, [(at, True)])])
        return Declaration("r", 0, encoded, LiveRun(""), known)

    first = declare(1.0)
    with pytest.raises(FileNotFoundError):
        declare(-1.0)
    assert not list(tmp_path.iterdir())
    second = declare(1.0, "layer.1.output")
    assert second.ops[0].matrix is first.ops[0].matrix


def test_kinds_of_interventions_are_kept_as_long_as_a_request_has_them() -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded

    def declared(count: int, name: str) -> Declaration:
        placed = [
            Placed(one, [("layer.0.output", True)])
            for one in normalize([Probe(f"{name}{n}", "") for n in range(count)])
        ]
        return Declaration(name, 0, msgspec.msgpack.encode(placed), LiveRun(""), known)

    gc.collect()
    before = len(ops._kinds)
    found = [declared(41, "a"), declared(41, "b"), declared(42, "c")]
    assert found[0].kind is found[1].kind
    assert found[0].kind is not found[2].kind
    assert len(ops._kinds) == before + 2
    del found
    known._entries.clear()
    gc.collect()
    assert len(ops._kinds) == before
