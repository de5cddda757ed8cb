"""Attention heads: the declared interventions on them, and what an engine says of a layer's heads."""

from __future__ import annotations

from typing import Any, Literal

from .declared_base import DeclaredIntervention, Live, Message, Positions

__all__ = ["AttentionInfo", "AttentionPattern", "HeadAblate", "HeadProbe"]


class HeadProbe(DeclaredIntervention, tag="head_probe"):
    """Reads attention heads, and saves one item a step in the list `name`.

    `at` is `heads(3)`: the heads of layer 3, `heads(*)` or `heads(2:6)`: those of several layers. `heads` are the
    numbers of the heads, from 0 on; by default all. The value of a head is what the attention gives to the output
    projection for it.

    An item is `[heads, head_size]` in the model's dtype. `reduce="norm"` saves the Euclidean norms instead, float32
    `[heads]`. The dimensions of positions and locations come before `heads`, as in `Probe`.
    """

    name: str
    at: str
    heads: int | list[int] | None = None
    reduce: Literal["none", "norm"] = "none"
    positions: Positions = "last"


class HeadAblate(DeclaredIntervention, tag="head_ablate"):
    """Scales the values of attention heads (`HeadProbe`) by `keep`, around `mean`.

    A `keep` of 0 ablates the heads, 1 leaves them, 2 doubles them. Without a `mean` the ablated value is zero. `mean`
    has shape `[heads, head_size]`, or `[head_size]` for all heads alike: the new value is
    `mean + keep * (value - mean)`.
    """

    at: str
    heads: int | list[int]
    keep: float | Live = 0.0
    mean: Any = None
    positions: Positions = "all"


class AttentionPattern(DeclaredIntervention, tag="attention_pattern"):
    """Computes how attention heads spread over the positions, and saves one item a step in the list `name`.

    `at` and `heads` are as in `HeadProbe`. The engine computes the weights from the layer's queries and keys as its
    attention kernel gets them, in float32. `positions` are those of the queries.

    An item is a dict of `positions`, int32 `[heads, top_k]`, and `weights`, float32 `[heads, top_k]`: the positions
    with the greatest weights, best first. Where there are fewer positions, -1 and 0 fill the rest. With a `top_k` of 0
    an item is the whole pattern, float32 `[heads, positions so far]`. The dimensions of positions and locations come
    before `heads`, as in `Probe`.
    """

    name: str
    at: str
    heads: int | list[int] | None = None
    top_k: int = 8
    positions: Positions = "last"


class AttentionInfo(Message, array_like=True):
    """The attention of one decoder layer: `layer` is the layer's number.

    `module` is the path of the module that computes the attention from queries, keys and values, `output` that of the
    output projection behind it. It has `heads` query heads of `head_size` features, and `kv_heads` heads of keys and
    values. `opaque` says why its pattern cannot be computed outside of it; `""` if it can.
    """

    layer: int
    module: str
    output: str
    heads: int
    kv_heads: int
    head_size: int
    opaque: str = ""
