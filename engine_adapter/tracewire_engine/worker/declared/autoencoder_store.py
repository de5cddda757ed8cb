"""Sparse autoencoders on the device, or in the host's memory, within bounds on the memory that all of them take.

An autoencoder that came with a trace is there once, by the digest of its weights. One of the engine's own is read from
its folder when a trace first needs it. What no live request uses goes first when memory is short, the least recently
used before others. Where those in use leave no room, another one stays in the host's memory, which is pinned. What
needs chosen features only copies their rows to the device once. What needs all features copies the whole encoder in
each step, piece by piece. Where that has no room either, the trace that needs the autoencoder fails.

Under tensor parallelism, the ranks split the features of a large autoencoder. Whether they do so depends on its size
alone, so all ranks decide alike. Where each rank keeps its part is the rank's own affair.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.feature_kinds import Autoencoder
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.autoencoder_parts import parts_of, size_in_bytes

from .device_autoencoder import Choices, DeviceAutoencoder

__all__ = ["BOUND", "HOST_BOUND", "AutoencoderStore", "AutoencodersFull"]

#: Bytes of the device's memory that autoencoders take at most, unless the engine is told otherwise.
BOUND: Final = 1 << 30
#: Likewise of the host's memory.
HOST_BOUND: Final = 0


class AutoencodersFull(MemoryError):
    """An autoencoder does not fit beside those that live requests use."""


class AutoencoderStore:
    """The autoencoders on one device.

    Attributes:
        folders: of the engine's own autoencoders, by name.
        bound, host_bound: bytes that all autoencoders take at most, of the device and of the host's memory.
        rank, ranks: the number of this tensor-parallel rank, and how many there are.
        here: under pipeline parallelism, whether this stage serves a location.
        split_above: the ranks split an autoencoder of more bytes; `None` for those that `bound` is too small for.
        release: is called to drop what keeps unused autoencoders.
        choices: the rows of chosen features, which `bound` does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.folders: Mapping[str, str] = {}
        self.bound, self.host_bound = BOUND, HOST_BOUND
        self.rank, self.ranks = 0, 1
        self.split_above: int | None = None
        self.here: Callable[[str], bool] = lambda _: True
        self.release: Callable[[], None] = lambda: None
        self.choices = Choices()
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
        ranks = parts_of(one, self.ranks, self.bound if self.split_above is None else self.split_above)
        rank = self.rank if ranks > 1 else 0
        host = self._make_room(size_in_bytes(one, rank, ranks), ranks)
        tensor = torch.from_numpy(np.require(packed, np.float32, ["C", "W"]))
        named: Any = {"key": key, "choices": self.choices}
        made = DeviceAutoencoder(one, tensor, self._device, offloaded=host, rank=rank, ranks=ranks, **named)
        self._recent[key] = self._alive[key] = made
        return made

    def _make_room(self, needed: int, ranks: int) -> bool:
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
            f"an autoencoder of {needed} bytes{'' if ranks == 1 else f' on each of {ranks} ranks'} does not fit: "
            f"autoencoders take {self.bound} bytes of the device at most (--sae-bytes), and those of running traces "
            f"take {self._used()}; and {self.host_bound} bytes of the host (--sae-host-bytes), of which "
            f"{self._used(host=True)} are taken"
        )

    def _used(self, *, host: bool = False) -> int:
        return sum(one.host_nbytes if host else one.nbytes for one in self._alive.values())
