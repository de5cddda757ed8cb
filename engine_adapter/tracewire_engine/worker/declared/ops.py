"""Declared interventions on the device, made once for all requests that bring the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch

from tracewire_bus.domain.condition_checks import condition_live
from tracewire_bus.domain.head_checks import head_list
from tracewire_bus.domain.intervention_checks import live_name, substitute_live
from tracewire_bus.wire.messages import (
    Ablate,
    AttentionPattern,
    Clamp,
    Failure,
    HeadAblate,
    HeadProbe,
    Hold,
    LogitLens,
    Patch,
    Probe,
    Reading,
    Steer,
    StopWhen,
)
from tracewire_bus.wire.packing import decoder
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.parallel.topology import Topology

from .conditions import Signals, condition_key, made_patterns
from .device_autoencoder import Choice, DeviceAutoencoder
from .kept_rows import KeptRows
from .prepared import prepare, spanning_rows
from .vector_cache import VectorCache

__all__ = ["Declaration", "DecodedCache", "Kind", "Op", "is_early", "probes_of"]

_placed = decoder(list[Placed])
_NO_PROBES: Final[Mapping[str, Probe]] = MappingProxyType({})

#: How many requests' interventions are kept decoded, and of how many bytes each at most.
REMEMBERED, LONG = 64, 128 * 1024
#: Bytes of scaled vectors that these have beside the vectors themselves.
SCALED_BYTES = 16 << 20


def _unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / length if length else vector


def _rows_of(heads: int, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A row for each position, the heads side by side: of `[width]`, `[positions, width]`, or with heads before it."""
    return values.reshape(-1, heads * values.shape[-1])


