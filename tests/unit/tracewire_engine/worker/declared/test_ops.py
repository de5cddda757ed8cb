"""What requests bring alike is decoded, and on the device, once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from tests.support.later_plans import autoencoder
from tests.support.vectors import by_reference
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Ablate, Clamp, Declared, Features, Live, Probe, Steer
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared import device_autoencoder, ops, vector_cache
from tracewire_engine.worker.declared.ops import Declaration, DecodedCache, Op
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


def decoded_anew(known: DecodedCache, *interventions: Declared) -> list[Op]:
    """The interventions of a request that has ended."""
    encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)]) for one in normalize(interventions)])
    return Declaration("r", 0, encoded, LiveRun(""), known).ops


def test_decoded_interventions_keep_no_vector_that_the_cache_has_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_cache, "CACHE_BYTES", 3 * 32)
    known = DecodedCache(torch.device("cpu"))
    vectors = [np.full(8, number, np.float32) for number in range(10)]
    made = [weakref.ref(decoded_anew(known, Ablate("", one))[0].matrix) for one in vectors]
    gc.collect()
    assert [one() is not None for one in made] == [False] * 7 + [True] * 3
    # What is still there is not decoded again, and what is not is made anew.
    assert decoded_anew(known, Ablate("", vectors[9]))[0].matrix is made[9]()
    assert decoded_anew(known, Ablate("", vectors[0]))[0].matrix is not None
    # Interventions whose own vectors do not all fit are not kept.
    many = weakref.ref(decoded_anew(known, *[Ablate("", one) for one in vectors])[0].matrix)
    gc.collect()
    assert many() is None


def test_vectors_that_live_parameters_displace_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_cache, "CACHE_BYTES", 32)
    known = DecodedCache(torch.device("cpu"))
    first = weakref.ref(decoded_anew(known, Ablate("", np.ones(8)))[0].matrix)
    known.vectors.get("basis", np.arange(8), np.atleast_2d)
    gc.collect()
    assert first() is None


def test_scaled_vectors_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of vectors that other interventions may share."""
    monkeypatch.setattr(ops, "SCALED_BYTES", 3 * 32)
    known = DecodedCache(torch.device("cpu"))
    steers = [Steer("", np.ones(8), scale=scale) for scale in range(1, 8)]
    scaled = [weakref.ref(decoded_anew(known, one)[0].scaled_vector()) for one in steers]
    gc.collect()
    assert [one() is not None for one in scaled] == [False] * 4 + [True] * 3


def test_rows_of_chosen_features_go_when_their_bound_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    sae = autoencoder("relu")
    each = 2 * 2 * sae.description.width * 4 + 2 * 4
    monkeypatch.setattr(device_autoencoder, "CHOICE_BYTES", 3 * each)
    known = DecodedCache(torch.device("cpu"))
    rows = []
    for number in range(6):
        (op,) = decoded_anew(known, Features("f", "", sae, indices=[number, number + 1]))
        assert op.choice is not None
        assert op.choice.nbytes == each
        rows.append(weakref.ref(op.choice.rows))
        del op
    gc.collect()
    assert [one() is not None for one in rows] == [False] * 3 + [True] * 3
    assert known.vectors.autoencoders.choices.nbytes == 3 * each
