"""What a scripted engine plays for the code of the pages: as many tokens and saves as the code asks for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.support.bus_engine import Stage
from tests.support.until import until

__all__ = ["HIDDEN", "LAYERS", "played"]

#: Of the demo model, which the pages speak of.
LAYERS, HIDDEN = 8, 256

#: What blocks of the pages save, by the names that stand in their source.
_OF_BLOCKS: dict[str, Any] = {"norms": 1.5, "log": "a line", "found": 0.5, "logits": 2.0}

#: A trace with live parameters waits before this token until they are changed.
_CHANGED_BY = 40


async def played(stage: Stage) -> None:
    """A trace as its submission asks for it. It saves in each step, and is paused and steered between two steps."""
    await stage.accept()
    invoke = stage.submission.invokes[0]
    saved: dict[str, Any] = {}
    for one in stage.submission.interventions:
        if type(one).__name__ == "Probe":
            row = np.arange(HIDDEN, dtype=np.float32) + len(invoke.prompt or "")
            saved[one.name] = row.astype(ml_dtypes.bfloat16) if one.weight is None else 0.5
    block = invoke.block or stage.submission.block
    if block is not None:
        saved.update({name: value for name, value in _OF_BLOCKS.items() if name in block.source})
    tokens = invoke.sampling.get("max_tokens", 16)
    for number in range(tokens):
        if stage.live and number == _CHANGED_BY:
            await until(lambda: stage.live_version)
        await stage.going()
        await stage.save(" word", saved, finish_reason="length" if number == tokens - 1 else None)
    await stage.final()
