"""Serves blocks at a location with fewer calls than nnsight needs.

nnsight serves any run: one invoke or many, values of any nesting, blocks that wait for each other. On an engine the
common case is narrow: many blocks, each of another request, are parked at one location, whose value is a tensor or a
tuple of tensors with a row for each token. The model waits meanwhile, so every Python call for every block counts.
This module looks things up less often than nnsight. Blocks are handed the same values, and every case but the common
one is left to nnsight.

Only `.skip()` behaves differently. nnsight can skip a module only if all requests of the batch skip it, so one block
that skips a module beside another request would end the engine. Here the module runs for all requests, and the
replacement that a block gives to `.skip()` is written over the module's output at the block's own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.batching import SkipParts
from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import NO_SKIP
from nnsight.modeling.vllm.batching import VLLMBatcher

from tracewire_engine.worker.parallel.rank_agreement import Ranks

from . import time_limit as watchdog

__all__ = ["BlockServing", "RowBatcher"]

_Tensor = torch.Tensor
_NOTHING: Any = object()


def _converted(edited: torch.Tensor, full: torch.Tensor, name: str) -> torch.Tensor:
    """`edited`, with the dtype and the device of `full`. Integers beyond the dtype's range are clamped to it.

    Raises:
        ValueError: `full` holds integers and `edited` does not.
    """
    if not full.is_floating_point() and not full.is_complex():
        if edited.is_floating_point() or edited.is_complex():
            raise ValueError(f"{name} is replaced by integers ({full.dtype}), got {edited.dtype}")
        if edited.dtype != torch.bool and full.dtype != torch.bool and edited.element_size() > full.element_size():
            limits = torch.iinfo(full.dtype)
            edited = edited.clamp(limits.min, limits.max)
    return edited.to(device=full.device, dtype=full.dtype)


class RowBatcher(VLLMBatcher):
    """nnsight's batcher, but it splits a value once for all blocks of a visit.

    It does so for a tensor `[tokens, ...]` and for a tuple of such tensors, among which may be other objects.
    """

    #: Whether blocks are being served.
    busy = False
    #: How many tokens each request of the step has, in the order of the rows; empty where a row is a request's, not a
    #: token's.
    counts: Sequence[int] = ()
    _whole: Any = _NOTHING
    _pieces: Sequence[Any] = ()

    def begin(self, value: Any) -> None:
        """Split `value` by requests for `rows`, until `end`. A value that a block has replaced is not split again."""
        self.busy = True
        if self.clone_reads or not self.counts or not torch.is_inference_mode_enabled():
            # Autograd forbids changing in place one of several views that a single call made.
            return
        if type(value) is tuple:
            pieces = [self._pieces_of(item) for item in value]
            if any(map(self._splits, value)) and None not in pieces:
                self._whole, self._pieces = value, list(zip(*pieces, strict=True))
        elif self._splits(value):
            self._whole, self._pieces = value, value.split_with_sizes(self.counts)

    def _pieces_of(self, item: Any) -> Sequence[Any] | None:
        """An item of a tuple by requests: all have one that holds no tensor. `None` if it is another one."""
        if self._splits(item):
            return item.split_with_sizes(self.counts)  # type: ignore[no-any-return]
        return None if isinstance(item, _Tensor | tuple | list | dict) else [item] * len(self.counts)

    def _splits(self, item: Any) -> bool:
        return type(item) is _Tensor and item.ndim > 0 and item.shape[0] == self.total

    def rows(self, value: Any, mediator: Any) -> Any:
        """The rows of `value` that belong to a block's request, as `narrow` would return them."""
        if value is self._whole:
            return self._pieces[mediator.row]
        return self.narrow(value, mediator.batch_group)

    def widen(self, full: Any, group: Any, edited: Any) -> Any:
        """`full` with the rows of `group` replaced by `edited`.

        Rows of another shape or type would break the other requests of the step, so they are refused.

        Raises:
            ValueError: `edited` has another structure, shape or kind of number than the rows that it replaces.
        """
        return super().widen(full, group, edited if group is None else self._fitting(full, group, edited, "it"))

    def _fitting(self, full: Any, group: Any, edited: Any, name: str) -> Any:
        """`edited`, with the dtype and the device of the rows that it replaces; `name` is for the errors."""
        if isinstance(full, _Tensor):
            wanted = tuple(self._narrow_tensor(full, group).shape)
            if not isinstance(edited, _Tensor):
                raise ValueError(f"{name} is replaced by a tensor of shape {wanted}, got {type(edited).__name__}")
            if tuple(edited.shape) != wanted:
                raise ValueError(f"{name} is replaced by a tensor of shape {wanted}, got {tuple(edited.shape)}")
            return _converted(edited, full, name)
        if isinstance(full, list | tuple):
            if not isinstance(edited, list | tuple) or len(edited) != len(full):
                got = f"{len(edited)} items" if isinstance(edited, list | tuple) else type(edited).__name__
                raise ValueError(f"{name} is replaced by a {type(full).__name__} of {len(full)} items, got {got}")
            pairs = enumerate(zip(full, edited, strict=True))
            return tuple(self._fitting(one, group, other, f"{name}[{place}]") for place, (one, other) in pairs)
        if isinstance(full, dict):
            if not isinstance(edited, dict) or edited.keys() != full.keys():
                raise ValueError(f"{name} is replaced by a dict of {sorted(map(str, full))}")
            return {key: self._fitting(full[key], group, edited[key], f"{name}[{key!r}]") for key in full}
        if isinstance(edited, _Tensor):
            raise ValueError(f"{name} is {type(full).__name__} here and cannot be replaced by a tensor")
        return edited

    def assemble_skip(self, running: Any) -> Any:
        """Return the value unchanged: `BlockServing.put_skipped` writes the replacements of skipped modules."""
        return running

    def end(self) -> None:
        """Forget the value that `begin` split."""
        self._whole, self._pieces, self.busy = _NOTHING, (), False


