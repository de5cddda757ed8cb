"""Which settings an engine is built with, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.launch import engine_builder as engine_model
from tracewire_engine.launch.cli import demo_model
from tracewire_engine.launch.engine_builder import UnsupportedSetting

pytest.importorskip("vllm")
from vllm.engine.arg_utils import AsyncEngineArgs

#: vLLM's, without speculative decoding.
ARGUMENTS: Any = SimpleNamespace(speculative_config=None)


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "./nowhere"}, "Invalid repository ID or local directory specified: './nowhere'"),
        ({"max_model_len": 99999}, "max_model_len (99999) is greater than"),
    ],
)
def test_what_vllm_refuses_of_a_model_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedSetting) as refused:
        engine_model._scheduling(AsyncEngineArgs(**{"model": str(demo_model()), **options}))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


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


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2


def test_a_forward_s_source_names_its_operations_and_the_module_stays_as_it_is() -> None:
    module = Doubled()
    text = engine_model.forward_source(module)
    assert "torch_relu_0" in text
    assert "return torch.relu(x) * 2" in text
    assert "forward" not in vars(module)
    # What has no source in Python, and what is too long.
    assert engine_model.forward_source(torch.jit.script(Doubled())) == ""


def test_a_source_that_is_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_model, "_LONGEST_SOURCE", 10)
    assert engine_model.forward_source(Doubled()) == ""


@pytest.mark.parametrize(("runner", "variable"), [("first", "0"), ("second", "1")])
def test_the_runner_that_was_chosen_is_the_one_that_vllm_builds(
    monkeypatch: pytest.MonkeyPatch, runner: str, variable: str
) -> None:
    import vllm.triton_utils

    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    for _ in range(2):
        engine_model.choose_runner(runner, ARGUMENTS)
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == variable
    other = "first" if runner == "second" else "second"
    with pytest.raises(UnsupportedSetting, match=f"contradicts --model-runner {other}"):
        engine_model.choose_runner(other, ARGUMENTS)
    engine_model.choose_runner("auto", ARGUMENTS)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == variable


@pytest.mark.parametrize(
    ("triton", "stages", "config", "variable"),
    [
        (True, 1, None, None),
        (True, 1, {"method": "ngram"}, None),
        (True, 1, {"method": "medusa"}, "0"),
        (True, 1, {"method": "unheard-of"}, "0"),
        (True, 2, None, "0"),
        (False, 1, None, "0"),
    ],
)
def test_vllm_chooses_where_both_runners_can(
    monkeypatch: pytest.MonkeyPatch, triton: bool, stages: int, config: dict[str, str] | None, variable: str | None
) -> None:
    import vllm.triton_utils

    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", triton)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    given: Any = SimpleNamespace(speculative_config=config, pipeline_parallel_size=stages)
    for _ in range(2):
        engine_model.choose_runner("auto", given)
        assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == variable
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def test_the_second_runner_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.triton_utils

    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(UnsupportedSetting, match="needs Triton"):
        engine_model.choose_runner("second", ARGUMENTS)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedSetting, match="needs Triton"):
        engine_model.choose_runner("auto", ARGUMENTS)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    ],
)
def test_hosts_of_blocks_work_with_all_layouts(options: dict[str, Any]) -> None:
    given = AsyncEngineArgs(model=str(demo_model()), **options)
    found = engine_model._engine_options(given, engine_model.WorkerSettings(blocks="host"), {})
    assert {name: found[name] for name in ("tensor_parallel_size", "pipeline_parallel_size") if name in options}


def test_hosts_of_blocks_do_not_work_with_nnsight_s_collect() -> None:
    given = AsyncEngineArgs(model=str(demo_model()), tensor_parallel_size=2)
    settings = engine_model.WorkerSettings(blocks="host", check_collect=True)
    with pytest.raises(UnsupportedSetting, match=r"^--blocks host is not supported with --check-collect; leave"):
        engine_model._engine_options(given, settings, {})
