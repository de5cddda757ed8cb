"""Blocks for engines of several ranks. The demo model has eight layers: of two pipeline stages, each holds four."""

# mypy: ignore-errors

from __future__ import annotations

import math
import time

import torch

import tracewire


@tracewire.intervention
def reads_in_order(model, tracer, live):
    """Values of every layer and sharded module, in order, in every step; a list, a dict, a scalar."""
    streams = [].save()
    sharded = [].save()
    table = {"norms": []}.save()
    for step in tracer.iter[:]:
        for layer in range(8):
            qkv = model.model.layers[layer].self_attn.qkv_proj.output[0][-1].float().clone()
            sharded.append(qkv)
            down = model.model.layers[layer].mlp.down_proj.input[-1].float().clone()
            sharded.append(down)
            streams.append(model.residual(layer).output[-1].float().clone())
        norm = model.model.norm.output[0][-1].float().clone()
        table["norms"].append(float(norm.norm()))
        table["last"] = step
        count = (step * 1000 + 1000).save()


@tracewire.intervention
def logits_and_samples(model, tracer, live):
    """The embedding, the logits and the samples."""
    embedded = [].save()
    top = [].save()
    sampled = [].save()
    for step in tracer.iter[:]:
        embedded.append(model.model.embed_tokens.output[-1].float().clone())
        top.append(model.logits[-1].float().topk(5).values.clone())
        sampled.append(int(model.samples.flatten()[0]))


@tracewire.intervention
def fed(model, tracer, live):
    """The token that each step begins with."""
    ids = [].save()
    for step in tracer.iter[:]:
        ids.append(int(model.model.embed_tokens.input.flatten()[-1]))


@tracewire.intervention
def arithmetic(model, tracer, live):
    """What both stages have, in one expression."""
    differences = [].save()
    for step in tracer.iter[:]:
        early = model.residual(1).output[-1].float()
        late = model.residual(6).output[-1].float()
        differences.append((late - early) * early.norm())


@tracewire.intervention
def carried(model, tracer, live, amount):
    """An early layer's value changes a late one; what came of it changes the next step's early layers."""
    seen = [].save()
    push = None
    for step in tracer.iter[:]:
        if push is not None:
            model.residual(1).output[:] += push
        early = model.residual(2).output.clone()
        model.residual(5).output = model.residual(5).output + amount * early
        late = model.residual(6).output[-1].clone()
        push = 0.01 * late
        seen.append(late.float())


@tracewire.intervention
def written(model, tracer, live, amount):
    """Edits on both stages, in place and by assignment, of sharded values too."""
    seen = [].save()
    for step in tracer.iter[:]:
        model.model.layers[1].output[0][:] *= amount
        model.model.layers[2].self_attn.o_proj.input = model.model.layers[2].self_attn.o_proj.input * amount
        hidden, residual = model.model.layers[5].output
        model.model.layers[5].output = (hidden * amount, residual)
        wide = model.model.layers[6].mlp.gate_up_proj.output[0]
        model.model.layers[6].mlp.gate_up_proj.output = (wide * amount, None)
        seen.append(model.residual(7).output[-1].float().clone())


@tracewire.intervention
def forced(model, tracer, live, token):
    """Changes the logits, so that one token is sampled."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(model.residual(0).output[-1].float().clone())
        if step % 2:
            logits = model.logits
            logits[:] = -1e4
            logits[:, token] = 1e4


@tracewire.intervention
def skips(model, tracer, live, layers):
    """Skips one layer of each stage: what enters it leaves it."""
    for layer in layers:
        args, _ = model.model.layers[layer].inputs
        model.model.layers[layer].skip((args[1], args[2]))
    stream = model.residual(7).output[-1].float().clone().save()


@tracewire.intervention
def without_a_loop(model, tracer, live):
    """Only the prompt's step, all rows of it; the rest of the generation has no block any more."""
    early = model.residual(0).output.clone().save()
    late = model.residual(7).output.clone().save()


@tracewire.intervention
def later_steps(model, tracer, live):
    """Some steps only, by name."""
    seen = [].save()
    for step in tracer.iter[2:5]:
        seen.append(model.residual(6).output[-1].float().clone())
        seen.append(model.logits[-1].float().max().clone())


