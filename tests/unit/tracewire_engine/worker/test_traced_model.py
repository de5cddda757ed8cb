"""`model.residual(i)` counts the decoder layers of any model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.worker.traced_model import TracedModel


def _model(path: str = "model.layers") -> Any:
    """What `residual` looks at of a model of four layers."""
    return SimpleNamespace(
        _tracewire_layers=path, _tracewire_sums=True, model=SimpleNamespace(layers=["l0", "l1", "l2", "l3"])
    )


@pytest.mark.parametrize(("index", "layer"), [(0, 0), (3, 3), (-1, 3), (-4, 0)])
def test_layers_count_from_either_end(index: int, layer: int) -> None:
    stream = TracedModel.residual(_model(), index)
    assert (stream.index, stream._layer) == (layer, f"l{layer}")


@pytest.mark.parametrize("index", [4, -5])
def test_a_layer_that_there_is_not(index: int) -> None:
    with pytest.raises(IndexError, match=r"model\.layers has 4 layers, 0 to 3"):
        TracedModel.residual(_model(), index)


def test_a_model_without_layers_has_no_such_stream() -> None:
    with pytest.raises(ValueError, match="no list of decoder layers"):
        TracedModel.residual(_model(""), 0)
