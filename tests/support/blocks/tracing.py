"""Blocks that the engine tests run. In a module of their own, as a service would have them."""


# mypy: ignore-errors

from __future__ import annotations

import math

import tracewire

SCALE = 2.0


def last(stream):
    """The last position, as a vector of its own."""
    return stream[-1].float().clone()


def scaled(stream):
    """A helper that calls a helper and uses a global."""
    return last(stream) * SCALE


@tracewire.intervention
def list_each_step(model, tracer, live, layer=2):
    """A list that grows by one vector a step."""
    hidden = [].save()
    for step in tracer.iter[:]:
        hidden.append(model.model.layers[layer].output[0][-1].clone())


@tracewire.intervention
def dict_each_step(model, tracer, live):
    """A dict with a key a step, and nested containers."""
    by_step = {"norms": [], "shapes": {}}.save()
    for step in tracer.iter[:]:
        stream = model.residual(3).output
        by_step["norms"].append(float(stream[-1].float().norm()))
        by_step["shapes"][step] = tuple(stream.shape)
        by_step["last"] = step


@tracewire.intervention
def scalar_each_step(model, tracer, live):
    """Scalars overwritten each step: a Python float and a tensor."""
    for step in tracer.iter[:]:
        norm = model.model.layers[1].output[0][-1].float().norm()
        value = (float(norm) + 1000.5).save()
        tensor = norm.clone().save()


@tracewire.intervention
def logits_and_samples(model, tracer, live):
    """The sampling phases."""
    top = [].save()
    sampled = [].save()
    for step in tracer.iter[:]:
        logits = model.logits
        top.append(logits[-1].float().topk(5).indices.clone())
        sampled.append(int(model.samples.flatten()[0]))


@tracewire.intervention
def edit_in_place(model, tracer, live, amount):
    """Edit an activation in place from the first step on."""
    norms = [].save()
    for step in tracer.iter[:]:
        model.model.layers[4].output[0][:] *= amount
        norms.append(float(model.model.layers[4].output[0][-1].float().norm()))


@tracewire.intervention
def uses_everything(model, tracer, live, vector, names, table):
    """Helpers, globals, modules, arrays and containers as variables; live parameters."""
    out = {}.save()
    out["scaled"] = scaled(model.residual(0).output)
    out["pi"] = math.pi
    out["dot"] = float(out["scaled"] @ vector)
    out["names"] = [name.upper() for name in names]
    out["table"] = {key: value + 1 for key, value in table.items()}
    out["alpha"] = live.alpha


@tracewire.intervention
def changed_in_place(model, tracer, live):
    """An accumulator changed in place: its last value comes with the final."""
    total = model.residual(1).output[-1].float().clone().save()
    rows = [[0.0], [0.0]].save()
    for step in tracer.iter[1:]:
        total += model.residual(1).output[-1].float()
        rows[step % 2][0] = float(total.norm())


@tracewire.intervention
def two_names(model, tracer, live):
    """Two lists, for consumers that follow one."""
    first = [].save()
    second = [].save()
    for step in tracer.iter[:]:
        stream = model.residual(2).output[-1].float()
        first.append(float(stream.norm()))
        second.append(stream.clone())


@tracewire.intervention
def tagged(model, tracer, live, tag, layer):
    """What only this trace would save: for many at once."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append([tag, step, model.model.layers[layer].output[0][-1].clone()])


@tracewire.intervention
def raises_at(model, tracer, live, at):
    """Raises in a step, after saving."""
    seen = [].save()
    for step in tracer.iter[:]:
        norm = float(model.residual(0).output[-1].float().norm())
        seen.append(norm)
        if step == at:
            raise ValueError(f"norm is {'high' if norm > 0 else 'low'}")


@tracewire.intervention
def exits(model, tracer, live):
    """A hostile block: would end the process."""
    raise SystemExit(3)


@tracewire.intervention
def computed_path(model, tracer, live, name):
    """A path that only exists when the block runs."""
    before = model.residual(0).output[-1].clone().save()
    after = getattr(model.model.layers[1], name).output.save()


@tracewire.intervention
def stops_at(model, tracer, live, at):
    """Stops the generation itself."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(float(model.residual(0).output[-1].float().norm()))
        if step == at:
            tracer.stop()


@tracewire.intervention
def cannot_travel(model, tracer, live):
    """Saves of which some cannot travel."""
    good = [].save()
    bad = [1].save()
    loop = [1].save()
    for step in tracer.iter[:]:
        model.residual(0).output
        good.append(step)
        if step == 1:
            bad.append(object())
            loop.append(loop)


@tracewire.intervention
def small_numbers(model, tracer, live, save):
    """Small integers are one object for everybody: one trace's save of them must not show in another."""
    for step in tracer.iter[:]:
        model.residual(0).output
        count = 1
        if save:
            count.save()


@tracewire.intervention
def whole_prompt(model, tracer, live):
    """A whole prompt's activations, at prefill only."""
    stream = model.residual(5).output.save()


@tracewire.intervention
def never_returns(model, tracer, live):
    """Asks the model for nothing, for ever."""
    count = 0
    while True:
        count += 1
