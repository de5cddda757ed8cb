"""Kernels are compiled once, for what the model itself calls them with, and run within CUDA graphs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker import compiled_kernels
from tracewire_engine.worker.compiled_kernels import compile_kernels

LAYERS, WIDTH, HEAD, HEADS, POSITIONS = 12, 32, 8, 4, 64


class Compiler:
    """PyTorch's, whose kernels are PyTorch's own operations; counts how often it compiles, and what it
    compiled is called."""

    def __init__(self) -> None:
        self.times = self.calls = 0

    def __call__(self, function: Any, _: bool) -> Any:
        return torch.compile(function, backend=self._backend)

    def _backend(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.times += 1

        def made(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return made


def alike(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Each kernel takes as long as every other one."""
    return [1.0] * len(calls)


@pytest.fixture
def compiler() -> Compiler:
    torch._dynamo.reset()
    return Compiler()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Within this context, a CUDA graph is being recorded, as the worker sees it."""
    state = [False]
    monkeypatch.setattr(compiled_kernels, "_is_recorded", lambda _: state[0])

    @contextmanager
    def recording() -> Any:
        state[0] = True
        yield
        state[0] = False

    return recording


@pytest.fixture
def model() -> Any:
    """Layers with vLLM's modules."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    made: Any = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        rotation = RotaryEmbedding(HEAD, HEAD, POSITIONS, 10000.0, True, torch.float32)
        for number in range(LAYERS):
            layer: Any = torch.nn.Module()
            layer.silu, layer.gelu, layer.norm, layer.rotation = SiluAndMul(), GeluAndMul(), RMSNorm(WIDTH), rotation
            # vLLM's kernels of some processors come to other bits.
            layer.silu._forward_method = layer.silu.forward_native
            made.add_module(f"layer{number}", layer)
        rotation._forward_method = rotation.forward_native
    return made


