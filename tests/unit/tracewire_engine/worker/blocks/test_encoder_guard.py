"""What runs on images is told from what runs on tokens."""

from __future__ import annotations

import pytest

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.modules import tree
from tracewire_engine.worker.blocks.encoder_guard import NotByToken, encoder_locations, refuse_encoders

pytest.importorskip("vllm")


def test_what_runs_on_images_is_told_from_what_runs_on_tokens() -> None:
    model = dict(tree(vision_tower__layers=2, projector=1, model__visual=1, model__language__layers=4, lm_head=1))[""]
    assert encoder_locations(model) == ()
    model.supports_multimodal = True
    model.get_language_model = lambda: model.model.language
    found = encoder_locations(model)
    assert found == ("model.vision_tower.", "model.projector.", "model.model.visual.")
    for served in ("model.model.language.layers.0.output", "model.lm_head.output", "model.output", "model.model.input"):
        refuse_encoders(found, served)
    for refused in ("model.vision_tower.output", "model.vision_tower.layers.1.input", "model.model.visual.0.output"):
        with pytest.raises(NotByToken, match=refused.removeprefix("model.")):
            refuse_encoders(found, refused)
