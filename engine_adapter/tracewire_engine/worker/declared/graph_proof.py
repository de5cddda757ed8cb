"""Proves that whole CUDA graphs come to what graphs with breaks come to, before an engine relies on them.

Each engine has another model, GPU, and versions of vLLM, PyTorch and Triton. So the first steps that fit a whole graph
run by both graphs, and the graph with breaks counts. A step proves what it uses: reads, edits, or both. If the
graphs differ, the engine logs an error, and runs every step by the graph with breaks. Both graphs write the same keys
and values to the same places of the KV cache, so the second run of a step changes nothing there. A graph may also
change what it is given: the first layer of a later pipeline stage adds to the residual stream of the stage before, in
place. So the second run gets what the first one was given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

__all__ = ["BothGraphs", "GraphProof", "inputs_in", "put_back", "tensors_in"]

logger = logging.getLogger("vllm.tracewire")

#: How many steps prove a use.
_STEPS: Final = 2
#: The greatest difference that rounding explains, relative to the greatest value.
_TOLERANCE: Final = 0.02


class BothGraphs(NamedTuple):
    """The two graphs of one batch size.

    Attributes:
        whole: runs the whole one, and returns its output.
        broken: runs the one with breaks.
        inputs: what both are given.
    """

    whole: Callable[[], Any]
    broken: Callable[[], Any]
    inputs: Callable[[], Sequence[torch.Tensor]]


@contextmanager
def put_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """At the end of the context, these tensors hold what they did at its beginning."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    yield
    for tensor, held in before:
        tensor.copy_(held)


class GraphProof:
    """Which uses of whole graphs are proven on this engine.

    Attributes:
        failed: whether the graphs have differed.
    """

    def __init__(self) -> None:
        self.failed = False
        #: By use, how many steps are to prove it yet; without those that are proven.
        self._left = dict.fromkeys(("reads", "edits"), _STEPS)

    def left(self, uses: frozenset[str]) -> frozenset[str]:
        """Those of these uses that are not proven yet."""
        return uses & self._left.keys()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Take an error in the context for a difference: whole graphs are not worth a step."""
        try:
            yield
        except Exception:
            self.failed = True
            logger.exception("CUDA graphs that are whole failed: every step of this engine stops at each tap")

    def compare(self, uses: frozenset[str], whole: Sequence[Any], broken: Sequence[Any]) -> None:
        """Compare what the two graphs have come to in a step with these uses: tensors in the same order, or `None`."""
        if self.failed:
            return
        for mine, other in zip(whole, broken, strict=True):
            apart = _difference(mine, other)
            if apart > _TOLERANCE:
                self.failed = True
                logger.error(
                    "CUDA graphs that are whole differ by %.3g from those that stop at the taps (in %s): every step of "
                    "this engine stops at each tap",
                    *(apart, " and ".join(sorted(uses))),
                )
                return
        for use in self._left.keys() & uses:
            self._left[use] -= 1
            if not self._left[use]:
                del self._left[use]


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape:
        return float("inf")
    one, other = one.float(), other.float()
    if torch.equal(one, other) or not one.numel():
        return 0.0
    # Infinities and what is no number must be at the same places.
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return float("inf")
    one, other = one[finite], other[finite]
    return float((one - other).abs().max() / (other.abs().max() + 1e-9)) if one.numel() else 0.0


def inputs_in(positional: Iterable[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a model is called with."""
    return [tensor for one in (*positional, *named.values()) for tensor in tensors_in(one)]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model is given or returns: one, several, or those of a pipeline stage."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from tensors_in(item)
    else:
        yield from getattr(output, "tensors", {}).values()
