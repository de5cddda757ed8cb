"""Interventions that were normalized before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tracewire_bus.domain import intervention_checks, normal_forms
from tracewire_bus.domain.intervention_checks import DeclarationError
from tracewire_bus.domain.intervention_checks import normalize as normalize_once
from tracewire_bus.domain.normal_forms import NormalForms
from tracewire_bus.wire.messages import Live, LogitLens, Probe, Steer, When

normalize = partial(normalize_once, again=True)


@pytest.fixture(autouse=True)
def forms(monkeypatch: pytest.MonkeyPatch) -> NormalForms:
    made = NormalForms()
    monkeypatch.setattr(intervention_checks, "_normal_forms", made)
    return made


def _steer(count: int = 8) -> Steer:
    return Steer("residual(1)", np.arange(count, dtype=np.float32), scale=0.5)


def test_an_intervention_is_normalized_once() -> None:
    one = _steer()
    first, again, other = normalize([one])[0], normalize([one])[0], normalize([_steer()])[0]
    assert first is again
    assert first is not other
    assert first == other


def test_a_new_object_of_the_same_array_is_not_normalized_again() -> None:
    """As a service makes them for each request."""
    vector = np.arange(8, dtype=np.float32)
    (first,) = normalize([Steer("residual(1)", vector, scale=0.5)])
    assert normalize([Steer("residual(1)", vector, scale=0.5)])[0] is first
    others = [
        Steer("residual(2)", vector, scale=0.5),
        Steer("residual(1)", vector.copy(), scale=0.5),
        Steer("residual(1)", vector, scale=0.25),
        Probe("a", "residual(1)", weight=vector),
    ]
    assert all(one is not first for one in normalize(others))
    # Where the elements have changed meanwhile, neither has its old form.
    vector[3] = 9.0
    (changed,) = normalize([Steer("residual(1)", vector, scale=0.5)])
    assert changed == normalize([Steer("residual(1)", vector.copy(), scale=0.5)])[0] != first


@pytest.mark.parametrize(("one", "other"), [(1.0, 1), (1, True), (1.0, True)])
def test_equal_numbers_of_other_types_are_not_taken_for_each_other(one: Any, other: Any) -> None:
    vector = np.arange(8, dtype=np.float32)
    normalize([Steer("residual(1)", vector, scale=one)])
    try:
        found = normalize([Steer("residual(1)", vector, scale=other)])[0].scale
    except DeclarationError as error:
        found = str(error)
    try:
        alone = normalize_once([Steer("residual(1)", vector, scale=other)])[0].scale
    except DeclarationError as error:
        alone = str(error)
    assert (found, type(found)) == (alone, type(alone))


def test_what_is_dropped_is_not_found_by_its_fields(monkeypatch: pytest.MonkeyPatch, forms: NormalForms) -> None:
    monkeypatch.setattr(normal_forms, "_MOST", 2)
    vectors = [np.full(8, number, np.float32) for number in range(4)]
    for vector in vectors:
        for _ in range(2):
            normalize([Steer("residual(1)", vector)])
    assert len(forms._ids) == len(forms._kept) == 2
    # An array at the place of one that is gone is another array.
    del vectors[0]
    assert [normalize([Steer("residual(1)", np.full(8, 7.0, np.float32))])[0].vector.data[-4:]] == [
        np.float32(7.0).tobytes()
    ]


CHANGES: dict[str, Callable[[Steer], object]] = {
    "an element": lambda one: one.vector.__setitem__(3, 9.0),
    "another array": lambda one: setattr(one, "vector", np.ones(8, np.float32)),
    "its shape": lambda one: setattr(one.vector, "shape", (2, 4)),
    "its dtype": lambda one: setattr(one.vector, "dtype", np.int32),
    "a number": lambda one: setattr(one, "scale", 2.0),
    "the type of a number": lambda one: setattr(one, "scale", 1),
    "the location": lambda one: setattr(one, "at", "residual(2)"),
    "a live parameter": lambda one: setattr(one, "scale", Live("alpha")),
    "a condition": lambda one: setattr(one, "when", When(every=2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_one_is_normalized_anew(change: str) -> None:
    one = _steer()
    normalize([one])
    CHANGES[change](one)
    changed = Steer(one.at, np.array(one.vector), scale=one.scale, when=one.when)
    assert normalize([one]) == normalize([changed])


def test_an_array_of_several_interventions_is_compared_once_and_its_change_found_in_all(forms: NormalForms) -> None:
    vector = np.arange(8, dtype=np.float32)
    several = [Steer(f"residual({layer})", vector, scale=0.5) for layer in range(4)]
    before = normalize(several)
    assert len({id(array.payload) for kept in forms._kept.values() for array in kept.arrays}) == 1
    assert all(one is again for one, again in zip(before, normalize(several), strict=True))
    vector[3] = 9.0
    assert forms.get(several) == [None] * 4
    assert normalize(several) == normalize([Steer(f"residual({layer})", vector, scale=0.5) for layer in range(4)])


def test_a_change_to_something_wrong_is_found() -> None:
    one = _steer()
    normalize([one])
    one.scale = "much"  # type: ignore[assignment]
    with pytest.raises(DeclarationError, match="expected a number"):
        normalize([one])


@pytest.mark.parametrize(
    "one",
    [
        Probe("p", "residual(1)", weight=[1.0, 2.0]),
        Probe("p", "residual(1)", weight=np.float32(2.0)),
        Steer("residual(1)", np.ones(4, np.float32), scale=Live("alpha")),
        Steer("residual(1)", np.ones(4, np.float32), when=When(every=2)),
        LogitLens("lens", "residual(1)", top_k=2),
    ],
    ids=["a list", "a scalar", "live", "a condition", "no array"],
)
def test_what_cannot_be_compared_is_not_kept(one: Any, forms: NormalForms) -> None:
    normalize([one])
    assert forms.get([one])[0] is None


def test_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch, forms: NormalForms) -> None:
    monkeypatch.setattr(normal_forms, "_MOST", 3)
    several = [_steer() for _ in range(5)]
    for one in (*several[:3], several[0], *several[3:]):
        normalize([one])
    assert [forms.get([one])[0] is not None for one in several] == [True, False, False, True, True]


def test_arrays_take_bounded_memory(monkeypatch: pytest.MonkeyPatch, forms: NormalForms) -> None:
    monkeypatch.setattr(normal_forms, "_MOST_BYTES", 4000)
    monkeypatch.setattr(normal_forms, "_LONGEST", 3000)
    small, large = [_steer(200) for _ in range(4)], _steer(1000)
    normalize([*small, large])
    assert [forms.get([one])[0] is not None for one in (*small, large)] == [False, False, True, True, False]
    arrays = sum(kept.one.vector.nbytes for kept in forms._kept.values())
    assert forms._bytes == arrays + sum(kept.size for kept in forms._kept.values()) <= 4000


def test_what_an_adapter_decodes_is_not_kept(forms: NormalForms) -> None:
    one = _steer()
    normalize_once([one])
    assert forms.get([one])[0] is None


def test_a_part_of_a_large_array_is_not_kept(forms: NormalForms) -> None:
    one = Steer("residual(1)", np.zeros((1 << 10, 1 << 9), np.float32)[3], scale=0.5)
    normalize([one])
    assert forms.get([one])[0] is None


def test_a_large_array_counts_once_for_all_its_rows(monkeypatch: pytest.MonkeyPatch, forms: NormalForms) -> None:
    rows = np.zeros((32, 256), np.float32)
    monkeypatch.setattr(normal_forms, "_MOST_BYTES", 2 * rows.nbytes + 32 * 64)
    several = [Steer("residual(1)", row, scale=0.5) for row in rows]
    normalize(several)
    assert all(forms.get([one])[0] is not None for one in several)
    assert rows.nbytes < forms._bytes <= 2 * rows.nbytes + 32 * 64
    other = _steer(rows.size // 2)
    normalize([other])
    assert forms.get([other])[0] is not None
    assert not any(forms.get([one])[0] for one in several[:16])
    monkeypatch.setattr(normal_forms, "_MOST", 0)
    normalize([_steer()])
    assert (forms._bytes, forms._sharing, len(forms._kept)) == (0, {}, 0)
