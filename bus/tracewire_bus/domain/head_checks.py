"""Checks of interventions on attention heads against the heads that a model's layers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import AttentionInfo, AttentionPattern, Declared, HeadAblate, HeadProbe, Patch

from .tree import ModuleTree
from .value_checks import DeclarationError, check_array

__all__ = ["HEAD_KINDS", "attention_paths", "check_heads", "head_list", "layers_of_heads"]

#: The kinds that name heads. A `Patch` may.
HEAD_KINDS: Final = (HeadProbe, HeadAblate, Patch, AttentionPattern)
MAX_TOP_K: Final = 1024


def layers_of_heads(tree: ModuleTree, layers: Sequence[int]) -> list[AttentionInfo]:
    """The attention of these layers.

    Raises:
        ValueError: the engine does not know the heads of one of them, or two have other heads than each other.
    """
    unknown = next((layer for layer in layers if layer not in tree.attention), None)
    if unknown is not None:
        path = f"{tree.layers}.{unknown}"
        known = f"; it knows those of the layers {sorted(tree.attention)}" if tree.attention else ""
        raise ValueError(
            f"heads({unknown}): the engine does not know the attention heads of {path}, a {tree.cls(path)}{known}"[:300]
        )
    found = [tree.attention[layer] for layer in layers]
    first, other = found[0], next((one for one in found if _size(one) != _size(found[0])), None)
    if other is not None:
        raise ValueError(
            f"layer {first.layer} has {first.heads} heads of {first.head_size}, and layer {other.layer} has "
            f"{other.heads} of {other.head_size}: name them apart"
        )
    return found


def attention_paths(tree: ModuleTree, outputs: Sequence[str]) -> list[str]:
    """The paths of the modules that compute the attention in front of these output projections.

    Raises:
        ValueError: the pattern of one cannot be computed.
    """
    known = {one.output: one for one in tree.attention.values()}
    if not all(path in known for path in outputs):
        raise ValueError("expected heads(...), such as 'heads(3)'")
    found = [known[path] for path in outputs]
    opaque = next((one for one in found if one.opaque), None)
    if opaque is not None:
        raise ValueError(f"the attention pattern of layer {opaque.layer} cannot be computed: {opaque.opaque}")
    return [one.module for one in found]


def _size(one: AttentionInfo) -> tuple[int, int]:
    return one.heads, one.head_size


def head_list(one: Declared) -> list[int] | None:
    """The heads that an intervention names; `None` if it names none."""
    given: int | list[int] | None = getattr(one, "heads", None)
    return [given] if isinstance(given, int) else given


def check_heads(one: Any, size: tuple[int, int] | None, live: Mapping[str, Any], field: str) -> None:
    """Check the heads that an intervention names, and the mean of a `HeadAblate`.

    Args:
        one: of a kind in `HEAD_KINDS`.
        size: how many heads there are at its location, and their size; `None` where there are none.
        live: the values of the trace's live parameters, by name.
        field: names the intervention in errors.

    Raises:
        DeclarationError: it is invalid, or does not fit.
    """
    heads = head_list(one)
    if size is None:
        if heads is None and isinstance(one, Patch):
            return
        raise DeclarationError(f"{field}.at", f"expected heads(...), such as 'heads(3)', got {one.at!r}")
    count, width = size
    if heads is not None:
        wrong = next((head for head in heads if not 0 <= head < count), None)
        if wrong is not None:
            raise DeclarationError(f"{field}.heads", f"the layer has {count} heads, 0 to {count - 1}, got {wrong}")
        if len(set(heads)) < max(1, len(heads)):
            raise DeclarationError(f"{field}.heads", f"expected one or more heads, each once, got {heads!r}"[:300])
    if isinstance(one, AttentionPattern) and not 0 <= one.top_k <= MAX_TOP_K:
        raise DeclarationError(f"{field}.top_k", f"expected 0 (the whole pattern) to {MAX_TOP_K}, got {one.top_k}")
    if isinstance(one, HeadAblate) and one.mean is not None:
        named = one.mean.get("live") if isinstance(one.mean, dict) else None
        value = live.get(named) if named is not None else one.mean
        if named is not None and not is_array(value):
            return  # `check` reports the type of a live parameter itself
        shape = check_array(value, f"{field}.mean", (1, 2), None)
        if shape[-1] != width or (len(shape) == 2 and shape[0] != len(heads or ())):
            raise DeclarationError(
                f"{field}.mean",
                f"expected [{width}] or [{len(heads or ())}, {width}] for {len(heads or ())} heads, got {list(shape)}",
            )
