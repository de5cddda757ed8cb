"""Where a model has its decoder layers, and what its layers hand on."""

from __future__ import annotations

import pytest

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.modules import tree
from tracewire_engine.model_layout import find_layers, takes_residual

torch = pytest.importorskip("torch")


pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("sizes", "count", "path"),
    [
        ({"model__layers": 4}, 0, "model.layers"),
        ({"transformer__h": 4}, 4, "transformer.h"),
        ({"model__decoder__layers": 4}, 4, "model.decoder.layers"),
        ({"model__encoder__layers": 6, "model__decoder__layers": 4}, 4, "model.decoder.layers"),
        # A vision tower is not what `residual(i)` counts in, however deep.
        ({"visual__blocks": 32, "language_model__model__layers": 28}, 28, "language_model.model.layers"),
        ({"visual__blocks": 32, "language_model__model__layers": 28}, 0, "language_model.model.layers"),
        ({"vision_tower__vision_model__encoder__layers": 28, "language_model__model__layers": 28}, 28, None),
        ({"audio_tower__layers": 32, "language_model__model__layers": 28}, 28, "language_model.model.layers"),
        ({"model__layers": 4, "model__blocks": 9}, 4, "model.layers"),
        ({"model__stack": 4}, 4, ""),
    ],
)
def test_decoder_layers_are_found(sizes: dict[str, int], count: int, path: str | None) -> None:
    assert find_layers(tree(**sizes), count) == ("language_model.model.layers" if path is None else path)


@pytest.mark.parametrize(
    ("file", "layer", "sums"),
    [
        ("llama", "LlamaDecoderLayer", True),
        ("gemma3", "Gemma3DecoderLayer", True),
        ("qwen3_next", "Qwen3NextDecoderLayer", True),
        ("mamba2", "Mamba2DecoderLayer", True),
        ("deepseek_v2", "DeepseekV2DecoderLayer", True),
        # One tensor.
        ("gpt2", "GPT2Block", False),
        ("falcon_h1", "FalconH1ParallelHybrid", False),
        # Two, of which the next layer takes one.
        ("commandr", "CohereDecoderLayer", False),
        ("exaone4", "Exaone4DecoderLayer", False),
        ("granitemoehybrid", "GraniteMoeHybridMambaDecoderLayer", False),
        ("phimoe", "PhiMoEDecoderLayer", False),
        ("stablelm", "StablelmDecoderLayer", False),
    ],
)
def test_what_a_layer_hands_on_is_known_from_its_source(file: str, layer: str, sums: bool) -> None:
    kind = getattr(pytest.importorskip(f"vllm.model_executor.models.{file}"), layer)
    # As on a stage of a pipeline, which lacks the others' layers.
    assert takes_residual([torch.nn.Identity(), kind.__new__(kind)]) is sums
