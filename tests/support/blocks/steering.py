"""Blocks that the control tests run: some read a live parameter, others know beforehand what it will be.

Each step takes `pace` seconds at least, so that whoever steers keeps up with the model.
"""

# mypy: ignore-errors

from __future__ import annotations

import time

import tracewire


@tracewire.intervention
def steered(model, tracer, live, direction, pace=0.01):
    """Adds the live `alpha` times a direction, and saves what it used and what came of it."""
    used = [].save()
    norms = [].save()
    for step in tracer.iter[:]:
        alpha = live.alpha
        time.sleep(pace)
        model.residual(2).output += (alpha * direction).to(model.residual(2).output.dtype)
        used.append(alpha)
        norms.append(model.residual(4).output[-1].float().clone())


@tracewire.intervention
def scheduled(model, tracer, live, direction, schedule):
    """The same, with `schedule[step]` for the value: the run that knows beforehand."""
    used = [].save()
    norms = [].save()
    for step in tracer.iter[:]:
        alpha = schedule[step] if step < len(schedule) else schedule[-1]
        model.residual(2).output += (alpha * direction).to(model.residual(2).output.dtype)
        used.append(alpha)
        norms.append(model.residual(4).output[-1].float().clone())


@tracewire.intervention
def reads(model, tracer, live, pace=0.01):
    """Reads live parameters before, between and after what it reads of the model, and outside its loop."""
    first = live.alpha
    seen = [].save()
    for step in tracer.iter[:]:
        before = live.alpha
        model.residual(0).output
        between = live.alpha
        time.sleep(pace)
        model.residual(5).output
        after = live.alpha
        seen.append([step, before, between, after])
    last = live.alpha


@tracewire.intervention
def reads_until_over(model, tracer, live, pace=0.01):
    """Reads a live parameter in each step until another says that it is enough."""
    seen = [].save()
    for step in tracer.iter[:]:
        time.sleep(pace)
        seen.append(live.alpha)
        if live.over:
            tracer.stop()


@tracewire.intervention
def added(model, tracer, live, vectors):
    """Adds `vectors[step]` in float32, as a declared `Steer` does: the run that knows beforehand."""
    norms = [].save()
    for step in tracer.iter[:]:
        model.model.layers[2].output[0].add_(vectors[min(step, len(vectors) - 1)])
        norms.append(model.residual(4).output[-1].clone())


@tracewire.intervention
def stops(model, tracer, live, at):
    """Stops the generation itself."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(float(model.residual(0).output[-1].float().norm()))
        if step == at:
            tracer.stop()


@tracewire.intervention
def begins(model, tracer, live):
    """When its first step begins."""
    model.residual(0).output
    at = time.monotonic().save()


@tracewire.intervention
def dawdles(model, tracer, live, seconds):
    """Holds every step up, for all requests."""
    for step in tracer.iter[:]:
        model.residual(0).output
        time.sleep(seconds)
