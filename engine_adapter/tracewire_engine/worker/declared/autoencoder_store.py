"""Sparse autoencoders on the device, or in the host's memory, within bounds on the memory that all of them take.

An autoencoder that came with a trace is there once, by the digest of its weights. One of the engine's own is read from
its folder when a trace first needs it. What no live request uses goes first when memory is short, the least recently
used before others. Where those in use leave no room, another one stays in the host's memory, which is pinned. What
needs chosen features only copies their rows to the device once. What needs all features copies the whole encoder in
each step, piece by piece. Where that has no room either, the trace that needs the autoencoder fails.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from tracewire_bus.domain.autoencoders import SparseAutoencoder, size_of, unpacked
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.feature_kinds import Autoencoder
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["BOUND", "HOST_BOUND", "AutoencoderStore", "AutoencodersFull", "DeviceAutoencoder"]

#: Bytes of the device's memory that autoencoders take at most, unless the engine is told otherwise.
BOUND: Final = 1 << 30
#: Likewise of the host's memory.
HOST_BOUND: Final = 0
#: Bytes of an encoder that are copied to the device at once.
_PIECE: Final = 64 << 20
#: Choices of features whose rows one autoencoder keeps.
_CHOICES: Final = 64


class AutoencodersFull(MemoryError):
    """An autoencoder does not fit beside those that live requests use."""


class DeviceAutoencoder:
    """One autoencoder, float32.

    The decoder's bias is a part of the encoder's where the autoencoder takes it off its input.

    Args:
        one: what it is.
        packed: its weights.
        device: where it is used. Its encoder and decoder stay where `packed` is.
    """

    def __init__(
        self, one: Autoencoder, packed: torch.Tensor, device: torch.device, *, offloaded: bool = False
    ) -> None:
        self.one, self.offloaded, self._device = one, offloaded, device
        parts = unpacked(one, packed)
        self.encoder, self.decoder = parts["encoder"], parts["decoder"]
        taken_off = self.encoder @ parts["decoder_bias"] if one.centered else torch.zeros_like(parts["encoder_bias"])
        #: `[features, 1 to 3]`: the bias, and the threshold, or the feature's index, or the gate's bias and the scale.
        if one.architecture == "gated":
            bias = parts["encoder_bias"] - parts["scale"] * taken_off
            self.vectors = torch.stack([bias, parts["gate"] - taken_off, parts["scale"]], 1)
        elif one.architecture == "jumprelu":
            self.vectors = torch.stack([parts["encoder_bias"] - taken_off, parts["threshold"]], 1)
        elif one.architecture == "topk":
            places = torch.arange(one.features, device=packed.device, dtype=torch.float32)
            self.vectors = torch.stack([parts["encoder_bias"] - taken_off, places], 1)
        else:
            self.vectors = (parts["encoder_bias"] - taken_off).unsqueeze(1)
        #: The bytes that it takes of the device, and of the host.
        self.nbytes: int = packed.nbytes
        self.host_nbytes: int = 0
        if offloaded:
            self.vectors = self.vectors.to(device)
            self.nbytes, self.host_nbytes = self.vectors.nbytes, packed.nbytes
        self._chosen: OrderedDict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def chosen(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of chosen features: of the encoder, then of the decoder, `[2 * n, width]`; and `vectors`, `[n, ...]`."""
        key = tuple(indices)
        found = self._chosen.get(key)
        if found is None:
            places = torch.tensor(key, dtype=torch.int64, device=self.encoder.device)
            rows = torch.cat([self.encoder[places], self.decoder[places]]).to(self._device)
            found = rows, self.vectors[places.to(self._device)]
            self._chosen[key] = found
            if len(self._chosen) > _CHOICES:
                self._chosen.popitem(last=False)
        else:
            self._chosen.move_to_end(key)
        return found

    def streams(self, *, chosen: bool) -> bool:
        """Whether each use copies the encoder from the host, for the activations of `chosen` features or of all."""
        return self.offloaded and (not chosen or self.one.architecture == "topk")

    def products(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, features]` of float32 values `[rows, width]`.

        Raises:
            ValueError: the values are of another width.
        """
        if values.dim() != 2 or values.shape[-1] != self.one.width:
            raise ValueError(
                f"an autoencoder of width {self.one.width} does not fit values of {list(values.shape[1:])}"
            )
        if not self.offloaded:
            return values @ self.encoder.T
        found = values.new_empty(len(values), self.one.features)
        rows = max(1, _PIECE // (4 * self.one.width))
        for start in range(0, self.one.features, rows):
            piece = self.encoder[start : start + rows].to(self._device, non_blocking=True)
            found[:, start : start + rows] = values @ piece.T
        return found

    def activations(self, values: torch.Tensor) -> torch.Tensor:
        """The activations of all features, `[rows, features]`, of float32 values `[rows, width]`."""
        return self.of_products(self.products(values), self.vectors, values)

    def of_products(self, products: torch.Tensor, vectors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The activations of some features: of their products `[rows, n]`, and their `vectors` `[..., n, 1 to 3]`."""
        architecture = self.one.architecture
        if architecture == "gated":
            magnitude = products * vectors[..., 2] + vectors[..., 0]
            return torch.where(products + vectors[..., 1] > 0, magnitude.relu(), 0.0)
        before = products + vectors[..., 0]
        if architecture == "jumprelu":
            return torch.where(before > vectors[..., 1], before.relu(), 0.0)
        if architecture == "topk":
            # All features decide which of them stay. A product that is computed otherwise would round otherwise.
            whole = before if vectors is self.vectors else self.products(values) + self.vectors[:, 0]
            least = whole.topk(self.one.k, dim=-1).values[..., -1:]
            if vectors is not self.vectors:
                before = whole.gather(-1, vectors[..., 1].long().expand(before.shape))
            return torch.where(before >= least, before.relu(), 0.0)
        return before.relu()


class AutoencoderStore:
    """The autoencoders on one device.

    Attributes:
        folders: of the engine's own autoencoders, by name.
        bound, host_bound: bytes that all autoencoders take at most, of the device and of the host's memory.
        release: is called to drop what keeps unused autoencoders.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.folders: Mapping[str, str] = {}
        self.bound, self.host_bound = BOUND, HOST_BOUND
        self.release: Callable[[], None] = lambda: None
        self._recent: OrderedDict[bytes, DeviceAutoencoder] = OrderedDict()
        #: Those that something uses: the recent ones, and those of live requests.
        self._alive: weakref.WeakValueDictionary[bytes, DeviceAutoencoder] = weakref.WeakValueDictionary()

    def get(
        self, sae: str | Autoencoder, weights: Any, read: Callable[[Any], np.ndarray[Any, Any]]
    ) -> DeviceAutoencoder:
        """An autoencoder on the device: one of the engine's by name, or one of these weights, which `read` reads.

        Raises:
            AutoencodersFull: it does not fit beside those in use.
            KeyError: the engine has none of this name.
            OSError: a file cannot be read.
        """
        if isinstance(sae, str):
            key = f"name {sae}".encode()
        else:
            source = weights.blob.encode() if isinstance(weights, ArrayRef) else np.ascontiguousarray(weights).tobytes()
            key = digest_bytes(repr((sae.architecture, sae.k, sae.centered, sae.features)).encode() + source)
        found = self._alive.get(key)
        if found is not None:
            self._recent[key] = found
            self._recent.move_to_end(key)
            return found
        if isinstance(sae, str):
            loaded = SparseAutoencoder.load(self.folders[sae])
            one, packed = loaded.description, loaded.packed
        else:
            one, packed = sae, read(weights)
        host = self._make_room(4 * size_of(one))
        weights = np.array(packed, dtype=np.float32)
        if host:
            # Pinned, so that copies of it do not wait.
            tensor = torch.from_numpy(weights)
            tensor = tensor if self._device.type == "cpu" else tensor.pin_memory()
        else:
            tensor = to_tensors(weights, self._device)
        made = DeviceAutoencoder(one, tensor, self._device, offloaded=host)
        self._recent[key] = self._alive[key] = made
        return made

    def _make_room(self, needed: int) -> bool:
        """Drop what is not used until there is room. Returns whether that is the host's, and not the device's.

        Raises:
            AutoencodersFull: neither has room.
        """
        for host, bound in ((False, self.bound), (True, self.host_bound)):
            if needed > bound:
                continue
            if self._used(host=host) + needed > bound:
                self.release()
            for key in list(self._recent):
                if self._used(host=host) + needed <= bound:
                    break
                if self._recent[key].offloaded == host:
                    del self._recent[key]
            if self._used(host=host) + needed <= bound:
                return host
        raise AutoencodersFull(
            f"an autoencoder of {needed} bytes does not fit: autoencoders take {self.bound} bytes of the device at "
            f"most (--sae-bytes), and those of running traces take {self._used()}; and {self.host_bound} bytes of the "
            f"host (--sae-host-bytes), of which {self._used(host=True)} are taken"
        )

    def _used(self, *, host: bool = False) -> int:
        return sum(one.host_nbytes if host else one.nbytes for one in self._alive.values())
