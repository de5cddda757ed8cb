"""Interventions placed for the workers: conditions on texts become token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tracewire_bus.domain.test_intervention_checks import HIDDEN, PATHS
from tracewire_bus.domain.intervention_checks import decode_interventions, normalize
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.messages import Autoencoder, EngineInfo, Features, ModuleInfo, Steer, When
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.placing import Placer

STRINGS = ["a", ".", "b", " ...", "a."]
V = np.ones(HIDDEN, np.float32)


def sent(*given: Any) -> list[Any]:
    return decode_interventions(normalize(given))


def placer() -> Placer:
    info = EngineInfo(
        *(), engine="e", model="m", layers="model.layers", layer_count=4, hidden_size=HIDDEN, vocabulary=len(STRINGS)
    )
    info.modules = [ModuleInfo(path=path, cls="Module") for path in PATHS]
    saes = {"tiny": Autoencoder(architecture="relu", features=4, width=HIDDEN)}
    return Placer(info, ModuleTree(info), saes, lambda ids: [STRINGS[one] for one in ids])


def test_a_text_becomes_the_tokens_that_have_it() -> None:
    (placed,) = placer().place(sent(Steer("residual(1)", V, when=When(text=".", start=2))), {})
    assert placed.intervention.when == When(tokens=[[1], [3], [4]], start=2)
    assert placed.sites == [("model.model.layers.1.output", True)]


def test_a_text_that_no_token_has_is_refused() -> None:
    with pytest.raises(Rejection, match="no token of the model has 'zz' in it") as error:
        placer().place(sent(Steer("residual(1)", V, when=When(text="zz"))), {})
    assert error.value.failure.field == "interventions[0].when.text"


def test_the_engine_knows_its_autoencoders() -> None:
    assert placer().place(sent(Features("f", "residual(1)", "tiny")), {})
    with pytest.raises(Rejection, match="has no autoencoder 'huge'") as error:
        placer().place(sent(Features("f", "residual(1)", "huge")), {})
    assert error.value.failure.field == "interventions[0].sae"
