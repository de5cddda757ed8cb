"""What the worker leaves of a value is compared with what blocks leave of it."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.block_host.expected_value import ExpectedValue, same_values

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_same_bits_are_the_same_values(dtype: torch.dtype) -> None:
    one = torch.tensor([[1.0, NAN, -0.0], [float("inf"), 2.0, 0.0]], dtype=dtype)
    assert same_values(one, one.clone())
    for place, value in (((0, 1), 1.0), ((0, 2), 0.0), ((1, 2), -0.0)):
        other = one.clone()
        other[place] = value
        assert not same_values(one, other), place


def test_what_is_no_number_is_the_same_with_any_sign() -> None:
    one = torch.tensor([NAN, 1.0, -0.0])
    other = torch.tensor([-NAN, 1.0, -0.0])
    assert one.view(torch.int32).tolist() != other.view(torch.int32).tolist()
    assert same_values(one, other)
    assert not same_values(one, torch.tensor([-NAN, 1.0, 0.0]))
    assert not same_values(one, torch.tensor([NAN, NAN, -0.0]))


def test_strides_make_no_difference() -> None:
    one = torch.arange(12.0).view(3, 4)
    other = one.T.contiguous().T
    assert other.stride() != one.stride()
    assert same_values(one, other)
    assert same_values(one[:, 1:3], other[:, 1:3])
    assert not same_values(one[:, 1:3], other[:, 0:2])
    # The bytes of both are the same, in another order.
    square = torch.arange(9.0).view(3, 3)
    assert not same_values(square, square.T)


@pytest.mark.parametrize("value", [torch.tensor(3), torch.empty(0, 4), torch.tensor([True, False])])
def test_tensors_of_any_form_are_compared(value: torch.Tensor) -> None:
    assert same_values(value, value.clone())
    assert not value.numel() or not same_values(value, value.clone().fill_(1 - int(value.flatten()[0])))


class Expected:
    """The expected value of two tensors, of which the blocks of the last row are over."""

    def __init__(self) -> None:
        self.served = torch.zeros(3, 2), torch.zeros(3, 2)
        self.left = self.served[0] + 1, self.served[1].clone()
        self.over = 0
        self.value = ExpectedValue(list(zip(self.served, self.left, strict=True)), self._leave)

    def _leave(self, one: torch.Tensor, copy: torch.Tensor) -> None:
        self.over += 1
        copy[-1] = one[-1]


def test_a_tensor_is_as_the_worker_leaves_it_but_for_the_rows_of_blocks_that_are_over() -> None:
    expected = Expected()
    expected.served[0][:2] += 1
    expected.served[0][2] = 5.0
    found = expected.value.of(expected.served[0])
    assert found is expected.left[0]
    assert found.tolist() == [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]
    assert expected.over == 1


def test_a_row_that_a_live_block_leaves_otherwise_is_as_the_worker_leaves_it() -> None:
    expected = Expected()
    expected.served[0][0] = 7.0
    found = expected.value.of(expected.served[0])
    assert found is not None
    assert found[0].tolist() == [1.0, 1.0]


def test_nothing_is_asked_of_a_tensor_that_is_left_as_expected() -> None:
    expected = Expected()
    expected.served[0].add_(1)
    for one, copy in zip(expected.served, expected.left, strict=True):
        assert expected.value.of(one) is copy
    assert not expected.over


def test_of_a_tensor_that_is_not_of_the_value_nothing_is_expected() -> None:
    expected = Expected()
    # An equal one is another one.
    assert expected.value.of(expected.served[0].clone()) is None
    assert expected.value.of(expected.served[0][:]) is None
