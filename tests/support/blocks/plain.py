"""A block as a service would define it, for the test of what importing it loads."""

from __future__ import annotations

import tracewire


@tracewire.intervention
def norms(model, tracer, live, layer=2):
    """The norm of the residual stream, each step."""
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(model.residual(layer).output[-1].norm().item())
