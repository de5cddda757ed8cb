"""Where a model has its decoder layers, and what its layers hand on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.modules import tree
from tracewire_engine.model_layout import find_attention, find_layers, takes_residual

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


AttentionType = pytest.importorskip("vllm.v1.attention.backend").AttentionType


class Attention(torch.nn.Module):
    """As vLLM's, so far as it describes its heads."""

    def __init__(self, heads: int, kv_heads: int, size: int, size_v: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, size
        self.head_size_v = size if size_v is None else size_v
        self.kv_cache, self.impl = torch.empty(0), SimpleNamespace(scale=0.5)


class Projection(torch.nn.Module):
    def __init__(self, width: int, *, row_parallel: bool = True) -> None:
        super().__init__()
        self.input_size, self.input_is_parallel = width, row_parallel


def layer(attention: str, **children: torch.nn.Module) -> torch.nn.Module:
    made, inner = torch.nn.Module(), torch.nn.Module()
    for name, child in children.items():
        inner.add_module(name, child)
    made.add_module(attention, inner)
    made.add_module("mlp", Projection(12))
    return made


def test_heads_are_found_where_one_attention_has_one_projection_behind_it() -> None:
    model = torch.nn.Module()
    model.add_module(
        "h",
        torch.nn.ModuleList(
            [
                layer("attn", attn=Attention(4, 2, 3), c_proj=Projection(12), c_attn=Projection(7)),
                # Values of another size than keys.
                layer("self_attn", attn=Attention(4, 4, 3, 5), o_proj=Projection(20)),
                # Recurrent; two attentions; a projection that is not split by heads; one of another width.
                layer("mixer", out_proj=Projection(12)),
                layer("attn", attn=Attention(4, 2, 3), cross=Attention(4, 2, 3), c_proj=Projection(12)),
                layer("attn", attn=Attention(4, 2, 3), c_proj=Projection(12, row_parallel=False)),
                layer("attn", attn=Attention(4, 2, 3), c_proj=Projection(24)),
            ]
        ),
    )
    found = find_attention(model, "h")
    assert [(one.layer, one.module, one.output) for one in found] == [
        (0, "h.0.attn.attn", "h.0.attn.c_proj"),
        (1, "h.1.self_attn.attn", "h.1.self_attn.o_proj"),
    ]
    assert [(one.heads, one.kv_heads, one.head_size) for one in found] == [(4, 2, 3), (4, 4, 5)]
    assert find_attention(model, "") == []


@pytest.mark.parametrize(
    ("attributes", "impl", "reason"),
    [
        ({}, {}, ""),
        ({"attn_type": AttentionType.DECODER}, {}, ""),
        ({"kv_cache_dtype": "bfloat16"}, {"logits_soft_cap": 30.0}, ""),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "rounded to fp8_e4m3"),
        ({}, {"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({}, {"sinks": torch.ones(4)}, "sinks"),
        ({"has_sink": True}, {}, "sinks"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, {}, "another layer"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "not a decoder's"),
        ({"attn_type": "encoder_decoder"}, {}, "not a decoder's"),
        ({}, {"scale": None}, "scales the scores"),
    ],
)
def test_a_pattern_that_would_be_another_than_the_kernel_s_has_a_reason(
    attributes: dict[str, Any], impl: dict[str, Any], reason: str
) -> None:
    attention = Attention(4, 2, 3)
    vars(attention).update(attributes)
    vars(attention.impl).update(impl)
    model = torch.nn.Module()
    model.add_module("h", torch.nn.ModuleList([layer("attn", attn=attention, o_proj=Projection(12))]))
    (found,) = find_attention(model, "h")
    assert reason in found.opaque
    assert bool(found.opaque) is bool(reason)


def test_heads_are_those_of_vllm_s_attention() -> None:
    """The names that are looked for are those that vLLM's classes have."""
    import inspect

    from vllm.model_executor.layers.attention import Attention as Real
    from vllm.model_executor.layers.linear import RowParallelLinear

    source = inspect.getsource(Real.__init__)
    assert Real.__name__ == "Attention"
    assert all(f"self.{name} = " in source for name in ("num_heads", "num_kv_heads", "head_size", "kv_cache"))
    source = inspect.getsource(RowParallelLinear.__init__)
    assert "self.input_is_parallel = " in source
