"""One sparse autoencoder where it is used: on the device, in the host's memory, or split over tensor-parallel ranks.

A rank of a split autoencoder has the rows of its own features. What all features decide, such as which activations are
the greatest, each rank decides among its own; the ranks then exchange their few candidates, and decide among these. The
rows of chosen features come to all ranks once, when they are first used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from tracewire_bus.domain.autoencoders import unpacked
from tracewire_bus.wire.feature_kinds import Autoencoder
from tracewire_engine.protocol.autoencoder_parts import features_of, size_in_bytes

__all__ = ["CHOICE_BYTES", "Choice", "Choices", "DeviceAutoencoder", "Gather"]

#: Bytes of an encoder that are copied to the device at once.
_PIECE: Final = 64 << 20
#: Bytes of activations that are computed at once.
_AT_ONCE: Final = 256 << 20
#: Bytes of the rows of chosen features that are kept for further requests.
CHOICE_BYTES: Final = 128 << 20

Gather: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What makes of a tensor of this rank those of all ranks, `[ranks, ...]`. It raises what ends the requests that use it,
if the ranks do not agree on it."""


class Choice:
    """The rows of chosen features.

    Attributes:
        rows: of the encoder, then of the decoder, `[2 * n, width]`. Until `complete`, those of other ranks are 0.
        vectors: `DeviceAutoencoder.vectors` of the features, `[n, ...]`.
    """

    def __init__(self, rows: torch.Tensor, vectors: torch.Tensor, *, whole: bool) -> None:
        self.rows, self.vectors, self.whole = rows, vectors, whole

    @property
    def nbytes(self) -> int:
        """Its bytes on the device."""
        return int(self.rows.nbytes) + int(self.vectors.nbytes)

    def complete(self, gather: Gather | None) -> None:
        """Get the rows of other ranks, unless that was done."""
        if not self.whole:
            assert gather is not None
            # Each row is 0 on all ranks but one, so the sum is exact.
            self.rows.copy_(gather(self.rows).sum(0))
            self.whole = True


