"""Names of TransformerLens's are told apart from module paths, and translated."""

from __future__ import annotations

import pytest

from tracewire_bus.domain.foreign_names import our_name


@pytest.mark.parametrize(
    ("at", "ours"),
    [
        ("blocks.12.hook_resid_post", "'residual(12)'"),
        ("blocks.12.hook_resid_pre", "'residual(11)', the stream after the layer before"),
        ("hook_resid_post", "'residual(LAYER)'"),
        ("hook_resid_pre", "'residual(LAYER - 1)', the stream after the layer before"),
        ("blocks.3.attn.hook_z", "'heads(3)'"),
        ("blocks.3.attn.hook_pattern", "'heads(3)' of an AttentionPattern"),
        # Before the first layer there is the embedding, whose module each model names as it likes.
        ("blocks.0.hook_resid_pre", None),
        ("blocks.3.hook_mlp_out", None),
        ("model.layers.3.mlp", None),
        ("", None),
    ],
)
def test_names_are_translated(at: str, ours: str | None) -> None:
    assert our_name(at) == ours
