"""The same blocks by nnsight's own way and through Tracewire.

nnsight's way is its own engine with its async backend: a `with model.trace(...)` block, pickled onto the request, whose
saves come with the finished output. Tracewire's is the whole way over the bus. Requests run one at a time, so that the
batch is the same.
"""

# mypy: ignore-errors

from __future__ import annotations

import tracewire
from tracewire_bus.wire.digests import digest

__all__ = ["by_nnsight", "by_tracewire"]

PROMPT = "class Stack:\n    def push(self, item):\n"
SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@tracewire.intervention
def reads(model, tracer, live):
    hidden = [].save()
    table = {}.save()
    for step in tracer.iter[:]:
        hidden.append(model.model.layers[2].output[0][-1].clone())
        qkv = model.model.layers[3].self_attn.qkv_proj.output[0]
        table[step] = (qkv.shape[-1], qkv[-1, :4].clone())
        logits = model.logits.clone().save()


@tracewire.intervention
def edits(model, tracer, live):
    norms = [].save()
    for step in tracer.iter[:]:
        model.model.layers[4].output[0][:] *= 1.5
        if step == 5:
            model.model.layers[5].mlp.output = model.model.layers[5].mlp.output * 0
        norms.append(model.model.layers[6].output[0].float().norm().clone())
        sampled = model.samples.clone().save()


@tracewire.intervention
def forces(model, tracer, live):
    entering = [].save()
    for _ in tracer.iter[:3]:
        entering.append(model.model.layers[0].input.clone())
        model.samples[:] = 7


async def by_nnsight(model):
    """Each block as nnsight would have it written."""
    results = {}
    with model.trace(PROMPT, **SAMPLING) as tracer:
        hidden = [].save()
        table = {}.save()
        for step in tracer.iter[:]:
            hidden.append(model.model.layers[2].output[0][-1].clone())
            qkv = model.model.layers[3].self_attn.qkv_proj.output[0]
            table[step] = (qkv.shape[-1], qkv[-1, :4].clone())
            logits = model.logits.clone().save()
    results["reads"] = await tracer.backend
    with model.trace(PROMPT, **SAMPLING) as tracer:
        norms = [].save()
        for step in tracer.iter[:]:
            model.model.layers[4].output[0][:] *= 1.5
            if step == 5:
                model.model.layers[5].mlp.output = model.model.layers[5].mlp.output * 0
            norms.append(model.model.layers[6].output[0].float().norm().clone())
            sampled = model.samples.clone().save()
    results["edits"] = await tracer.backend
    with model.trace(PROMPT, **SAMPLING) as tracer:
        entering = [].save()
        for _ in tracer.iter[:3]:
            entering.append(model.model.layers[0].input.clone())
            model.samples[:] = 7
    results["forces"] = await tracer.backend
    return {
        name: {
            "token_ids": list(output.outputs[0].token_ids),
            "saves": {key: digest(value).hex() for key, value in sorted(output.saves.items())},
        }
        for name, output in results.items()
    }


async def by_tracewire(url):
    """The same blocks over the bus."""
    results = {}
    async with tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=30)
        for name, block in (("reads", reads), ("edits", edits), ("forces", forces)):
            async with client.trace(model, PROMPT, block, **SAMPLING) as trace:
                result = await trace.result()
            results[name] = {
                "token_ids": list(result.token_ids),
                "saves": {key: digest(value).hex() for key, value in sorted(result.saves.items())},
            }
    return results
