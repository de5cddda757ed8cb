"""What these programs share: the demo model's direction between prose and code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tracewire import Probe

#: float32 `[256]`: the stream after decoder layer 4 has more of it in code, and less in prose.
DIRECTION = np.load(Path(__file__).parents[1] / "demo_model" / "direction.npy").astype(np.float32)
LOCATION = "residual(4)"


def code_probe(name: str = "code") -> Probe:
    """A probe that saves how much of the direction each token has, as a number."""
    return Probe(name, LOCATION, weight=DIRECTION)