class BlockServing(Interleaver):
    """nnsight's interleaver, but one pass over the blocks finds those parked at a location and where each one waits."""

    #: The prefixes of locations whose values belong to no single request.
    encoders: tuple[str, ...] = ()
    #: Under tensor parallelism, this rank's connection to the other ranks.
    ranks: Ranks | None = None
    #: By the location of a module's output: the replacements of blocks that skip the module on this visit, each with
    #: the rows that it replaces.
    skipped: dict[str, list[tuple[Any, Any]]]

    def keep_skipped(self, provider: str, value: SkipParts) -> Any:
        """Keep the replacements that blocks gave to `.skip()` for `put_skipped`. The module runs all the same."""
        self.skipped[provider.removesuffix("skip") + "output"] = value.parts
        return NO_SKIP

    def put_skipped(self, provider: str, value: Any) -> Any:
        """A module's output with the replacements of blocks that skip it written in.

        A replacement that does not fit ends its block with the error.
        """
        parts = self.skipped.pop(provider, None)
        if parts is None:
            return value
        undo = None
        if self.is_sharded(provider):
            if self.ranks is not None:
                parts = self._agreed_parts(provider, parts, self.ranks)
            if not parts:
                return value
            value, undo = self.fragments.whole(provider, value)
        for group, replacement in parts:
            try:
                value = self.batcher.widen(value, group, replacement)
            except Exception as exception:
                for mediator in self.mediators:
                    if mediator.batch_group is group:
                        mediator.exception = exception
                        mediator.pending = None
        return value if undo is None else undo(value)

    def handle(self, provider: str, value: Any) -> Any:
        if self.ranks is not None and self.is_sharded(provider):
            self._agree(provider, self.ranks)
        if (
            provider not in self.parked
            or provider in self.observers
            or not self.defer_exceptions
            or self.is_sharded(provider)
            or type(self.batcher) is not RowBatcher
            # A block that is being served called a module, which came by here.
            or self.batcher.busy
        ):
            return super().handle(provider, value)
        batcher: RowBatcher = self.batcher
        occurrence = self.counts.get(provider, 0)
        ready = self._look(provider)
        watchdog.start_shared_timer()
        try:
            batcher.begin(value)
            # A block that is served can release another one, which then parks here too.
            while ready:
                for mediator in ready:
                    try:
                        value = mediator.handle(provider, value)
                    except Exception as exception:
                        self._fail(mediator, exception)
                ready = self._look(provider)
        finally:
            batcher.end()
            watchdog.stop_shared_timer()
        self.counts[provider] = occurrence + 1
        return batcher.assemble_skip(value)

    def is_sharded(self, location: str) -> bool:
        """Whether each tensor-parallel rank holds only a part of the value at a location."""
        fragments = self.fragments
        return fragments is not None and fragments.enabled and bool(fragments.fragmented(location))

    def _agree(self, provider: str, ranks: Ranks) -> None:
        """Agree with the other ranks on the blocks that wait here, before the ranks gather a sharded value.

        A block that does not wait for the value on all ranks is ended.
        """
        watching = self.observers.get(provider, ())
        if provider not in self.parked and not watching:
            return
        waiting = {one.key: one for one in self._ready(provider)}
        waiting |= {observer[0].key.cache: observer[0] for observer in watching}
        waiting = {key: one for key, one in waiting.items() if one.exception is None}
        agreed = ranks.agree(provider, waiting)
        for key in waiting.keys() - agreed:
            waiting[key].halt(ranks.difference(key))
        if watching:
            self.observers[provider] = [observer for observer in watching if observer[0].key.cache in agreed]

    def _agreed_parts(self, provider: str, parts: list[tuple[Any, Any]], ranks: Ranks) -> list[tuple[Any, Any]]:
        """The replacements of a sharded output that blocks give on all ranks. Other blocks that skip it are ended."""
        rows = [group for group, _ in parts]
        skipping = {one.key: one for one in self.mediators if any(one.batch_group is group for group in rows)}
        skipping = {key: one for key, one in skipping.items() if one.exception is None}
        agreed = ranks.agree(f"{provider} that is skipped", skipping)
        for key in skipping.keys() - agreed:
            skipping[key].halt(ranks.difference(key))
        kept = [skipping[key].batch_group for key in agreed]
        return [(group, replacement) for group, replacement in parts if any(group is one for one in kept)]

    @staticmethod
    def _fail(mediator: Any, exception: BaseException) -> None:
        """End a block with an exception. A block that still runs has it raised first, at the line that asked."""
        if mediator.alive:
            with watchdog.turn(getattr(mediator, "budget", None)):
                try:
                    mediator.worker.parent = getcurrent()
                    mediator.pending = mediator.worker.throw(exception)
                    return
                except BaseException as thrown:  # usually the exception that was thrown in
                    exception = thrown
        mediator.exception = exception
        mediator.pending = None

    def _look(self, provider: str) -> list[Any]:
        """The blocks that wait for this visit of `provider`. Also updates `parked`, the locations of all blocks."""
        reached = self.counts.get(provider, 0)
        parked: set[str] = set()
        ready = []
        for mediator in self.mediators:
            pending = mediator.pending
            if pending is None:
                continue
            _, where, iteration, _ = pending
            if where == provider and iteration == reached - mediator.counts_at_start.get(provider, 0):
                ready.append(mediator)
            if where is not None:
                parked.add(where)
        self.parked = parked
        return ready