@tracewire.intervention
def lens(model, tracer, live):
    """Calls modules of the last stage with values of both."""
    tops = [].save()
    for step in tracer.iter[:]:
        early = model.residual(1).output[-1:].clone()
        late = model.residual(5).output[-1:].clone()
        for stream in (early, late):
            normed = model.model.norm(stream)
            tops.append(model.logits_processor(model.lm_head, normed)[-1].float().topk(3).indices.clone())


@tracewire.intervention
def lens_at_every_layer(model, tracer, live):
    """The same at each layer in turn."""
    tops = [].save()
    for step in tracer.iter[:]:
        for layer in range(8):
            normed = model.model.norm(model.residual(layer).output[-1:])
            tops.append(model.logits_processor(model.lm_head, normed)[-1].float().topk(3).indices.clone())


@tracewire.intervention
def noisy(model, tracer, live):
    """Random numbers that nobody seeded, drawn on both stages and added on the first."""
    seen = [].save()
    for step in tracer.iter[:]:
        before = model.residual(1).output[-1].float().clone()
        noise = 10 * torch.randn(256)
        model.residual(1).output += noise.to(model.residual(1).output.dtype)
        after = model.residual(1).output[-1].float().clone()
        model.residual(6).output
        seen.append([noise, after - before])


@tracewire.intervention
def early_calls(model, tracer, live):
    """Calls a module of the first stage, before anything of the last one."""
    seen = [].save()
    for step in tracer.iter[:]:
        stream = model.residual(1).output[-1:].clone()
        again = model.model.layers[2].mlp(stream)
        seen.append(again[-1].float().clone())
        seen.append(model.residual(6).output[-1].float().clone())


@tracewire.intervention
def late_calls(model, tracer, live):
    """Calls a module of the last stage with a value of the first, and goes on with both in the next step."""
    seen = [].save()
    for step in tracer.iter[:]:
        stream = model.residual(1).output[-1:].clone()
        again = model.model.layers[5].mlp(stream)
        seen.append(again[-1].float().clone())
        seen.append(model.residual(6).output[-1].float().clone())


@tracewire.intervention
def cached(model, tracer, live):
    """nnsight's cache, of modules of both stages."""
    cache = tracer.cache(modules=["model.model.layers.1", "model.model.layers.6"])
    found = [].save()
    for step in tracer.iter[:]:
        model.samples
        if step == 2:
            for path in ("model.model.layers.1", "model.model.layers.6"):
                found.append([len(cache[path]), cache[path].output[-1][0].float().clone()])


@tracewire.intervention
def collects(model, tracer, live, seen, sums):
    """Adds to what all prompts share, from both stages."""
    for step in tracer.iter[:]:
        early = float(model.residual(1).output[-1].float().norm())
        late = float(model.residual(6).output[-1].float().norm())
        seen.append(model.samples.item())
        sums[step] += early + late


@tracewire.intervention
def asks_result(model, tracer, live):
    """Goes on when its request is over, with what it has put out."""
    early = model.residual(1).output[-1].float().clone().save()
    ids = list(tracer.result.outputs[0].token_ids).save()
    early += len(ids)


@tracewire.intervention
def steered(model, tracer, live, direction, pace=0.01):
    """Adds the live `alpha` times a direction on both stages. Whoever steers keeps up with it."""
    used = [].save()
    seen = [].save()
    for step in tracer.iter[:]:
        alpha = live.alpha
        time.sleep(pace)
        model.residual(2).output[:] += (alpha * direction).to(model.residual(2).output.dtype)
        model.residual(5).output += (live.alpha * direction).to(model.residual(5).output.dtype)
        used.append([alpha, live.alpha])
        seen.append(model.residual(7).output[-1].float().clone())


@tracewire.intervention
def scheduled(model, tracer, live, direction, schedule):
    """The same, with `schedule[step]` for the value: the run that knows beforehand."""
    used = [].save()
    seen = [].save()
    for step in tracer.iter[:]:
        alpha = schedule[step] if step < len(schedule) else schedule[-1]
        model.residual(2).output += (alpha * direction).to(model.residual(2).output.dtype)
        model.residual(5).output += (alpha * direction).to(model.residual(5).output.dtype)
        used.append([alpha, alpha])
        seen.append(model.residual(7).output[-1].float().clone())


