"""Declared interventions on the device, made once for all requests that bring the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch

from tracewire_bus.domain.intervention_checks import live_name, substitute_live
from tracewire_bus.wire.arrays import array_from_raw
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.messages import Ablate, Clamp, Failure, LogitLens, Patch, Probe, Reading, Steer, StopWhen
from tracewire_bus.wire.packing import decoder
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import InputFolder, vector_path
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.parallel.topology import Topology
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["Declaration", "DecodedCache", "Op", "is_early"]

_placed = decoder(list[Placed])

#: Bytes of vectors kept on the device for further requests that bring the same ones.
CACHE_BYTES = 256 * 1024 * 1024

#: How many requests' interventions are kept decoded, and of how many bytes each at most.
REMEMBERED, LONG = 64, 128 * 1024


class VectorCache:
    """Vectors on the device, float32, by the digest of their source: equal vectors are there once.

    A reference stands for the vector in the file that it names in `folder` (`vector_files.py` in the adapter).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.folder: InputFolder = Path()
        self._vectors: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self._bytes = 0

    def get(
        self, purpose: str, value: Any, make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> torch.Tensor:
        """`make(value)` on the device. `purpose` names what `make` does, and is part of the key.

        Raises:
            OSError: `value` refers to a vector whose file is not there.
        """
        array: np.ndarray[Any, Any] | None = None
        if isinstance(value, ArrayRef):
            key = purpose, value.blob.encode()
        else:
            array = np.ascontiguousarray(value)
            key = purpose, digest_bytes(repr((array.dtype.name, array.shape)).encode() + array.tobytes())
        found = self._vectors.get(key)
        if found is None:
            if array is None:
                array = array_from_raw(value.dtype, value.shape, vector_path(self.folder, value).read_bytes())
            made = np.array(make(array.astype(np.float32)), dtype=np.float32)
            found = self._vectors[key] = to_tensors(made, self.device)
            self._bytes += found.nbytes
            while self._bytes > CACHE_BYTES and len(self._vectors) > 1:
                self._bytes -= self._vectors.popitem(last=False)[1].nbytes
        else:
            self._vectors.move_to_end(key)
        return found


def _unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / length if length else vector


def _basis(directions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Orthonormal rows that span the given ones."""
    rows = np.atleast_2d(directions).astype(np.float64)
    _, sizes, spanning = np.linalg.svd(rows, full_matrices=False)
    spanned: np.ndarray[Any, Any] = spanning[sizes > sizes.max(initial=0.0) * 1e-6]
    return spanned


class DecodedCache:
    """Decoded interventions, with their vectors on the device, by their encoded form.

    The cache keeps only interventions without live parameters, which are the same for every request that brings them.
    """

    def __init__(self, device: torch.device) -> None:
        self.vectors = VectorCache(device)
        self._entries: OrderedDict[bytes, tuple[list[Placed], list[Op]]] = OrderedDict()

    def get(self, encoded: bytes, live: LiveRun) -> tuple[list[Placed], list[Op]]:
        """The interventions, and the `Op` of each, in a list that the caller may change."""
        found = self._entries.get(encoded)
        if found is None:
            placed = [placed for placed in _placed(encoded) if not isinstance(placed.intervention, StopWhen)]
            found = placed, [Op(one, live.values, self.vectors) for one in placed]
            if len(encoded) > LONG or any(map(_has_live, placed)):
                return found
            self._entries[encoded] = found
            if len(self._entries) > REMEMBERED:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(encoded)
        placed, ops = found
        return placed, list(ops)


def _has_live(placed: Placed) -> bool:
    return any(live_name(getattr(placed.intervention, name)) for name in placed.intervention.__struct_fields__)


class Op:
    """One intervention of one request, its vectors on the device. Ops with the same `key` can share a group."""

    __slots__ = ("bias", "key", "matrix", "numbers", "one", "pattern", "sites")

    def __init__(self, placed: Placed, live: dict[str, Any], vectors: VectorCache) -> None:
        one = self.one = substitute_live(placed.intervention, live)
        self.sites = [(location, residual) for location, residual in placed.sites]
        self.pattern = placed.pattern
        self.matrix: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.numbers: tuple[float, ...] = ()
        key: tuple[Any, ...] = ()
        if isinstance(one, Probe):
            key = (one.activation, one.reduce)
            if one.weight is not None:
                self.matrix = vectors.get("rows", one.weight, np.atleast_2d)
                key += (tuple(one.weight.shape), one.bias is not None)
            if one.bias is not None:
                self.bias = vectors.get("bias", one.bias, lambda bias: bias.reshape(-1))
        elif isinstance(one, LogitLens):
            key = (one.top_k,)
        elif isinstance(one, Steer):
            self.matrix = vectors.get("rows", one.vector, np.atleast_2d)
            self.numbers = (float(one.scale),)  # type: ignore[arg-type]
            key = (self.matrix.shape,)
        elif isinstance(one, Clamp):
            self.matrix = vectors.get("unit", one.direction, lambda vector: np.atleast_2d(_unit(vector)))
            low, high = one.min, one.max
            self.numbers = (-float("inf") if low is None else float(low), float("inf") if high is None else float(high))  # type: ignore[arg-type]
            key = (self.matrix.shape,)
        elif isinstance(one, Ablate):
            self.numbers = (float(one.keep),)  # type: ignore[arg-type]
            if one.direction is not None:
                self.matrix = vectors.get("basis", one.direction, _basis)
                key = (self.matrix.shape,)
        elif isinstance(one, Patch):
            self.matrix = vectors.get("rows", one.values, np.atleast_2d)
            self.numbers = (float(one.strength),)  # type: ignore[arg-type]
            key = (self.matrix.shape[-1],)
        elif not isinstance(one, StopWhen):  # the adapter checks these
            assert_never(one)
        positions = "" if self.rowwise else getattr(one, "positions", "")
        self.key = (type(one).__name__, positions, self.pattern, *key)

    @property
    def rowwise(self) -> bool:
        """Whether members that have several rows each, with vectors of their own, can share a group."""
        return isinstance(self.one, Patch)

    @property
    def reads(self) -> bool:
        """Whether the intervention saves a value."""
        return isinstance(self.one, Reading)


class Declaration:
    """The declared interventions of one live request, by the name that the adapter gave it."""

    def __init__(self, request: str, choice: int, encoded: bytes, live: LiveRun, decoded: DecodedCache) -> None:
        self.request = request
        self.choice = choice
        self.live = live
        self._placed, self.ops = decoded.get(encoded, live)
        self.reads = any(op.reads for op in self.ops)
        self.names = [str(getattr(op.one, "name", "")) for op in self.ops if op.reads]
        self.locations = [location for op in self.ops for location, _ in op.sites]
        #: Positions up to here have been read, and are not read again when a preempted request is recomputed.
        self.seen = 0
        self.failure: Failure | None = None
        #: The scheduler's name of the request.
        self.id = ""
        #: Whether the failure has been reported with a step; whether the other pipeline stages have got it.
        self.reported = False
        #: The index of the token in whose step it was reported.
        self.failed_at: int | None = None
        self.sent_to_stages = False

    def update_live(self, vectors: VectorCache) -> bool:
        """Take the current live parameters. Returns whether any intervention has one."""
        found = False
        for place, placed in enumerate(self._placed):
            if _has_live(placed):
                self.ops[place] = Op(placed, self.live.values, vectors)
                found = True
        return found


def is_early(encoded: bytes, topology: Topology) -> bool:
    """Whether any of a request's interventions is on another pipeline stage than the last."""
    try:
        sites = [site for placed in _placed(encoded) for site in placed.sites]
    except Exception:  # decoding fails again, with an error for the request, when the request is added
        return False
    return any(topology.owner(location) != topology.last for location, _ in sites)
