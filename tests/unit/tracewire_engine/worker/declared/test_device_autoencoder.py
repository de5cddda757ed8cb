"""One autoencoder computes what NumPy does, in the host's memory and split over ranks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.later_plans import ARCHITECTURES, autoencoder
from tests.support.rank_threads import on_ranks
from tracewire_engine.worker.declared import device_autoencoder
from tracewire_engine.worker.declared.device_autoencoder import Choice, Choices, DeviceAutoencoder, Gather

CPU = torch.device("cpu")


def made(sae: Any, **where: Any) -> DeviceAutoencoder:
    """It as an engine has it."""
    return DeviceAutoencoder(sae.description, torch.from_numpy(sae.packed.copy()), CPU, **where)


def streams(width: int, rows: int = 6) -> torch.Tensor:
    """Values that it reads."""
    return torch.from_numpy(np.random.default_rng(9).normal(size=(rows, width)).astype(np.float32))


def of_chosen(one: DeviceAutoencoder, indices: list[int], values: torch.Tensor, gather: Gather | None = None) -> Any:
    choice = one.chosen(indices)
    choice.complete(gather)
    products = values @ choice.rows[: len(indices)].T
    return one.of_chosen(products, choice.vectors, values, gather)


def gathering(add: Callable[[torch.Tensor], torch.Tensor], rank: int, ranks: int) -> Gather:
    """What gets the tensors of all ranks."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        found = mine.new_zeros(ranks, *mine.shape)
        found[rank] = mine
        return add(found)

    return gather


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_are_those_of_numpy(architecture: str) -> None:
    sae = autoencoder(architecture)
    values = streams(sae.description.width)
    one, expected = made(sae), sae.encode(values.numpy())
    assert 0 < np.count_nonzero(expected) < expected.size
    np.testing.assert_allclose(one.activations(values).numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_chosen(one, [3, 1], values).numpy(), expected[:, [3, 1]], rtol=1e-4, atol=1e-4)
    activations, features = one.greatest(values, 4)
    np.testing.assert_allclose(activations.numpy(), -np.sort(-expected)[:, :4], rtol=1e-4, atol=1e-4)
    assert torch.equal(one.activations(values).gather(-1, features), activations)


def test_values_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="width 16 does not fit values of \\[5\\]"):
        made(autoencoder("relu")).activations(torch.zeros(2, 5))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_autoencoder_in_the_hosts_memory_computes_the_same(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen features bit for bit, all features to the rounding of products in pieces."""
    sae = autoencoder(architecture)
    width = sae.description.width
    monkeypatch.setattr(device_autoencoder, "_PIECE", 7 * 4 * width)
    resident, one = made(sae), made(sae, offloaded=True)
    assert (one.host_nbytes, one.nbytes) == (resident.nbytes, one.vectors.nbytes)
    assert one.streams(chosen=False)
    assert one.streams(chosen=True) == (architecture == "topk")
    assert not resident.streams(chosen=False)
    values = streams(width)
    assert torch.equal(one.chosen([3, 1]).rows, resident.chosen([3, 1]).rows)
    assert torch.equal(one.vectors, resident.vectors)
    torch.testing.assert_close(one.products(values), resident.products(values), rtol=1e-6, atol=1e-6)
    found, expected = one.activations(values), resident.activations(values)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 24])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_that_split_it_come_to_what_one_does(
    architecture: str, ranks: int, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of chosen features bit for bit, all else to the rounding of products of fewer features at once."""
    sae, chosen = autoencoder(architecture), [3, 23, 1, 12]
    width = sae.description.width
    # Some rows at a time, and some features.
    monkeypatch.setattr(device_autoencoder, "_AT_ONCE", 4 * 24 // ranks * 2)
    monkeypatch.setattr(device_autoencoder, "_PIECE", 3 * 4 * width)
    whole, values = made(sae), streams(width)
    expected = [whole.chosen(chosen).rows, *whole.greatest(values, 9), of_chosen(whole, chosen, values)]

    def on(rank: int, add: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        one, gather = made(sae, rank=rank, ranks=ranks, offloaded=offloaded), gathering(add, rank, ranks)
        assert one.exchanges(chosen=False)
        assert one.exchanges(chosen=True) == (architecture == "topk")
        found = of_chosen(one, chosen, values, gather)
        # They are there now, for all that choose the same.
        assert one.chosen(chosen).whole
        return [one.chosen(chosen).rows, *one.greatest(values, 9, gather), found]

    for rows, activations, features, picked in on_ranks(ranks, on):
        assert torch.equal(rows, expected[0])
        torch.testing.assert_close(activations, expected[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(features[activations > 0], expected[2][expected[1] > 0])
        torch.testing.assert_close(picked, expected[3], rtol=1e-5, atol=1e-5)


def test_rows_of_chosen_features_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all autoencoders together; the last ones stay, however many bytes they have."""

    def choice(rows: int) -> Choice:
        return Choice(torch.zeros(rows, 1), torch.zeros(0), whole=True)

    monkeypatch.setattr(device_autoencoder, "CHOICE_BYTES", 40)
    choices, dropped = Choices(), []
    choices.dropped = lambda rows: dropped.append(len(rows))
    first = choices.get(b"a", (1,), lambda: choice(4))
    choices.get(b"b", (1,), lambda: choice(5))
    assert choices.get(b"a", (1,), lambda: choice(1)) is first
    assert not dropped
    choices.get(b"a", (2,), lambda: choice(6))
    assert dropped == [5]
    assert choices.get(b"a", (1,), lambda: choice(1)) is first
    large = choices.get(b"b", (3,), lambda: choice(100))
    assert dropped == [5, 6, 4]
    assert choices.nbytes == 400
    assert choices.get(b"b", (3,), lambda: choice(1)) is large
    choices.get(b"b", (4,), lambda: choice(2))
    assert choices.nbytes == 8
