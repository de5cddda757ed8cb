"""Blocks for engines whose workers are on other machines."""

# mypy: ignore-errors

from __future__ import annotations

import tracewire


@tracewire.intervention
def scaled_by(model, tracer, live, amounts):
    """Uses a variable that is large enough to travel by itself, all of it."""
    seen = [].save()
    for step in tracer.iter[:]:
        model.residual(2).output[:] *= float(amounts.double().mean())
        seen.append([float(amounts.double().sum()), model.residual(6).output[-1].float().clone()])
