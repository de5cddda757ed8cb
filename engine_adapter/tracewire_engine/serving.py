"""How blocks are served at a location, in fewer calls than nnsight's own way takes.

nnsight serves any run: one invoke or many, values of any nesting, blocks that wait for each other. On an engine the
common case is narrow: many blocks of one request each are parked at one location, whose value is a tensor or a tuple of
tensors with a row for each token. Each call for each block counts here, since the model waits. What differs from
nnsight is how often something is looked up, never what a block is handed; all else goes nnsight's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from nnsight.intervention.interleaver import Interleaver
from nnsight.modeling.vllm.batching import VLLMBatcher

from . import watchdog

__all__ = ["BlockServing", "RowBatcher"]

_Tensor = torch.Tensor
_NOTHING: Any = object()


class RowBatcher(VLLMBatcher):
    """nnsight's batcher, which splits a value `[tokens, ...]`, or a tuple of such, once for all blocks of a visit."""

    #: Whether blocks are being served.
    busy = False
    #: How many tokens each request of the step has, in the order of the rows; none while rows are requests.
    counts: Sequence[int] = ()
    _whole: Any = _NOTHING
    _pieces: Sequence[Any] = ()

    def begin(self, value: Any) -> None:
        """Split `value` by requests. It stays split until `end`; what blocks put in its place is not."""
        self.busy = True
        if self.clone_reads or not self.counts or not torch.is_inference_mode_enabled():
            # To autograd, several views made by one call are not the same as views made one by one.
            return
        if type(value) is tuple:
            if value and all(self._splits(item) for item in value):
                self._whole = value
                self._pieces = list(zip(*[item.split_with_sizes(self.counts) for item in value], strict=True))
        elif self._splits(value):
            self._whole, self._pieces = value, value.split_with_sizes(self.counts)

    def _splits(self, item: Any) -> bool:
        return type(item) is _Tensor and item.ndim > 0 and item.shape[0] == self.total

    def rows(self, value: Any, mediator: Any) -> Any:
        """What `narrow` gives for a block's own rows."""
        if value is self._whole:
            return self._pieces[mediator.row]
        return self.narrow(value, mediator.batch_group)

    def end(self) -> None:
        """Forget the value."""
        self._whole, self._pieces, self.busy = _NOTHING, (), False


class BlockServing(Interleaver):
    """nnsight's interleaver, which looks once at each block to know who is parked here, and who is parked where."""

    def handle(self, provider: str, value: Any) -> Any:
        if (
            provider not in self.parked
            or provider in self.observers
            or not self.defer_exceptions
            or (self.fragments is not None and self.fragments.enabled and self.fragments.fragmented(provider))
            or type(self.batcher) is not RowBatcher
            # A block that runs modules by itself, in the midst of being served.
            or self.batcher.busy
        ):
            return super().handle(provider, value)
        batcher: RowBatcher = self.batcher
        occurrence = self.counts.get(provider, 0)
        ready = self._look(provider)
        watchdog.hold()
        try:
            batcher.begin(value)
            # Serving one can release another into parking here.
            while ready:
                for mediator in ready:
                    try:
                        value = mediator.handle(provider, value)
                    except Exception as exception:
                        mediator.exception = exception
                        mediator.pending = None
                ready = self._look(provider)
        finally:
            batcher.end()
            watchdog.let_go()
        self.counts[provider] = occurrence + 1
        return batcher.assemble_skip(value)

    def _look(self, provider: str) -> list[Any]:
        """Who is parked on this visit of `provider`; notes on the way where everybody is parked."""
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