@tracewire.intervention
def large(model, tracer, live):
    """Values large enough for blobs, of both stages."""
    early = model.model.layers[0].mlp.gate_up_proj.output[0].clone().save()
    late = model.model.layers[7].mlp.gate_up_proj.output[0].clone().save()


@tracewire.intervention
def raises(model, tracer, live, layer, at):
    """Raises at one layer in one step."""
    seen = [].save()
    for step in tracer.iter[:]:
        for place in range(8):
            norm = float(model.residual(place).output[-1].float().norm())
            seen.append(norm)
            if step == at and place == layer:
                raise ValueError(f"layer {place} of step {step}")


@tracewire.intervention
def raises_after_samples(model, tracer, live):
    """Raises when the step is over on the last stage."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(int(model.samples.flatten()[0]))
        if step == 2:
            seen[99]


@tracewire.intervention
def raises_at_once(model, tracer, live):
    """Raises before it asks for anything."""
    1 / 0


@tracewire.intervention
def out_of_order(model, tracer, live, first, then):
    """Asks for a layer that the model has passed."""
    one = model.residual(first).output[-1].float().clone().save()
    other = model.residual(then).output[-1].float().clone().save()


@tracewire.intervention
def wrong_shape(model, tracer, live, layer):
    """A replacement that does not fit."""
    before = model.residual(0).output[-1].float().clone().save()
    model.residual(layer).output = model.residual(layer).output[:, :-1]


@tracewire.intervention
def no_such_module(model, tracer, live, name):
    """A path that only exists when the block runs, and does not."""
    before = model.residual(0).output[-1].clone().save()
    after = getattr(model.model.layers[6], name).output.save()


@tracewire.intervention
def stops(model, tracer, live, layer, at):
    """Stops the generation itself."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(float(model.residual(layer).output[-1].float().norm()))
        if step == at:
            tracer.stop()


@tracewire.intervention
def endless(model, tracer, live, layer):
    """A turn that never ends, once it has been served something."""
    seen = [1].save()
    model.residual(layer).output
    # On one line, which is then the one that it is ended at.
    any(math.sqrt(number) < 0 for number in iter(int, 1))


@tracewire.intervention
def differs(model, tracer, live):
    """Does something else on each stage."""
    from vllm.distributed.parallel_state import get_pp_group

    early = model.residual(get_pp_group().rank_in_group).output[-1].clone().save()
    late = model.residual(6).output[-1].clone().save()


@tracewire.intervention
def fails_on_one(model, tracer, live, stage):
    """Fails on one stage only."""
    from vllm.distributed.parallel_state import get_pp_group

    seen = [].save()
    for step in tracer.iter[:]:
        model.residual(1).output
        seen.append(float(model.residual(6).output[-1].float().norm()))
        if step == 2 and get_pp_group().rank_in_group == stage:
            raise RuntimeError(f"only stage {stage}")


@tracewire.intervention
def weights(model, tracer, live, layer):
    """Reads weights."""
    model.residual(0).output
    shape = list(model.model.layers[layer].mlp.down_proj.weight.shape).save()


@tracewire.intervention
def calls_back(model, tracer, live):
    """Calls a module of the first stage when it has had something of the last one."""
    late = model.residual(6).output[-1:].clone()
    again = model.model.layers[1].mlp(late).save()


@tracewire.intervention
def too_late(model, tracer, live):
    """Calls a module of the last stage, and then asks for what the first one had meanwhile passed."""
    stream = model.residual(1).output[-1:].clone()
    again = model.model.layers[5].mlp(stream)
    after = model.residual(2).output[-1].clone().save()


@tracewire.intervention
def inside(model, tracer, live):
    """Drills into a module's forward."""
    model.residual(0).output
    inner = model.model.layers[1].mlp.source.save()


@tracewire.intervention
def calls_all(model, tracer, live):
    """Calls a module whose parts are on several stages."""
    stream = model.residual(0).output
    model.model(stream)
