"""Blocks that do what declared interventions do, at an early and a late layer: of two stages, each has one of them."""

# mypy: ignore-errors

from __future__ import annotations

import torch

import tracewire


@tracewire.intervention
def probes(model, tracer, live, layers, weight, bias, vector):
    """`Probe`: raw, on weights with activations, norms, moments, a mean over positions, and of all layers."""
    raw, linear, norm, magnitudes, most, moments, mean, every = [[].save() for _ in range(8)]
    for _ in tracer.iter[:]:
        found = []
        for layer in range(8):
            stream = model.residual(layer).output
            last = stream[-1].float()
            found.append(last @ vector)
            if layer not in layers:
                continue
            raw.append(stream[-1].clone())
            linear.append((last @ weight.T + bias).sigmoid())
            norm.append(float(last.norm()))
            magnitudes.append(float(last.abs().sum()))
            most.append(float(last.abs().max()))
            apart = last - last.mean()
            unit = apart / apart.square().mean().sqrt()
            moments.append(torch.stack([last.mean(), apart.square().mean(), unit.pow(3).mean(), unit.pow(4).mean()]))
            mean.append(stream.float().mean(0))
        every.append(torch.stack(found))


@tracewire.intervention
def lenses(model, tracer, live, layers, matrices, bias):
    """`LogitLens`; `Lens` with a map of each layer's own, and as a tuned lens."""
    plain, mapped, tuned = [[].save() for _ in range(3)]

    def top(stream):
        found = model.logits_processor(model.lm_head, model.model.norm(stream.clone()))[-1].float().topk(2)
        return {"token_ids": found.indices.to(torch.int32), "logits": found.values}

    for _ in tracer.iter[:]:
        for place, layer in enumerate(layers):
            stream = model.residual(layer).output[-1:]
            image = stream.float() @ matrices[place].T + bias
            plain.append(top(stream))
            mapped.append(top(image.to(stream.dtype)))
            tuned.append(top((stream.float() + image).to(stream.dtype)))


@tracewire.intervention
def coordinates(model, tracer, live, layers, inverse):
    """`Coordinates`."""
    found = [].save()
    for _ in tracer.iter[:]:
        for layer in layers:
            found.append(model.residual(layer).output[-1].float() @ inverse)


@tracewire.intervention
def edits(model, tracer, live, layers, kind, vector, basis, amount):
    """`Steer`, `Clamp`, `Ablate` and `Project`: what they add to all rows."""
    after = [].save()
    for _ in tracer.iter[:]:
        for layer in layers:
            stream = model.residual(layer).output.float()
            unit = vector / vector.norm()
            along = stream @ unit
            inside = stream @ basis.T @ basis
            if kind == "steer":
                change = amount * vector
            elif kind == "clamp":
                change = (along.clamp(max=amount) - along)[:, None] * unit
            elif kind == "ablate":
                change = (amount - 1) * along[:, None] * unit
            elif kind == "ablate basis":
                change = (amount - 1) * inside
            elif kind == "remove":
                change = -inside
            else:
                change = amount * (inside - stream)
            hidden = model.model.layers[layer].output[0]
            hidden[:] = (hidden.float() + change).to(hidden.dtype)
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def patches(model, tracer, live, layers, rows, places, value, strength):
    """`Patch`: rows at positions of the prompt, and one value at all generated ones."""
    after = [].save()
    for step in tracer.iter[:]:
        for layer in layers:
            hidden, residual = model.model.layers[layer].output
            if step == 0:
                for row, place in enumerate(places):
                    hidden[place] = rows[row].to(hidden.dtype)
                    residual[place] = 0
            else:
                stream = (hidden + residual).float()
                hidden[:] = torch.lerp(stream, value.expand(stream.shape), strength).to(hidden.dtype)
                residual[:] = 0
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def gives(model, tracer, live, layers, chosen):
    """The values that another prompt takes: of the stream, and of heads."""
    rows, heads, after = [[].save() for _ in range(3)]
    for _ in tracer.iter[:1]:
        for layer in layers:
            heads.append(model.model.layers[layer].self_attn.o_proj.input.view(-1, 4, 64)[:, chosen].clone())
            rows.append(model.residual(layer).output.clone())
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def takes(model, tracer, live, layers, rows, places, heads, chosen, others):
    """`Patch` from another prompt: of the stream, and of heads."""
    after = [].save()
    for _ in tracer.iter[:1]:
        for number, layer in enumerate(layers):
            value = model.model.layers[layer].self_attn.o_proj.input
            for place in others:
                for slot, head in enumerate(chosen):
                    value[place, 64 * head : 64 * head + 64] = heads[number][slot]
            hidden, residual = model.model.layers[layer].output
            for row, place in enumerate(places):
                hidden[place] = rows[number][row].to(hidden.dtype)
                residual[place] = 0
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def heads(model, tracer, live, layers, chosen, keep, mean):
    """`HeadAblate`, and `HeadProbe` behind it: whole heads, and norms of some."""
    found, norms, after = [[].save() for _ in range(3)]
    for _ in tracer.iter[:]:
        for layer in layers:
            value = model.model.layers[layer].self_attn.o_proj.input
            for head in chosen:
                part = value[:, 64 * head : 64 * head + 64]
                part[:] = torch.lerp(mean.expand(part.shape), part.float(), keep)
            found.append(value[-1].view(4, 64).clone())
            norms.append(found[-1][chosen].float().norm(dim=-1))
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def patched_heads(model, tracer, live, layers, chosen, places, rows):
    """`Patch` with heads: at positions of the prompt."""
    after = [].save()
    for step in tracer.iter[:]:
        for layer in layers:
            value = model.model.layers[layer].self_attn.o_proj.input
            if step == 0:
                for row, place in enumerate(places):
                    for number, head in enumerate(chosen):
                        value[place, 64 * head : 64 * head + 64] = rows[row][number]
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def attends(model, tracer, live, layers):
    """`AttentionPattern`, of the projection's queries and keys, which this block turns by their positions."""
    whole = [].save()
    keys = {layer: [] for layer in layers}
    start = 0
    for _ in tracer.iter[:]:
        count = 0
        for layer in layers:
            both = model.model.layers[layer].self_attn.qkv_proj.output[0][:, : 6 * 64]
            count = len(both)
            places = torch.arange(start, start + count).float()
            angles = places[:, None] * 10000.0 ** (-torch.arange(32).float() / 32)
            one, other = both.float().view(-1, 6, 64).chunk(2, dim=-1)
            cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
            turned = torch.cat([one * cosine - other * sine, other * cosine + one * sine], -1).to(both.dtype)
            keys[layer].append(turned[:, 4:])
            every = torch.cat(keys[layer]).repeat_interleave(2, 1).float()
            scores = torch.einsum("hd,lhd->hl", turned[-1, :4].float(), every) * 64**-0.5
            whole.append(scores.softmax(-1))
        start += count


