"""The final norm of the last stage, built anew on another stage."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.parallel.head_replicas import _built, _Spec


class Norm(torch.nn.Module):
    """A norm of some size."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps


def test_it_is_a_copy_of_a_norm_that_this_stage_has() -> None:
    stage = torch.nn.ModuleList([Norm(4), Norm(8)])
    made = _built(_Spec.of("model.norm", Norm(8)), stage)
    assert isinstance(made, Norm)
    assert made.weight.shape == (8,)
    assert made is not stage[1]
    assert made.weight is not stage[1].weight


@pytest.mark.parametrize(
    ("norm", "says"), [(Norm(16), "no Norm of that size"), (Norm(8, eps=1e-6), "Norm has other settings")]
)
def test_without_one_of_its_size_and_settings_it_stays_where_it_is(norm: Norm, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _built(_Spec.of("model.norm", norm), torch.nn.ModuleList([Norm(8)]))
