"""What a block may ask for on an engine with CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tracewire_engine.worker.blocks.mediator import BlockMediator, UntappedLocation


def asking(taps: set[str]) -> BlockMediator:
    mediator = BlockMediator(compile("", "<block>", "exec"), {}, {})
    mediator.interleaver = SimpleNamespace(taps=frozenset(taps), counts={}, encoders=())
    return mediator


def test_an_untapped_location_is_an_error_when_it_is_asked_for() -> None:
    mediator = asking({"model.model.layers.2.output"})
    assert mediator.wanted("model.model.layers.2.output") == 0
    assert mediator.wanted("model.logits") == 0
    assert mediator.wanted("result") == 0
    for location in ("model.model.layers.1.output", "model.model.layers.2.input", "model.model.layers.2.mlp.skip"):
        with pytest.raises(UntappedLocation, match=r"serves only model\.layers\.2\.output") as raised:
            mediator.wanted(location)
        assert location.removeprefix("model.") in str(raised.value)


def test_an_engine_without_taps_serves_all() -> None:
    assert asking(set()).wanted("model.model.layers.1.output") == 0