class Choices:
    """The rows of chosen features of all autoencoders, the least recently used of which go first.

    Which ones are kept depends on the requests alone: the ranks of a split autoencoder complete them together.

    Attributes:
        nbytes: of all of them. Only the last one may have more than `CHOICE_BYTES`.
        dropped: is called with the rows that are not kept any more.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.dropped: Callable[[torch.Tensor], None] = lambda rows: None
        self._kept: OrderedDict[tuple[bytes, tuple[int, ...]], Choice] = OrderedDict()

    def get(self, autoencoder: bytes, indices: tuple[int, ...], make: Callable[[], Choice]) -> Choice:
        """The rows of features of an autoencoder, which `make` makes if they are not here."""
        key = autoencoder, indices
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            self.nbytes += found.nbytes
            while self.nbytes > CHOICE_BYTES and len(self._kept) > 1:
                _, last = self._kept.popitem(last=False)
                self.nbytes -= last.nbytes
                self.dropped(last.rows)
        else:
            self._kept.move_to_end(key)
        return found


class DeviceAutoencoder:
    """One autoencoder, float32, or a rank's part of it.

    The decoder's bias is a part of the encoder's where the autoencoder takes it off its input.

    Args:
        one: what it is.
        packed: its weights, in the host's memory.
        device: where it is used.
        offloaded: whether its encoder and decoder stay in the host's memory, which is pinned.
        rank, ranks: over how many ranks it is split, and the number of this one.
        key: names it among those whose rows are in `choices`.
        choices: keeps the rows of chosen features.
    """

    def __init__(
        self,
        one: Autoencoder,
        packed: torch.Tensor,
        device: torch.device,
        *,
        offloaded: bool = False,
        rank: int = 0,
        ranks: int = 1,
        key: bytes = b"",
        choices: Choices | None = None,
    ) -> None:
        self._key, self._choices = key, Choices() if choices is None else choices
        self.one, self.offloaded, self.ranks, self._device = one, offloaded, ranks, device
        self._features = features_of(one, rank, ranks)
        own = slice(self._features.start, self._features.stop)
        if ranks == 1:
            packed = self._placed(packed)
        parts = unpacked(one, packed)
        self.encoder, self.decoder = parts["encoder"], parts["decoder"]
        #: `[features, 1 to 3]`, of all ranks: the bias, and the threshold, or the feature's index, or the gate's bias
        #: and the scale.
        self.vectors = _vectors(one, parts).to(device)
        if ranks > 1:
            self.encoder, self.decoder = (self._placed(part[own]) for part in (self.encoder, self.decoder))
        self._own_vectors = self.vectors[own]
        taken = size_in_bytes(one, rank, ranks)
        #: The bytes that it takes of the device, and of the host.
        self.nbytes: int = self.vectors.nbytes if offloaded else taken
        self.host_nbytes: int = taken if offloaded else 0

    def _placed(self, part: torch.Tensor) -> torch.Tensor:
        """A copy of a part of the weights, where it is to be."""
        if not self.offloaded:
            return part.to(self._device, copy=True)
        # Pinned, so that copies of it do not wait.
        return part.clone() if self._device.type == "cpu" else part.pin_memory()

    def chosen(self, indices: Sequence[int]) -> Choice:
        """The rows of chosen features. `Choice.complete` is called before they are used."""
        return self._choices.get(self._key, tuple(indices), lambda: self._choice(indices))

    def _choice(self, indices: Sequence[int]) -> Choice:
        places = torch.tensor(indices, dtype=torch.int64, device=self.encoder.device)
        vectors = self.vectors[places.to(self._device)]
        here = (places >= self._features.start) & (places < self._features.stop)
        places = (places - self._features.start).clamp(0, len(self._features) - 1)
        rows = torch.cat([part[places] * here[:, None] for part in (self.encoder, self.decoder)])
        return Choice(rows.to(self._device), vectors, whole=self.ranks == 1)

    def streams(self, *, chosen: bool) -> bool:
        """Whether each use copies the encoder from the host, for the activations of `chosen` features or of all."""
        return self.offloaded and self._needs_all(chosen=chosen)

    def exchanges(self, *, chosen: bool) -> bool:
        """Whether the ranks exchange candidates in each use, likewise."""
        return self.ranks > 1 and self._needs_all(chosen=chosen)

    def _needs_all(self, *, chosen: bool) -> bool:
        return not chosen or self.one.architecture == "topk"

    def products(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, features]` of float32 values `[rows, width]`: those of this rank's features.

        Raises:
            ValueError: the values are of another width.
        """
        if values.dim() != 2 or values.shape[-1] != self.one.width:
            raise ValueError(
                f"an autoencoder of width {self.one.width} does not fit values of {list(values.shape[1:])}"
            )
        if not self.offloaded:
            return values @ self.encoder.T
        found = values.new_empty(len(values), len(self.encoder))
        rows = max(1, _PIECE // (4 * self.one.width))
        for start in range(0, len(self.encoder), rows):
            piece = self.encoder[start : start + rows].to(self._device, non_blocking=True)
            found[:, start : start + rows] = values @ piece.T
        return found

    def activations(self, values: torch.Tensor, gather: Gather | None = None) -> torch.Tensor:
        """The activations of this rank's features, `[rows, features]`, of float32 values `[rows, width]`."""
        products = self.products(values)
        if self.one.architecture != "topk":
            return self._active(products, self._own_vectors)
        before = products + self._own_vectors[:, 0]
        return torch.where(before >= self._least(before, gather), before.relu(), 0.0)

    def greatest(
        self, values: torch.Tensor, count: int, gather: Gather | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` greatest activations of rows, the greatest first, and their features: `[rows, count]` each."""
        count = min(count, self.one.features)
        # As many on each rank, which exchange as often.
        rows = max(1, _AT_ONCE // (4 * -(-self.one.features // self.ranks)))
        parts = [
            self.activations(piece, gather).topk(min(count, len(self._features)), dim=-1)
            for piece in values.split(rows)
        ]
        activations, features = (torch.cat(found) if len(found) > 1 else found[0] for found in zip(*parts, strict=True))
        if self.ranks == 1:
            return activations, features
        assert gather is not None
        # Features are whole numbers below 2 ** 24, which float32 holds exactly.
        mine = torch.stack([activations, (features + self._features.start).float()], -1)
        candidates = _side_by_side(gather(_filled(mine, count, 0.0)))
        best = candidates[..., 0].topk(count, dim=-1)
        return best.values, candidates[..., 1].gather(-1, best.indices).long()

    def of_chosen(
        self, products: torch.Tensor, vectors: torch.Tensor, values: torch.Tensor, gather: Gather | None = None
    ) -> torch.Tensor:
        """The activations of some features: of their products `[rows, n]`, and their `vectors` `[..., n, 1 to 3]`."""
        if self.one.architecture != "topk":
            return self._active(products, vectors)
        # All features decide which of them stay. A product that is computed otherwise would round otherwise.
        before = self.products(values) + self._own_vectors[:, 0]
        places = vectors[..., 1].long().expand(products.shape) - self._features.start
        here = (places >= 0) & (places < len(self._features))
        chosen = torch.where(here, before.gather(-1, places.clamp(0, len(self._features) - 1)), 0.0)
        if self.ranks == 1:
            return torch.where(chosen >= self._least(before, None), chosen.relu(), 0.0)
        assert gather is not None
        all_ranks = gather(torch.cat([self._candidates(before), chosen], -1))
        least = _side_by_side(all_ranks[..., : self.one.k]).topk(self.one.k, dim=-1).values[..., -1:]
        chosen = all_ranks[..., self.one.k :].sum(0)
        return torch.where(chosen >= least, chosen.relu(), 0.0)

    def _active(self, products: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """The activations of features that no others decide."""
        architecture = self.one.architecture
        if architecture == "gated":
            magnitude = products * vectors[..., 2] + vectors[..., 0]
            return torch.where(products + vectors[..., 1] > 0, magnitude.relu(), 0.0)
        before = products + vectors[..., 0]
        if architecture == "jumprelu":
            return torch.where(before > vectors[..., 1], before.relu(), 0.0)
        return before.relu()

    def _least(self, before: torch.Tensor, gather: Gather | None) -> torch.Tensor:
        """Of a `topk`: the least pre-activation of a row that stays, `[rows, 1]`."""
        if self.ranks > 1:
            assert gather is not None
            before = _side_by_side(gather(self._candidates(before)))
        return before.topk(self.one.k, dim=-1).values[..., -1:]

    def _candidates(self, before: torch.Tensor) -> torch.Tensor:
        """The greatest `k` of this rank `[rows, k]`; where it has fewer, none is greater than the others."""
        found = before.topk(min(self.one.k, before.shape[-1]), dim=-1).values
        return _filled(found, self.one.k, -torch.inf)


def _vectors(one: Autoencoder, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    bias = parts["encoder_bias"]
    taken_off = parts["encoder"] @ parts["decoder_bias"] if one.centered else torch.zeros_like(bias)
    if one.architecture == "gated":
        scale = parts["scale"]
        return torch.stack([bias - scale * taken_off, parts["gate"] - taken_off, scale], 1)
    if one.architecture == "jumprelu":
        return torch.stack([bias - taken_off, parts["threshold"]], 1)
    if one.architecture == "topk":
        return torch.stack([bias - taken_off, torch.arange(one.features, device=bias.device, dtype=torch.float32)], 1)
    return (bias - taken_off).unsqueeze(1)


def _filled(values: torch.Tensor, count: int, filler: float) -> torch.Tensor:
    """`[rows, n, ...]` to `[rows, count, ...]`."""
    missing = count - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_full((len(values), missing, *values.shape[2:]), filler)], 1)


def _side_by_side(values: torch.Tensor) -> torch.Tensor:
    """`[ranks, rows, n, ...]` to `[rows, ranks * n, ...]`."""
    return values.movedim(0, 1).flatten(1, 2)
