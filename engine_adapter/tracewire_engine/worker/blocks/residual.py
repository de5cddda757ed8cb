"""The residual stream in blocks: `model.residual(i)`.

Decoder layers return different things in different models. On Llama-like models in vLLM a layer returns
`(hidden, residual)`: `hidden` is the output of its MLP alone, and the residual stream after the layer is the sum of
both, which the next layer's norm computes. Other models return one tensor, which is the stream. Still others (Cohere's,
StableLM's, Granite's hybrids) return two tensors, of which the next layer takes the first alone: the first is the
stream, and the second is left over. `model.residual(i)` is the stream on all of them.
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
    #: How often the stream had been replaced when it was read.
    at: int


class ResidualReads:
    """The residual streams that a block has read on this visit of a layer.

    If the block changes one in place, the change is written back to the layer's output.
    """

    def __init__(self) -> None:
        self._read: list[_Reading] = []
        self._replaced = 0

    def __bool__(self) -> bool:
        return bool(self._read)

    def read(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The stream as a new tensor: the sum of the two halves, or a copy of `hidden` if there is no other half."""
        self._take()
        # Inference tensors do not count in-place changes (`_version`), so this must be an ordinary one.
        with torch.inference_mode(False):
            made = hidden.clone() if residual is None else hidden + residual
        self._read.append(_Reading(made, made._version, hidden, residual, self._replaced))
        return made

    def replace(self, hidden: torch.Tensor, residual: torch.Tensor | None, value: torch.Tensor) -> None:
        """Make `value` the stream, and forget earlier reads."""
        self._read.clear()
        self._write(hidden, residual, value)

    def write_back(self) -> None:
        """Write readings that were changed in place to the layer's output, and forget all readings.

        Called when the model leaves the layer.

        Raises:
            RuntimeError: the block changed two readings in place, so that the second change would undo the first.
        """
        try:
            self._take()
        finally:
            self._read.clear()

    def _take(self) -> None:
        # A reading is kept until the model leaves the layer, since `output[:] += f(output)` reads twice before it
        # changes the first reading.
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
        # The other half is set to zero, so that the sum in the next norm is exactly `value`.
        hidden[:] = value
        if residual is not None:
            residual.zero_()


class Residual:
    """The residual stream after decoder layer `index`, at this request's tokens of the step.

    `output` reads it, shape `[tokens, hidden_size]`: all prompt tokens in the first step, then one token a step. The
    tensor is a copy and safe to keep. Assigning to `output` replaces the stream for the rest of the forward pass; the
    replacement must have the same shape. Changing a reading in place (`output[-1] += v`) replaces the stream too,
    until the block reads something elsewhere in the model.
    """

    def __init__(self, layer: Any, index: int, is_sum: bool = True) -> None:
        self._layer = layer
        self.index = index
        #: Of a layer that returns two tensors: whether the stream is their sum, not the first alone.
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