@tracewire.intervention
def features(model, tracer, live, layers, encoder, bias, threshold, k, decoder, chosen, scale, add):
    """`Features` of an autoencoder, the greatest and chosen ones; and `SteerFeatures`. With a `k`, it is a topk."""
    top, picked, after = [[].save() for _ in range(3)]

    def activations(stream):
        before = stream.float() @ encoder.T + bias
        if k:
            return torch.where(before >= before.topk(k).values[..., -1:], before.relu(), 0.0)
        return torch.where(before > threshold, before.relu(), 0.0)

    for _ in tracer.iter[:]:
        for layer in layers:
            found = activations(model.residual(layer).output)
            best = found[-1].topk(3)
            active = best.values > 0
            top.append(
                {
                    "features": torch.where(active, best.indices, -1).to(torch.int32),
                    "activations": torch.where(active, best.values, 0.0),
                }
            )
            picked.append(found[-1][chosen].clone())
            hidden = model.model.layers[layer].output[0]
            change = (scale * found[:, chosen] + add - found[:, chosen]) @ decoder[chosen]
            hidden[:] = (hidden.float() + change).to(hidden.dtype)
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def conditional(model, tracer, live, pairs, vector, above, release):
    """`When` a probe is above a threshold, until it is at another one: a `Steer` of the last position behind it."""
    scores, seen, after = [[].save() for _ in range(3)]
    held = [False] * len(pairs)
    for _ in tracer.iter[:]:
        for number, (read, write) in enumerate(pairs):
            score = float(model.residual(read).output[-1].float() @ vector)
            held[number] = score > above or (held[number] and score > release)
            scores.append(score)
            seen.append(score if held[number] else float("nan"))
            if held[number]:
                hidden = model.model.layers[write].output[0]
                hidden[-1] = (hidden[-1].float() + 2 * vector).to(hidden.dtype)
        after.append(model.residual(7).output.clone())


@tracewire.intervention
def at_tokens(model, tracer, live, layers, vector, prompt, ids, pattern, start, stop, every):
    """`When` on a pattern of ids, and on a range of the tokens' indices: a `Steer` of the last position."""
    after = [].save()
    index = 0
    for _ in tracer.iter[:]:
        written = ids[:index]
        holds = (
            (prompt + written)[-len(pattern) :] == pattern,
            start <= index < stop and (index - start) % every == 0,
        )
        for layer in layers:
            hidden = model.model.layers[layer].output[0]
            for held in holds:
                if held:
                    hidden[-1] = (hidden[-1].float() + 3 * vector).to(hidden.dtype)
        after.append(model.residual(7).output.clone())
        index += 1


@tracewire.intervention
def held(model, tracer, live, layers, vector, target, most, gain):
    """`Hold`: exact at the early layer; a controller at the late one, by the value of the step before."""
    exact, controlled, after = [[].save() for _ in range(3)]
    early, late = layers
    strength, before = 0.0, None
    for _ in tracer.iter[:]:
        now = model.residual(early).output[-1].float() @ vector
        amount = ((target - now) / (vector @ vector)).clamp(-most, most)
        hidden = model.model.layers[early].output[0]
        hidden[-1] = (hidden[-1].float() + amount * vector).to(hidden.dtype)
        hidden = model.model.layers[late].output[0]
        if before is not None:
            strength = min(max(strength + gain * (target - before), -most), most)
        hidden[-1] = (hidden[-1].float() + strength * vector).to(hidden.dtype)
        stream = model.residual(7).output
        before = float(stream[-1].float() @ vector)
        exact.append(float(amount))
        controlled.append(strength)
        after.append(stream.clone())


@tracewire.intervention
def stops(model, tracer, live, layer, vector, above):
    """`StopWhen`: at the first token whose probe is above a number."""
    scores = [].save()
    for _ in tracer.iter[:]:
        scores.append(float(model.residual(layer).output[-1].float() @ vector))
        if scores[-1] > above:
            tracer.stop()
