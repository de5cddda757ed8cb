"""Directions from contrastive prompts, and what steering along them does.

`client.extract` harvests activations of two kinds of prompts and finds the direction between them at each layer;
`client.strength_sweep` scores what a model writes at several strengths; `client.apply_probe` applies a probe to what
was recorded before. docs/extract.md describes them.
"""

from __future__ import annotations

from .directions import LayerScore
from .extraction import Extraction
from .sweep import StrengthSweep

__all__ = ["Extraction", "LayerScore", "StrengthSweep"]
