"""Activations are compiled once, and only for what the model itself calls them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.compiled_activations import compile_activations

LAYERS, WIDTH = 12, 32


class Compiler:
    """PyTorch's, whose kernels are PyTorch's own operations; counts how often it compiles, and what it
    compiled is called."""

    def __init__(self) -> None:
        self.times = self.calls = 0

    def __call__(self, function: Any) -> Any:
        return torch.compile(function, backend=self._backend)

    def _backend(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.times += 1

        def made(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return made


@pytest.fixture
def compiler() -> Compiler:
    torch._dynamo.reset()
    return Compiler()


@pytest.fixture
def model() -> Any:
    """Layers with vLLM's modules."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    made: Any = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        for number in range(LAYERS):
            layer: Any = torch.nn.Module()
            layer.silu, layer.gelu, layer.norm = SiluAndMul(), GeluAndMul(), RMSNorm(WIDTH)
            # vLLM's kernels of some processors come to other bits.
            layer.silu._forward_method = layer.silu.forward_native
            made.add_module(f"layer{number}", layer)
    return made


def run(model: Any, tokens: int) -> None:
    """Each activation as the model calls it, compared with its definition."""
    with torch.inference_mode():
        for layer in model.children():
            value = torch.randn(tokens, WIDTH)
            assert torch.equal(layer.silu(value), layer.silu.forward_native(value))


def test_activations_are_compiled_once_for_one_token_and_once_for_more(model: Any, compiler: Compiler) -> None:
    assert compile_activations(model, compiler) == [f"layer{number}.silu" for number in range(LAYERS)]
    run(model, 64)
    assert compiler.times == 2
    for tokens in (1, 2, 33, 64, 500, 1):
        before = compiler.calls
        run(model, tokens)
        assert compiler.calls == before + LAYERS
    assert compiler.times == 2


def test_a_few_tokens_come_first(model: Any, compiler: Compiler) -> None:
    compile_activations(model, compiler)
    run(model, 2)
    assert compiler.times == 0
    run(model, 64)
    assert compiler.times == 2


def test_a_block_that_calls_a_module_in_its_own_way_has_nothing_compiled(model: Any, compiler: Compiler) -> None:
    compile_activations(model, compiler)
    run(model, 64)
    silu = model.layer0.silu
    for value in (torch.randn(WIDTH), torch.randn(3, 4, WIDTH), torch.randn(5, 8), torch.randn(5, WIDTH).double()):
        assert torch.allclose(silu(value), silu.forward_native(value))
    assert torch.allclose(silu(x=torch.ones(5, WIDTH)), silu.forward_native(torch.ones(5, WIDTH)))
    assert compiler.times == 2


def test_a_block_that_changes_what_pytorch_compiles_for_has_nothing_compiled(model: Any, compiler: Compiler) -> None:
    compile_activations(model, compiler)
    run(model, 64)
    silu = model.layer0.silu
    with torch.inference_mode():
        value = torch.randn(5, WIDTH)
        assert silu(value[:0]).shape == (0, WIDTH // 2)
        with torch.enable_grad():
            assert torch.allclose(silu(value), silu.forward_native(value))
        with torch.autocast("cpu"), torch.device("cpu"):
            silu(value)
        with torch.device("cpu"):
            silu(value)
    parameter = torch.nn.Parameter(torch.randn(5, WIDTH))
    assert torch.allclose(silu(parameter), silu.forward_native(parameter))
    assert compiler.times == 2
    run(model, 33)
    assert compiler.times == 2


def test_an_activation_that_comes_to_other_values_stays_as_it_was(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def off(function: Any) -> Any:
        return lambda x: function(x) * 1.5

    compile_activations(model, off)
    run(model, 64)
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.tracewire"]
    assert said == [
        "the model's activations are not compiled, which costs some speed: it comes to other values than vLLM's"
    ]


def test_values_that_are_no_numbers_are_the_same(model: Any, compiler: Compiler) -> None:
    compile_activations(model, compiler)
    with torch.inference_mode():
        value = torch.full((64, WIDTH), torch.nan)
        assert model.layer0.silu(value).isnan().all()
    run(model, 64)
    assert compiler.times == 2


def test_what_cannot_be_compiled_stays_as_it_was(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> Any:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        return fails

    compile_activations(model, broken)
    run(model, 64)
    run(model, 64)
    said = [record.getMessage() for record in caplog.records if "no compiler here" in record.getMessage()]
    assert said == [
        "the model's activations are not compiled, which costs some speed: RuntimeError('no compiler here')"
    ]


def test_models_without_them_have_nothing_compiled(compiler: Compiler) -> None:
    assert compile_activations(torch.nn.Linear(2, 2), compiler) == []
