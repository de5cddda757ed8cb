"""Tensors that a block in a host gives to a module: what kernels would read or write beyond is refused."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tracewire_engine.worker.block_host.call_checks import check_inputs, checked_widths

WIDTH = 64


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))


class Packed(torch.nn.Module):
    """A linear module as vLLM has it on a CPU: its weight is packed, and the parameter is left empty."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size = WIDTH
        self.weight = torch.nn.Parameter(torch.ones(2048, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()
        weight = self.weight.data.clone()
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)
        if self.weight.numel():
            # vLLM packs none on a processor without AVX-512.
            self.cpu_linear = lambda rows, _, bias: torch.nn.functional.linear(rows, weight, bias)
            self.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """As vLLM's."""
        return self.quant_method.apply(self, rows)


class Embedding(torch.nn.Module):
    """An embedding as vLLM has it on one of two ranks: it has half the rows, and multiplies by them as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings = 8
        self.input_size = WIDTH
        self.weight = torch.nn.Parameter(torch.ones(4, WIDTH))
        self.quant_method = UnquantizedEmbeddingMethod()


class Shifted(torch.nn.Embedding):
    """An embedding that looks up each index two rows further on, as OPT's of positions does."""

    offset = 2


@pytest.mark.parametrize(
    ("module", "tensors", "expected"),
    [
        (Norm(), [torch.ones(3, 4)], ""),
        (Norm(), [torch.ones(3, 4), torch.ones(3, 4)], ""),
        (Norm(), [torch.ones(3, 4), torch.ones(2, 4)], "3 and 2 rows"),
        (Norm(), [torch.ones(3, 5)], "rows of 4 numbers"),
        (Norm(), [torch.ones(3, 4, dtype=torch.float64)], "rows of 4 numbers"),
        (Norm(), [torch.ones(101, 4)], "have 101"),
        (torch.nn.Embedding(5, 2), [torch.tensor([0, 4])], ""),
        (torch.nn.Embedding(5, 2), [torch.tensor([0, 5])], "indices from 0 to 5 of a table of 5 rows"),
        (torch.nn.Embedding(5, 2), [torch.tensor([-1])], "indices from -1"),
        (torch.nn.Embedding(5, 2), [torch.zeros(1000, dtype=torch.int64)], "have 1000"),
        (Embedding(), [torch.tensor([0, 7])], ""),
        (Embedding(), [torch.tensor([8])], "indices from 8 to 8 of a table of 8 rows"),
        (Embedding(), [torch.tensor([[3], [-1]])], "indices from -1"),
        (Embedding(), [torch.tensor([1.0])], "Embedding takes indices"),
        (torch.nn.Embedding(5, 2), [torch.tensor([0]), torch.tensor([float("nan")])], "takes indices"),
        (Shifted(5, 2), [torch.tensor([2])], ""),
        (Shifted(5, 2), [torch.tensor([3])], "a table of 3 rows"),
        (torch.nn.Linear(4, 2), [torch.ones(3, 9)], ""),
        (Packed(), [torch.ones(3, 9)], ""),
        (torch.nn.SiLU(), [torch.ones(3, 9)], ""),
    ],
)
def test_inputs_that_a_kernel_would_read_beyond_are_refused(
    module: torch.nn.Module, tensors: list[torch.Tensor], expected: str
) -> None:
    if expected:
        with pytest.raises(ValueError, match=expected):
            check_inputs(module, tensors, 100)
    else:
        check_inputs(module, tensors, 100)


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(4, 2 * WIDTH, dtype=torch.bfloat16),
        torch.ones(4, WIDTH // 2, dtype=torch.bfloat16),
        torch.ones(4, WIDTH, dtype=torch.float32),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ],
)
def test_a_packed_weight_is_multiplied_by_rows_that_fit(rows: torch.Tensor) -> None:
    module = torch.nn.Sequential(Packed())
    fitting = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    expected = module(fitting)
    with checked_widths(module.modules()):
        assert torch.equal(module(fitting), expected)
        with pytest.raises(ValueError, match=r"Packed takes rows of 64 numbers of torch\.bfloat16, and these are of"):
            module(rows)
    assert "apply" not in vars(module[0].quant_method)


def test_a_part_of_a_sharded_weight_is_multiplied_by_its_part() -> None:
    module = Packed()
    module.input_size, module.input_size_per_partition = 2 * WIDTH, WIDTH
    with checked_widths([module]), pytest.raises(ValueError, match="rows of 64 numbers"):
        module(torch.ones(4, 2 * WIDTH, dtype=torch.bfloat16))


class CodedMethod:
    """How a quantized module multiplies."""

    def apply(self, module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """The rows, multiplied by what the codes stand for."""
        return rows @ module.qweight.to(rows.dtype)


class Coded(torch.nn.Module):
    """A linear module as vLLM has it when its weight is quantized: integers stand for numbers of the model's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.params_dtype = WIDTH, torch.bfloat16
        self.qweight = torch.nn.Parameter(torch.ones(WIDTH, 8, dtype=torch.int32), requires_grad=False)
        self.quant_method = CodedMethod()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """As vLLM's."""
        return self.quant_method.apply(self, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_quantized_weight_is_multiplied_by_numbers_of_the_model(dtype: torch.dtype) -> None:
    module = Coded()
    with checked_widths([module]):
        assert module(torch.ones(4, WIDTH, dtype=torch.bfloat16)).shape == (4, 8)
        with pytest.raises(ValueError, match=r"Coded takes rows of 64 numbers of torch\.bfloat16"):
            module(torch.ones(4, WIDTH, dtype=dtype))
