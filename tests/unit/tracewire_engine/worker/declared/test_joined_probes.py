"""Probes of several taps that are read by one product: what they read, and which can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.declared_plans import HIDDEN, LAYERS
from tests.unit.tracewire_engine.worker.declared.test_tap_buffers import declared_of
from tracewire_bus.wire.messages import Probe, Steer, When
from tracewire_engine.worker.declared import joined_probes
from tracewire_engine.worker.declared.joined_probes import JoinedProbes, join_probes
from tracewire_engine.worker.declared.plan import DeclaredRequests

RANDOM = np.random.default_rng(3)


def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RANDOM.standard_normal((*shape, HIDDEN)).astype(np.float32)


def joined_of(declared: DeclaredRequests) -> list[JoinedProbes]:
    assert declared.plan is not None
    assert declared.buffers is not None
    return join_probes(declared.plan.groups, declared.buffers)


def read(declared: DeclaredRequests, *, together: bool) -> list[torch.Tensor]:
    """What the step's probes read of random values in the buffers."""
    plan, buffers = declared.plan, declared.buffers
    assert plan is not None
    assert buffers is not None
    buffers._buffer.copy_(torch.randn(buffers._buffer.shape, generator=torch.Generator().manual_seed(1)))
    assert declared.fits_buffers()
    if not together:
        plan.joined = []
    plan.read_buffers(declared.buffers, lasting=True)
    found = [one for collector in plan.collectors for one in collector.found]
    assert None not in found
    return [one for one in found if one is not None]


def probes(**parts: object) -> list[tuple[Probe, list[int]]]:
    return [(Probe(f"p{layer}", "", **parts), [layer]) for layer in range(LAYERS)]  # type: ignore[arg-type]


SHARED, BIAS = weight(), np.array([0.5, -1.0], np.float32)
CASES = {
    "one weight for all": lambda: [probes(weight=SHARED), probes(weight=SHARED)],
    "one for each layer": lambda: [[(Probe(f"p{n}", "", weight=W[n]), [n]) for n in range(LAYERS)]] * 2,
    "one for each request": lambda: [probes(weight=weight()), probes(weight=weight())],
    "classes": lambda: [probes(weight=weight(2), bias=BIAS, activation="softmax")] * 3,
    "classes of each request": lambda: [
        probes(weight=weight(2), bias=BIAS * scale, activation="sigmoid") for scale in (1.0, 2.0)
    ],
    "a bystander beside": lambda: [[], probes(weight=weight()), []],
    "edits between": lambda: [[*probes(weight=SHARED), (Steer("", SHARED, scale=0.1), [1])]],
    "every second layer": lambda: [[(Probe(f"p{n}", "", weight=SHARED), [n]) for n in range(0, LAYERS, 2)]],
    "all layers of one probe": lambda: [[(Probe("all", "", weight=SHARED), list(range(LAYERS)))]] * 2,
    "two at a layer": lambda: [[(Probe(f"p{n}", "", weight=W[n % LAYERS]), [n // 2]) for n in range(2 * LAYERS)]] * 2,
    "two at one of two layers": lambda: [[(Probe(f"p{n}", "", weight=W[n]), [at]) for n, at in enumerate((0, 0, 2))]],
    "means": lambda: [probes(weight=SHARED, reduce="mean")],
}
W = [weight() for _ in range(LAYERS)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_once", [32 << 20, 1])
def test_probes_read_together_what_each_reads_by_itself(
    case: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_probes, "_AT_ONCE", at_once)
    lists = CASES[case]()
    declared = declared_of(*lists)
    count = {"every second layer": 2, "two at a layer": 2 * LAYERS}.get(case, LAYERS)
    assert [len(one.groups) for one in joined_of(declared)] == [count]
    together, apart = read(declared, together=True), read(declared_of(*lists), together=False)
    assert len(together) == len(apart) > 1
    for mine, other in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "lists",
    [
        [[(Probe("whole", ""), [0, 1])]],
        [[(Probe("one", "", weight=SHARED), [0])]],
        [[(Probe("norm", "", reduce="norm"), [0, 1])]],
        [[(Probe("other", "", weight=SHARED), [0]), (Probe("bias", "", weight=weight(2), bias=BIAS), [1])]],
        [probes(weight=SHARED, when=When(every=2))],
        [[(Probe("score", "", weight=SHARED), [0, 1]), (Steer("", SHARED, when=When(probe="score", above=1.0)), [2])]],
    ],
)
def test_other_reads_are_left_to_themselves(lists: list[list[tuple[object, list[int]]]]) -> None:
    assert joined_of(declared_of(*lists)) == []  # type: ignore[arg-type]


def test_probes_with_large_weights_are_left_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [probes(weight=weight()), probes(weight=weight())]
    monkeypatch.setattr(joined_probes, "_MOST_WEIGHTS", 4 * HIDDEN * 2 * LAYERS)
    assert joined_of(declared_of(*lists))
    monkeypatch.setattr(joined_probes, "_MOST_WEIGHTS", 4 * HIDDEN * 2 * LAYERS - 1)
    assert joined_of(declared_of(*lists)) == []


def test_what_records_the_reads_finds_the_weights_made() -> None:
    declared = declared_of(probes(weight=weight(), bias=0.5), probes(weight=weight(), bias=0.25))
    assert declared.plan is not None
    declared.plan.prepare_reads(declared.buffers)
    made = [vars(one) for one in (*(declared.plan.joined or ()), *declared.plan.groups)]
    assert len(made) == 1 + LAYERS
    assert all("_matrix" in one or "matrix" in one for one in made)


def test_probes_that_cannot_be_read_together_are_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(self: JoinedProbes, buffers: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    expected = read(declared_of(probes(weight=SHARED)), together=False)
    monkeypatch.setattr(JoinedProbes, "read", no_memory)
    caplog.set_level("ERROR", logger="vllm.tracewire")
    declared = declared_of(probes(weight=SHARED))
    found = read(declared, together=True)
    assert all(map(torch.equal, found, expected))
    assert declared.plan is not None
    assert declared.plan.joined == []
    assert "could not be read together" in caplog.text


def test_one_bias_for_all_classes_goes_beside_one_for_each() -> None:
    lists = [probes(weight=weight(2), bias=bias) for bias in (BIAS, 0.5, 2.0, BIAS * 2)]
    declared = declared_of(*lists)
    assert [len(one.groups) for one in joined_of(declared)] == [LAYERS, LAYERS]
    together = read(declared, together=True)
    assert [tuple(one.shape) for one in together] == [(2, 2)] * 2 * LAYERS
    for mine, other in zip(together, read(declared_of(*lists), together=False), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert all(one.failure is None for one in declared.live.values())


def test_probes_for_which_the_device_has_no_room_fail_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And raise nothing on the thread of the model."""
    declared = declared_of(probes(weight=weight()), probes(weight=weight()))
    assert declared.plan is not None
    assert declared.fits_buffers()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "stack", no_memory)
    declared.collect(lambda values: values)
    assert [one.failure is not None and one.failure.type for one in declared.live.values()] == ["OutOfMemoryError"] * 2
