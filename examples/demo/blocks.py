"""The demo's block: bend the residual stream from one token on, and say at every step what that does."""

from __future__ import annotations

import tracewire


@tracewire.intervention
def steer(model, tracer, live, direction, layer, after, strength):  # type: ignore[no-untyped-def]
    """Add `strength * direction` after decoder layer `layer` from step `after` on."""
    projection = [].save()
    probability = [].save()
    for step in tracer.iter[:]:
        stream = model.residual(layer).output
        if step >= after:
            stream = stream + (strength * direction).to(stream.dtype)
            model.residual(layer).output = stream
        projection.append(float(stream[-1].float() @ direction))
        probabilities = model.logits[-1].float().softmax(-1)
        probability.append(float(probabilities[model.samples.flatten()[0]]))