def projected(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, and queries and keys within one tensor, as attention calls a rotary embedding."""
    together = torch.randn(tokens, (HEADS + 2) * HEAD)
    query, key, _ = together.split([HEADS * HEAD, HEAD, HEAD], dim=-1)
    return torch.arange(tokens) % POSITIONS, query, key


def run(model: Any, tokens: int) -> None:
    """Each module as the model calls it, compared with its definition."""
    with torch.inference_mode():
        for layer in model.children():
            value = torch.randn(tokens, WIDTH)
            assert torch.equal(layer.silu(value), layer.silu.forward_native(value))
            given = projected(tokens)
            for found, wanted in zip(layer.rotation(*given), layer.rotation.forward_native(*given), strict=True):
                assert torch.equal(found, wanted)


def paths() -> list[str]:
    return ["layer0.silu", "layer0.rotation", *(f"layer{number}.silu" for number in range(1, LAYERS))]


def test_kernels_are_compiled_once_for_one_token_and_once_for_more(
    model: Any, compiler: Compiler, recorded: Any
) -> None:
    assert compile_kernels(model, compiler, alike) == paths()
    run(model, 64)
    assert compiler.times == 4
    for tokens in (1, 2, 33, 64, 500, 1):
        before = compiler.calls
        with recorded():
            run(model, tokens)
        assert compiler.calls == before + 2 * LAYERS
    assert compiler.times == 4


def test_outside_of_graphs_vllms_own_kernels_run(model: Any, compiler: Compiler) -> None:
    compile_kernels(model, compiler, alike)
    run(model, 64)
    before = compiler.calls
    run(model, 64)
    assert compiler.calls == before


@pytest.mark.parametrize(
    ("one", "single", "said"),
    [((1.0, 1.2), True, "1, 2 to 32"), ((1.2, 1.0), False, "2 to 32")],
)
def test_a_kernel_is_compiled_for_as_many_tokens_as_it_is_faster_for(
    model: Any,
    compiler: Compiler,
    recorded: Any,
    caplog: pytest.LogCaptureFixture,
    one: tuple[float, float],
    single: bool,
    said: str,
) -> None:
    # Of both kernels, for 16, 32 and 64 tokens, and for one.
    times = iter([1.0, 1.1, 2.0, 2.1, 4.0, 3.9, *one])
    caplog.set_level("INFO", "vllm.tracewire")
    compile_kernels(model, compiler, lambda calls: [(call(), next(times))[1] for call in calls])
    silu = model.layer0.silu
    with torch.inference_mode():
        silu(torch.randn(64, WIDTH))
        for tokens, uses in ((1, single), (2, True), (16, True), (32, True), (33, False), (64, False), (500, False)):
            before = compiler.calls
            with recorded():
                silu(torch.randn(tokens, WIDTH))
            assert compiler.calls == before + uses
    assert next(times, None) is None
    assert messages(caplog, "INFO") == [
        "in CUDA graphs, the worker computes the model's activations by compiled kernels in steps with so many tokens: "
        + said
    ]


def test_a_kernel_that_is_never_faster_is_not_used(
    model: Any, compiler: Compiler, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.tracewire")
    compile_kernels(model, compiler, lambda calls: [1.1, 1.0])
    run(model, 64)
    before = compiler.calls
    with recorded():
        run(model, 64)
        run(model, 1)
    assert compiler.calls == before
    assert messages(caplog, "INFO") == [
        f"in CUDA graphs, the worker computes the model's {kind} by vLLM's kernels, which are faster here"
        for kind in ("activations", "rotary embeddings")
    ]


def test_nothing_is_compiled_while_the_engine_serves(model: Any, compiler: Compiler, recorded: Any) -> None:
    compile_kernels(model, compiler, alike, serving=lambda: True)
    run(model, 64)
    with recorded():
        run(model, 64)
    assert compiler.times == compiler.calls == 0


def test_what_comes_to_other_values_for_some_tensors_is_compiled_for_others(
    model: Any, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def half(function: Any, _: bool) -> Any:
        def made(*given: Any) -> Any:
            calls.append(len(given[0]))
            return function(*given) * (2.0 if given[0].shape[-1] == 2 * WIDTH else 1.0)

        return made if function.__name__ == "forward_native" else function

    compile_kernels(model, half, alike)
    wide, other = model.layer0.silu, model.layer1.silu
    with torch.inference_mode():
        wide(torch.randn(64, 2 * WIDTH))
        other(torch.randn(64, WIDTH))
        calls.clear()
        with recorded():
            wide(torch.randn(7, 2 * WIDTH))
            other(torch.randn(9, WIDTH))
    assert calls == [9]
    assert len(messages(caplog)) == 1


def test_a_few_tokens_come_first(model: Any, compiler: Compiler, recorded: Any) -> None:
    compile_kernels(model, compiler, alike)
    run(model, 2)
    with recorded():
        run(model, 64)
    assert compiler.times == 0
    run(model, 64)
    assert compiler.times == 4


def test_a_block_that_calls_a_module_in_its_own_way_has_nothing_compiled(
    model: Any, compiler: Compiler, recorded: Any
) -> None:
    compile_kernels(model, compiler, alike)
    run(model, 64)
    silu, rotation = model.layer0.silu, model.layer0.rotation
    with recorded():
        for value in (torch.randn(WIDTH), torch.randn(3, 4, WIDTH), torch.randn(5, 8), torch.randn(5, WIDTH).double()):
            assert torch.allclose(silu(value), silu.forward_native(value))
        assert torch.allclose(silu(x=torch.ones(5, WIDTH)), silu.forward_native(torch.ones(5, WIDTH)))
        positions, query, key = projected(5)
        for given in [(positions, query), (positions, query, None), (positions, query.contiguous(), key)]:
            assert torch.equal(rotation(*given)[0], rotation.forward_native(*given)[0])
    assert compiler.times == 4


def test_a_block_that_changes_what_pytorch_compiles_for_has_nothing_compiled(
    model: Any, compiler: Compiler, recorded: Any
) -> None:
    compile_kernels(model, compiler, alike)
    run(model, 64)
    silu = model.layer0.silu
    with torch.inference_mode(), recorded():
        value = torch.randn(5, WIDTH)
        assert silu(value[:0]).shape == (0, WIDTH // 2)
        with torch.enable_grad():
            assert torch.allclose(silu(value), silu.forward_native(value))
        with torch.autocast("cpu"), torch.device("cpu"):
            silu(value)
        with torch.device("cpu"):
            silu(value)
    parameter = torch.nn.Parameter(torch.randn(5, WIDTH))
    with recorded():
        assert torch.allclose(silu(parameter), silu.forward_native(parameter))
        assert compiler.times == 4
        run(model, 33)
    assert compiler.times == 4


def messages(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    """What the worker has logged at a level."""
    every = [record for record in caplog.records if record.name == "vllm.tracewire"]
    return [record.getMessage() for record in every if record.levelname == level]


def test_what_comes_to_other_values_stays_as_it_was(
    model: Any, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def off(function: Any, _: bool) -> Any:
        def wrong(*given: Any) -> Any:
            value = function(*given)
            return (value[0], value[1] * 1.5) if isinstance(value, tuple) else value * 1.5

        return wrong

    compile_kernels(model, off, alike)
    run(model, 64)
    with recorded():
        run(model, 64)
    assert messages(caplog) == [
        f"the model's {kind} are not compiled, which costs some speed: they come to other values than vLLM's"
        for kind in ("activations", "rotary embeddings")
    ]


@pytest.mark.parametrize("kernels_round", [True, False])
def test_a_kernel_rounds_in_between_where_vllms_does(
    model: Any, recorded: Any, caplog: pytest.LogCaptureFixture, kernels_round: bool
) -> None:
    calls: list[str] = []

    def compiled(function: Any, rounds: bool) -> Any:
        def made(*given: Any) -> Any:
            calls.append(function.__name__)
            values = function(*given)
            if rounds == kernels_round:
                return values
            return tuple(value * 1.01 for value in values) if isinstance(values, tuple) else values * 1.01

        return made

    compile_kernels(model, compiled, alike)
    run(model, 64)
    calls.clear()
    with recorded():
        run(model, 33)
    assert calls == ["forward_native", "rotated"] * LAYERS
    assert messages(caplog) == []


def test_values_are_compared_at_many_positions_whatever_the_first_step_has(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def unrotated(function: Any, _: bool) -> Any:
        return lambda *given: (given[1], given[2]) if len(given) > 1 else function(*given)

    compile_kernels(model, unrotated, alike)
    _, query, key = projected(64)
    model.layer0.rotation(torch.zeros(64, dtype=torch.int64), query, key)
    assert "rotary embeddings are not compiled" in messages(caplog)[0]


def test_values_that_are_no_numbers_are_the_same(model: Any, compiler: Compiler) -> None:
    compile_kernels(model, compiler, alike)
    with torch.inference_mode():
        value = torch.full((64, WIDTH), torch.nan)
        assert model.layer0.silu(value).isnan().all()
    run(model, 64)
    assert compiler.times == 4


def test_what_cannot_be_compiled_stays_as_it_was(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any, __: bool) -> Any:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        return fails

    compile_kernels(model, broken, alike)
    run(model, 64)
    run(model, 64)
    assert messages(caplog) == [
        f"the model's {kind} are not compiled, which costs some speed: RuntimeError('no compiler here')"
        for kind in ("activations", "rotary embeddings")
    ]


def test_an_embedding_with_a_kernel_of_its_own_stays_as_it_was(model: Any, compiler: Compiler) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    class Own(RotaryEmbedding):
        def forward_cuda(self, *given: Any) -> Any:
            return given[1:]

    made: Any = torch.nn.Module()
    made.rotation = model.layer0.rotation
    made.rotation.__class__ = Own
    assert compile_kernels(made, compiler, alike) == []


def test_models_without_them_have_nothing_compiled(compiler: Compiler) -> None:
    assert compile_kernels(torch.nn.Linear(2, 2), compiler, alike) == []
