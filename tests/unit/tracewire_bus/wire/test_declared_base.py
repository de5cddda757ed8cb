"""What declared interventions of all kinds have in common."""

from __future__ import annotations

import numpy as np

from tracewire_bus.wire.messages import Live, Patch


def test_the_repr_has_what_was_given_and_no_elements_of_arrays() -> None:
    patch = Patch("residual(1)", np.ones((2, 4), np.float32), positions=[*range(9)], strength=Live("alpha"))
    assert repr(patch) == (
        "Patch(at='residual(1)', values=<float32 [2, 4]>, positions=<list of 9>, strength=Live(live='alpha'))"
    )
