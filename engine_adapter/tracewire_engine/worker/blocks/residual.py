"""The residual stream, by the name that people use for it: `model.residual(i)`.

What a decoder layer returns is not the same thing in every model. On Llama-like models in vLLM a layer returns
`(hidden, residual)`: `hidden` is the output of its MLP alone, and the residual stream after the layer is the sum of
both, which the next layer's norm computes. Others return one tensor, which is the stream. Others again (Cohere's,
StableLM's, Granite's hybrids) return two of which the next layer takes the first alone: it is the stream, and the other
one a leftover. A block that reads or bends the stream should not have to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nnsight.intervention.interleaver import Mediator

__all__ = ["Residual", "ResidualReads"]


@dataclass(slots=True)
class _Reading:
    made: torch.Tensor
    version: int
    hidden: torch.Tensor
    residual: torch.Tensor | None
    #: How often the stream had been replaced when this was it.
    at: int


class ResidualReads:
    """The residual streams that a block has read on this visit of a layer: what it changes in place, the layer gets."""

    def __init__(self) -> None:
        self._read: list[_Reading] = []
        self._replaced = 0

    def __bool__(self) -> bool:
        return bool(self._read)

    def read(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The stream that is the sum of these halves, as a new tensor."""
        self._take()
        # Not an inference tensor: those do not count their changes.
        with torch.inference_mode(False):
            made = hidden.clone() if residual is None else hidden + residual
        self._read.append(_Reading(made, made._version, hidden, residual, self._replaced))
        return made

    def replace(self, hidden: torch.Tensor, residual: torch.Tensor | None, value: torch.Tensor) -> None:
        """Make `value` the stream, and forget earlier reads."""
        self._read.clear()
        self._write(hidden, residual, value)

    def write_back(self) -> None:
        """Make what was changed in place the stream; the layer is left, and what was read there counts no more.

        Raises:
            RuntimeError: two readings were changed, and the second does not have what the first changed.
        """
        try:
            self._take()
        finally:
            self._read.clear()

    def _take(self) -> None:
        # A reading stays one until the layer is left: `output[:] += f(output)` reads twice before it changes the first.
        for reading in self._read:
            if reading.made._version != reading.version:
                if reading.at != self._replaced:
                    raise RuntimeError(
                        "residual(...).output was read twice and both readings were changed in place: the second "
                        "change would undo the first; keep one reading in a variable, or assign to output"
                    )
                self._write(reading.hidden, reading.residual, reading.made)
                reading.version, reading.at = reading.made._version, self._replaced

    def _write(self, hidden: torch.Tensor, residual: torch.Tensor | None, value: torch.Tensor) -> None:
        self._replaced += 1
        # Written in place, and the other half cleared: the next norm's sum is then exactly `value`.
        hidden[:] = value
        if residual is not None:
            residual.zero_()


class Residual:
    """The residual stream after decoder layer `index`, at this request's tokens of the step.

    `output` reads it, shape `[tokens, hidden_size]`: all prompt tokens in the first step, then one token a step. It is
    a value of its own, safe to keep. Assigning to `output` replaces the stream for the rest of the forward pass; the
    replacement must have the same shape. So does changing what was read in place (`output[-1] += v`), up to the
    block's next read elsewhere in the model.
    """

    def __init__(self, layer: Any, index: int, is_sum: bool = True) -> None:
        self._layer = layer
        self.index = index
        #: Whether the stream is the sum of what the layer returns, if that is two tensors.
        self._is_sum = is_sum

    def _streams(self) -> ResidualReads:
        mediator: Any = Mediator.current(f"residual({self.index})")
        streams: ResidualReads = mediator.streams
        return streams

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        served = self._layer.output
        if isinstance(served, tuple):
            return served[0], served[1] if len(served) > 1 and self._is_sum else None
        return served, None

    @property
    def output(self) -> torch.Tensor:
        """The stream, as a new tensor of shape `[tokens, hidden_size]`."""
        return self._streams().read(*self._halves())

    @output.setter
    def output(self, value: torch.Tensor) -> None:
        hidden, residual = self._halves()
        if tuple(value.shape) != tuple(hidden.shape):
            raise ValueError(
                f"residual({self.index}).output takes a tensor of shape {tuple(hidden.shape)}, got {tuple(value.shape)}"
            )
        self._streams().replace(hidden, residual, value)

    def __repr__(self) -> str:
        return f"<residual({self.index}), after {self._layer.path}>"