def _for_heads(heads: int, mean: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[1, heads * size]`, of `[size]` for all of them or `[heads, size]`."""
    return np.broadcast_to(mean, (heads, mean.shape[-1])).reshape(1, -1)


class Decoded:
    """Decoded interventions, with their vectors on the device.

    Attributes:
        placed: the interventions with their locations.
        ops: of each.
        reads: whether any saves, and the names under which they do.
        locations: where they are.
        connected: the places of those that depend on what earlier steps leave.
        kind: of the list of them.
    """

    __slots__ = ("connected", "kind", "locations", "names", "ops", "placed", "reads", "scaled")

    def __init__(self, placed: list[Placed], ops: list[Op]) -> None:
        #: The bytes of its `Op.scaled`, made or not.
        self.scaled = sum(4 * op.matrix.shape[-1] for op in ops if isinstance(op.one, Steer) and op.matrix is not None)
        self.placed, self.ops = placed, ops
        self.kind = kind_of(ops)
        self.reads = any(op.reads for op in ops)
        self.names = [str(getattr(op.one, "name", "")) for op in ops if op.reads]
        self.locations = [location for op in ops for location, _ in op.sites]
        self.connected = [place for place, op in enumerate(ops) if op.one.when is not None or isinstance(op.one, Hold)]


class DecodedCache:
    """Decoded interventions, with their vectors on the device, by their encoded form.

    The cache keeps only interventions without live parameters, which are the same for every request that brings them.
    It keeps no vector on the device that the caches of vectors have dropped, since these bound the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.vectors = VectorCache(device)
        self._entries: OrderedDict[bytes, Decoded] = OrderedDict()
        # An entry keeps autoencoders on the device that no request uses.
        self.vectors.autoencoders.release = self._clear
        self.vectors.dropped = self.vectors.autoencoders.choices.dropped = self._forget
        self._scaled = 0
        #: The tensors that the caches of vectors have dropped since a decoding began; `None` between decodings.
        self._lost: list[torch.Tensor] | None = None

    def get(self, encoded: bytes, live: LiveRun) -> Decoded:
        """The interventions, which other requests may have as well."""
        found = self._entries.get(encoded)
        if found is None:
            placed = [placed for placed in _placed(encoded) if not isinstance(placed.intervention, StopWhen)]
            probes = probes_of(placed)
            dropped = self._lost = []
            try:
                found = Decoded(placed, [Op(one, live.values, self.vectors, probes) for one in placed])
            finally:
                self._lost = None
            lost = any(_has(found, vector) for vector in dropped)
            if lost or len(encoded) > LONG or any(_has_live(one) or one.kept is not None for one in placed):
                return found
            self._entries[encoded] = found
            self._scaled += found.scaled
            while len(self._entries) > REMEMBERED or self._scaled > SCALED_BYTES:
                self._pop(next(iter(self._entries)))
        else:
            self._entries.move_to_end(encoded)
        return found

    def _forget(self, vector: torch.Tensor) -> None:
        """Drop the interventions that have a vector which is not kept any more."""
        if self._lost is not None:
            self._lost.append(vector)
        for encoded in [encoded for encoded, one in self._entries.items() if _has(one, vector)]:
            self._pop(encoded)

    def _pop(self, encoded: bytes) -> None:
        self._scaled -= self._entries.pop(encoded).scaled

    def _clear(self) -> None:
        self._entries.clear()
        self._scaled = 0


def _has(decoded: Decoded, vector: torch.Tensor) -> bool:
    return any(op.matrix is vector or op.bias is vector for op in decoded.ops)


def _has_live(placed: Placed) -> bool:
    one = placed.intervention
    return condition_live(one.when) or any(live_name(getattr(one, name)) for name in one.__struct_fields__)


def probes_of(placed: list[Placed]) -> dict[str, Probe]:
    """The probes of a trace by name."""
    found = (one.intervention for one in placed)
    return {one.name: one for one in found if isinstance(one, Probe)}


class Op:
    """One intervention of one request, its vectors on the device. Ops with the same `key` can share a group.

    Args:
        placed: the intervention with its locations.
        live: the values of live parameters by name.
        vectors: those on the device.
        probes: the probes of the trace by name, of which controllers use one.
    """

    matrix: torch.Tensor | None
    bias: torch.Tensor | None
    autoencoder: DeviceAutoencoder | None
    choice: Choice | None
    sites: tuple[tuple[str, bool], ...]
    kept: KeptRows | None

    __slots__ = (
        *("__weakref__", "autoencoder", "bias", "choice", "each_token", "gives", "grouping", "head_size", "heads"),
        *("kept", "key", "matrix", "numbers", "one", "pattern", "reads", "rowwise", "scaled", "sites"),
        "token_patterns",
    )

    def __init__(
        self, placed: Placed, live: dict[str, Any], vectors: VectorCache, probes: Mapping[str, Probe] = _NO_PROBES
    ) -> None:
        one = self.one = substitute_live(placed.intervention, live)
        self.sites = tuple([(location, residual) for location, residual in placed.sites])
        self.pattern = placed.pattern
        #: How many attention heads there are at the sites, and their size; and the heads that are named, if any.
        self.head_size = placed.heads
        self.heads = head_list(one)
        self.matrix = self.bias = self.autoencoder = self.choice = None
        #: Of a `Patch`: the values that it takes of another prompt, and whether this request gives them.
        self.kept = None if placed.kept is None else vectors.kept.of(*placed.kept)
        self.gives = placed.gives
        self.numbers: tuple[float, ...] = ()
        self.scaled: torch.Tensor | None = None
        key: tuple[Any, ...] = ()
        if isinstance(one, Probe):
            key = self._prepare_probe(one, vectors)
        elif isinstance(one, LogitLens | AttentionPattern):
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
                self.matrix = vectors.get("basis", one.direction, spanning_rows)
                key = (self.matrix.shape,)
        elif isinstance(one, Patch):
            key = self._prepare_patch(one, vectors)
        elif isinstance(one, HeadAblate):
            self.numbers = (float(one.keep),)  # type: ignore[arg-type]
            if one.mean is not None:
                count = len(self.heads or ())
                self.matrix = vectors.get(f"{count} heads", one.mean, partial(_for_heads, count))
            key = (self.matrix is None,)
        elif isinstance(one, HeadProbe):
            key = (one.reduce,)
        elif not isinstance(one, StopWhen):  # the adapter checks these
            key = prepare(self, one, vectors, probes)
        #: Whether members that have several rows each, with vectors of their own, can share a group; whether it saves.
        self.rowwise, self.reads = isinstance(one, Patch), isinstance(one, Reading)
        positions = "" if self.rowwise else getattr(one, "positions", "")
        named = self.heads and tuple(self.heads)
        self.key = (type(one).__name__, positions, self.pattern, named, self.head_size, *key, *condition_key(one.when))
        self.token_patterns = made_patterns(one.when)
        #: What members of a group have in common.
        self.grouping = self.sites, self.key
        #: Whether it reads or edits the row of each token that a request generates.
        self.each_token = isinstance(one, Probe | LogitLens | Steer | Clamp | Ablate) and positions != "prompt"

    def scaled_vector(self) -> torch.Tensor:
        """What a `Steer` adds: float32 `[hidden]`."""
        if self.scaled is None:
            assert self.matrix is not None
            self.scaled = self.matrix[0] * self.numbers[0]
        return self.scaled

    @property
    def rows_by(self) -> tuple[Any, ...] | None:
        """Equal for interventions that have the same rows of a request in a step; `None` if its rows depend on more."""
        one = self.one
        if isinstance(one, Patch | AttentionPattern):
            return None
        return self.each_token, self.reads, isinstance(one, Hold), str(getattr(one, "positions", ""))

    def _prepare_probe(self, one: Probe, vectors: VectorCache) -> tuple[Any, ...]:
        if one.bias is not None:
            self.bias = vectors.get("bias", one.bias, lambda bias: bias.reshape(-1))
        if one.weight is None:
            return one.activation, one.reduce
        self.matrix = vectors.get("rows", one.weight, np.atleast_2d)
        # One number may be the bias of several rows.
        return one.activation, one.reduce, tuple(one.weight.shape), None if self.bias is None else len(self.bias)

    def _prepare_patch(self, one: Patch, vectors: VectorCache) -> tuple[Any, ...]:
        self.numbers = (float(one.strength),)  # type: ignore[arg-type]
        if one.prompt is not None:
            return ("gives" if self.gives else "takes",)
        make = partial(_rows_of, 1 if self.heads is None else len(self.heads))
        self.matrix = vectors.get(f"rows of {self.heads and len(self.heads)}", one.values, make)
        return (self.matrix.shape[-1],)


class Kind:
    """What lists of interventions have in common whose members can share groups: all of them have the same object."""

    __slots__ = ("__weakref__",)


#: The kinds of lists that are in use, by the `grouping` of each intervention.
_kinds: WeakValueDictionary[tuple[Any, ...], Kind] = WeakValueDictionary()


def kind_of(ops: Sequence[Op]) -> Kind:
    """The kind of a list of interventions."""
    groupings = tuple([op.grouping for op in ops])
    found = _kinds.get(groupings)
    if found is None:
        found = _kinds[groupings] = Kind()
    return found


class Declaration:
    """The declared interventions of one live request, by the name that the adapter gave it."""

    def __init__(self, request: str, choice: int, encoded: bytes, live: LiveRun, decoded: DecodedCache) -> None:
        self.request = request
        self.choice = choice
        self.live = live
        self._decoded = decoded.get(encoded, live)
        #: The interventions: those that other requests share, or its own once a live parameter has changed.
        self.ops, self.kind = self._decoded.ops, self._decoded.kind
        #: By the place of an intervention: the slot of its condition on a probe; and of a controller, the slots of its
        #: probe's value and of its state. And the slot of the last token ids, if a condition needs them.
        self.slots: dict[int, int] = {}
        self.controls: dict[int, tuple[int, int]] = {}
        self.tokens: int | None = None
        #: Its first row in the plan's steps, and how many rows.
        self.rows: tuple[int, int] | None = None
        self.reads, self.names, self.locations = self._decoded.reads, self._decoded.names, self._decoded.locations
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
        found, every = False, self._decoded.placed
        ops = list(self.ops)
        for place, placed in enumerate(every):
            if _has_live(placed):
                ops[place] = Op(placed, self.live.values, vectors, probes_of(every))
                self.ops = ops
                found = True
        if found:
            self.kind = kind_of(ops)
        return found

    def attach(self, signals: Signals) -> None:
        """Take slots for what steps leave for later ones."""
        for place in self._decoded.connected:
            op = self.ops[place]
            when = op.one.when
            if when is not None and when.probe is not None:
                self.slots[place] = signals.take()
            if when is not None and when.tokens and self.tokens is None:
                self.tokens = signals.take()
            if isinstance(op.one, Hold):
                self.controls[place] = signals.take(), signals.take()
                # No error is known yet.
                signals.states[self.controls[place][1], 1] = float("nan")

    def begin_rows(self, signals: Signals, start: int, count: int, first: int) -> None:
        """Note the request's rows in a plan: from `start` on, `count` of them, from its position `first` on."""
        self.rows = start, count
        if not first and self.tokens is not None:
            signals.forget_tokens(self.tokens)

    def detach(self, signals: Signals) -> None:
        """Give the slots back."""
        taken = [*self.slots.values(), *(slot for both in self.controls.values() for slot in both)]
        signals.give_back(taken if self.tokens is None else [*taken, self.tokens])
        self.slots, self.controls, self.tokens = {}, {}, None

    def split_by(self, here: Callable[[str], bool]) -> str | None:
        """The name of a probe that another intervention depends on and that is on another pipeline stage than it."""
        homes = {op.one.name: here(op.sites[0][0]) for op in self.ops if isinstance(op.one, Probe)}
        for op in self.ops:
            for name in (op.one.when.probe if op.one.when is not None else None, getattr(op.one, "probe", None)):
                if name is not None and any(here(location) != homes[name] for location, _ in op.sites):
                    return str(name)
        return None


def is_early(encoded: bytes, topology: Topology) -> bool:
    """Whether any of a request's interventions is on another pipeline stage than the last."""
    try:
        sites = [site for placed in _placed(encoded) for site in placed.sites]
    except Exception:  # decoding fails again, with an error for the request, when the request is added
        return False
    return any(topology.owner(location) != topology.last for location, _ in sites)
