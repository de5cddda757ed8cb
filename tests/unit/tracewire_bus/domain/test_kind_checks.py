"""Lenses, subspaces, features and controllers: what is refused before an engine hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tracewire_bus.domain.test_intervention_checks import HIDDEN, checked, tree
from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.domain.intervention_checks import (
    DeclarationError,
    KnownModel,
    check,
    decode_interventions,
    normalize,
)
from tracewire_bus.wire.messages import (
    Autoencoder,
    Coordinates,
    Features,
    Hold,
    Lens,
    Live,
    Probe,
    Project,
    Steer,
    SteerFeatures,
)

V = np.ones(HIDDEN, np.float32)
W = np.arange(HIDDEN, dtype=np.float32) - 3
EYE = np.eye(HIDDEN, dtype=np.float32)
AT = "residual(1)"


def sae(features: int = 12, width: int = HIDDEN, **more: Any) -> SparseAutoencoder:
    rows = np.random.default_rng(0).normal(size=(features, width)).astype(np.float32)
    return SparseAutoencoder(rows, rows, **more)


def hold(**more: Any) -> Hold:
    return Hold("s", **{"at": AT, "vector": V, "probe": "p", "target": 1.0, "min": -1.0, "max": 1.0, **more})


PROBE = Probe("p", AT, V)


@pytest.mark.parametrize(
    ("declared", "field", "says"),
    [
        ([Lens("l", AT, EYE[:4])], "matrix", r"expected shape \[8, 8\], got \[4, 8\]"),
        ([Lens("l", "residual(*)", np.stack([EYE] * 3))], "matrix", r"or \[4, 8, 8\], one for each location"),
        ([Lens("l", AT, EYE, V[:3])], "bias", r"expected shape \[8\]"),
        ([Lens("l", AT, EYE * np.nan)], "matrix", "finite"),
        ([Lens("l", AT, "eye")], "matrix", "expected an array, got str"),
        ([Lens("l", "model.layers.1.mlp", EYE)], "at", "reads the residual stream"),
        ([Lens("l", AT, EYE, top_k=0)], "top_k", "1 to 1024"),
        ([Coordinates("c", AT, V[:5])], "basis", "hidden size is 8"),
        ([Project(AT, V[:5])], "basis", "hidden size is 8"),
        ([Project(AT, V, strength=float("inf"))], "strength", "finite"),
        ([Features("f", AT, sae(width=7))], "sae", "there have 8 features, and the autoencoder.s have 7"),
        ([Features("f", AT, sae(model="gpt2"))], "sae", "is of model 'gpt2', and this is 'org/M' or '/models/m'"),
        ([Features("f", AT, sae(at="residual(2)"))], "sae", r"is of residual\(2\)"),
        ([Features("f", "residual(*)", sae(at=AT))], "sae", "not the one location"),
        ([Features("f", AT, "calm")], "sae", r"has no autoencoder 'calm' \(it has: tiny\)"),
        ([Features("f", AT, "tiny", weights=V)], "weights", "leave them out"),
        ([Features("f", AT, 7)], "sae", "a SparseAutoencoder, or the name"),  # type: ignore[arg-type]
        ([Features("f", AT, Autoencoder("relu", 2, HIDDEN), weights=V)], "weights", "expected the 42 numbers"),
        ([Features("f", AT, sae(), top_k=5000)], "top_k", "expected 1 to 4096"),
        ([Features("f", AT, sae(), indices=[3, 3])], "indices", "different features"),
        ([Features("f", AT, sae(), indices=[12])], "indices", "features from 0 to 11, got 12"),
        ([Features("f", AT, sae(), indices=[1], threshold=1.0)], "threshold", "leave the threshold out"),
        ([SteerFeatures(AT, sae(), [])], "indices", "1 to 4096"),
        ([SteerFeatures(AT, "tiny", [5])], "indices", "features from 0 to 3, got 5"),
        ([SteerFeatures(AT, sae(), [1], min=2.0, max=1.0)], "max", "2.0 or more"),
        ([PROBE, hold(probe="q")], "probe", "no probe 'q'"),
        ([PROBE, hold(at="residual(*)")], "at", "one location"),
        ([PROBE, hold(output=1)], "output", "1 outputs"),
        ([PROBE, hold(min=2.0)], "max", "2.0 or more"),
        ([PROBE, hold(gain=-1.0)], "gain", "more than 0"),
        ([PROBE, hold(at="residual(2)")], "gain", r"expected a gain: .*since it reads residual\(1\)"),
        ([Probe("p", AT, reduce="norm"), hold()], "gain", "since it has no weight"),
        ([Probe("p", AT, V, activation="sigmoid"), hold()], "target", "between 0 and 1"),
        ([PROBE, hold(vector=np.r_[V[:4], -V[:4]])], "vector", "does not change along the vector"),
        ([PROBE, hold(target=Live("x"))], "target", "was not declared"),
        ([Probe("p", AT, V, reduce="moments")], "reduce", "moments are taken of the value itself"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(declared: list[Any], field: str, says: str) -> None:
    known = KnownModel(("org/M", "/models/m"), {"tiny": Autoencoder("relu", 4, HIDDEN)})
    with pytest.raises(DeclarationError, match=says) as error:
        check(decode_interventions(normalize(declared)), tree(), hidden_size=HIDDEN, live={}, model=known)
    assert error.value.field == f"interventions[{len(declared) - 1}].{field}"


def test_what_fits_is_taken() -> None:
    checked(
        PROBE,
        Probe("m", AT, reduce="moments"),
        Lens("l", "residual(1:3)", np.stack([EYE] * 2), np.stack([V] * 2)),
        Lens("l2", "residual(*)", EYE, V),
        Coordinates("c", "model.layers.*.mlp", np.stack([V, W])),
        Project(AT, Live("basis"), strength=Live("x")),
        Features("f", AT, sae(model="Gemma-2-2B", at=AT)),
        Features("g", AT, "unknown to the client"),
        SteerFeatures(AT, sae(), range(3), add=Live("x")),  # type: ignore[arg-type]
        hold(target=Live("x"), max=Live("x")),
        Hold("s2", "residual(3)", W, "m", 0.5, -1.0, 1.0, gain=0.1, output=3),
        Steer(AT, V),
        live={"basis": np.stack([V, W]), "x": 2.0},
    )


def test_an_autoencoder_of_another_model_is_taken_when_the_caller_says_so() -> None:
    other = sae(model="gpt2", at="residual(2)")
    known = KnownModel(("m",))
    declared = decode_interventions(normalize([Features("f", AT, other.elsewhere())]))
    assert check(declared, tree(), hidden_size=HIDDEN, live={}, model=known)
