"""Locations by the names that TransformerLens and SAELens have for them, for errors that say what ours are."""

from __future__ import annotations

import re

__all__ = ["our_name"]

_HOOK = re.compile(r"(?:blocks\.(\d+)\.)?(?:attn\.)?hook_(\w+)")


def our_name(at: str) -> str | None:
    """What a name of TransformerLens's is here, in words; `None` if it is none, or has no location here."""
    hook = _HOOK.fullmatch(at)
    if hook is None:
        return None
    layer, name = hook.groups()
    if name == "resid_post":
        return f"'residual({layer or 'LAYER'})'"
    if name == "resid_pre":
        if layer == "0":
            return None
        return f"'residual({'LAYER - 1' if layer is None else int(layer) - 1})', the stream after the layer before"
    if name in ("z", "pattern"):
        kind = " of an AttentionPattern" if name == "pattern" else ""
        return f"'heads({layer or 'LAYER'})'{kind}"
    return None
