"""The declared intervention that replaces values."""

from __future__ import annotations

from typing import Any

from .declared_base import DeclaredIntervention, Live

__all__ = ["Patch"]


class Patch(DeclaredIntervention, tag="patch"):
    """Replaces the values at a location by `values`, at some positions.

    `positions` are positions of the prompt: an index, a list of indices, or a slice such as `"2:5"`. Negative ones
    count from the prompt's end. Or they are a name of `Positions`, such as `generated`.

    `values` has shape `[width]`, for all positions alike, or `[positions, width]`, one row for each position in order.
    The width of `residual(...)` is the model's hidden size. Where `at` names several locations, all get the same.
    Values can be a reference to an array that another trace saved (`ArrayRef`).

    With `heads`, `at` is `heads(3)` (`HeadProbe`), and only these attention heads of the layer are replaced. Values
    then have shape `[heads, head_size]`, or `[positions, heads, head_size]`.

    In place of `values`, `prompt` names another prompt of the trace, from 0 on. The new values are then those that this
    prompt has at the same locations, at its positions `source`: an index, a list of indices, a slice or `"prompt"`, by
    default the `positions` of the patch. One position goes to all of the patch's, several go one to each in order. The
    engine computes the named prompt first. `into` are the prompts that are patched, by default all but the named one.

    `strength` is how far the old value goes to the new one: 1 replaces it, 0 leaves it, 0.5 is their mean. A value with
    two halves, as a residual stream can have, is replaced as a whole: the sum of both is the new value.
    """

    at: str
    values: Any = None
    positions: int | str | list[int] = -1
    strength: float | Live = 1.0
    heads: int | list[int] | None = None
    prompt: int | None = None
    source: int | str | list[int] | None = None
    into: int | list[int] | None = None
