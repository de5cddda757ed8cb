"""What of a model is known without running it: where its decoder layers are, and which settings it is refused with."""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import tracewire_engine  # noqa: E402, F401 (before nnsight)
from tracewire_engine.launch import engine_builder as engine_model  # noqa: E402
from tracewire_engine.launch.engine_builder import UnsupportedSetting  # noqa: E402
from tracewire_engine.model_layout import find_layers, takes_residual  # noqa: E402
from tracewire_engine.worker.blocks.encoder_guard import NotByToken, encoder_locations, refuse_encoders  # noqa: E402


def tree(**sizes: int) -> Any:
    """A model with lists of so many layers, by path with `__` for a dot."""
    root = torch.nn.Module()
    for path, size in sizes.items():
        *parents, last = path.split("__")
        module = root
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        module.add_module(last, torch.nn.ModuleList(torch.nn.Identity() for _ in range(size)))
    return root.named_modules()


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


def arguments(**options: Any) -> Any:
    config = SimpleNamespace(is_hybrid=options.pop("hybrid", False), is_attention_free=False, max_model_len=8192)
    plain = {"enable_prefix_caching": None, "enable_chunked_prefill": None, "max_num_batched_tokens": None}
    return SimpleNamespace(create_model_config=lambda: config, **{**plain, **options})


def test_steps_are_long_enough_for_any_prompt_unless_the_operator_says_otherwise() -> None:
    assert engine_model._scheduling(arguments())["max_num_batched_tokens"] == 8192
    assert "max_num_batched_tokens" not in engine_model._scheduling(arguments(max_num_batched_tokens=512))
    assert engine_model._scheduling(arguments(enable_prefix_caching=False))["enable_prefix_caching"] is False


def test_recurrent_layers_are_served_without_a_prefix_cache() -> None:
    assert engine_model._scheduling(arguments(hybrid=True))["enable_prefix_caching"] is False
    with pytest.raises(UnsupportedSetting, match="recurrent layers"):
        engine_model._scheduling(arguments(hybrid=True, enable_prefix_caching=True))


def test_adapters_that_are_none_are_refused(tmp_path: Path) -> None:
    options = SimpleNamespace(max_lora_rank=16, max_loras=1)
    with pytest.raises(UnsupportedSetting, match="no LoRA adapter"):
        engine_model._adapters(options, {"a": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text('{"r": 24}')
    chosen = engine_model._adapters(options, {"a": str(tmp_path)})
    assert (chosen["enable_lora"], chosen["max_lora_rank"]) == (True, 32)
    (tmp_path / "adapter_config.json").write_text('{"r": 4096}')
    with pytest.raises(UnsupportedSetting, match="rank 4096"):
        engine_model._adapters(options, {"a": str(tmp_path)})
