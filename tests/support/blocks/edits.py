"""Blocks that are installed as edits by the tests. In a module of their own, as a service would have them."""


# mypy: ignore-errors

from __future__ import annotations

import tracewire


@tracewire.intervention
def watch(model, tracer, live, layer=2):
    """A list that grows by one vector a step."""
    hidden = [].save()
    for step in tracer.iter[:]:
        hidden.append(model.residual(layer).output[-1].clone())


@tracewire.intervention
def whole(model, tracer, live, layer=2):
    """The prompt's activations, once."""
    hidden = model.model.layers[layer].output[0].save()


@tracewire.intervention
def seen(model, tracer, live, layer=2):
    """What a block sees of a layer's MLP, as a number a step."""
    norms = [].save()
    for step in tracer.iter[:]:
        norms.append(model.model.layers[layer].mlp.output[-1].float().norm().item())


@tracewire.intervention
def fill(model, tracer, live, value, layer=2):
    """Sets a layer's MLP to a value, over what was there."""
    before = [].save()
    for step in tracer.iter[:]:
        before.append(model.model.layers[layer].mlp.output[-1].float().mean().item())
        model.model.layers[layer].mlp.output[:] = value


@tracewire.intervention
def raising(model, tracer, live):
    """Saves, and raises in its third step."""
    steps = [].save()
    for step in tracer.iter[:]:
        steps.append(model.model.layers[1].output[0].shape[0])
        if step == 2:
            raise ValueError("boom, every request")


@tracewire.intervention
def raising_at_once(model, tracer, live):
    """Raises before it asks the model for anything."""
    raise RuntimeError("before anything")


@tracewire.intervention
def importing(model, tracer, live):
    """Raises as it is built, with a module that the engine does not have: the test puts one there."""
    there = True
    there.save()


@tracewire.intervention
def stopping(model, tracer, live):
    """Stops: its own end, and not the request's."""
    steps = [].save()
    for step in tracer.iter[:]:
        steps.append(step)
        model.model.layers[1].output[0]
        if step == 1:
            tracer.stop()


@tracewire.intervention
def out_of_reach(model, tracer, live):
    """Waits for a step that most requests do not come to."""
    early = model.model.layers[1].output[0].shape[0].save()
    with tracer.iter[500]:
        late = model.model.layers[1].output[0].shape[0].save()


@tracewire.intervention
def mistaken(model, tracer, live):
    model.model.layers[1].mpl.output[:] = 0


@tracewire.intervention
def steered(model, tracer, live):
    model.model.layers[1].output[0][:] *= live.alpha


@tracewire.intervention
def large(model, tracer, live):
    """Saves an array that travels beside the stream."""
    rows = model.model.layers[1].output[0].float().repeat(1, 64).save()


@tracewire.intervention
def much(model, tracer, live):
    """Saves some 48 kB a step, each of which is not large."""
    rows = [].save()
    for step in tracer.iter[:]:
        rows.append(model.model.layers[1].output[0][-1].float().repeat(48))
