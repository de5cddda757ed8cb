"""So many traces on one engine, half of them cancelled at random moments, and what is left inside."""

# mypy: ignore-errors

from __future__ import annotations

import random

import anyio
import numpy as np

import tracewire

__all__ = ["cancelled_among_many"]

TOKENS = 128


@tracewire.intervention
def watch(model, tracer, live):
    norms = [].save()
    for step in tracer.iter[:]:
        live.alpha
        norms.append(float(model.residual(2).output[-1].float().norm()))


def submission(client, model, number):
    """One of several kinds: blocks, declared interventions, both with live parameters, and plain requests."""
    prompt = [1 + (7 * number + 3 * index) % 200 for index in range(8 + number % 5)]
    vector = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32)
    what = [
        {"block": watch, "live": {"alpha": 1.0}},
        {"interventions": [tracewire.Probe("norm", "residual(2)", reduce="norm")]},
        {
            "interventions": [tracewire.Steer("residual(2)", vector, scale=tracewire.Live("alpha"))],
            "live": {"alpha": 0.01},
        },
        {},
    ][number % 4]
    return client.trace(model, prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **what)


async def everything(url, count, cancelled):
    """All traces at once; those in `cancelled` are cancelled after so many tokens. Token ids, statuses, finals."""
    tokens, statuses, finals = {}, {}, {}
    async with tracewire.connect(url) as client, tracewire.connect(url, name="canceller") as other:
        model = await client.models.get("demo", timeout=30)

        async def one(number):
            async with submission(client, model, number) as trace:
                seen = 0
                try:
                    if cancelled.get(number) == 0:
                        await other.cancel(trace.id, "at once")
                    async for output in trace:
                        seen += len(getattr(output, "token_ids", ()))
                        if number in cancelled and seen >= cancelled[number]:
                            await other.cancel(trace.id, "enough")
                    result = await trace.result()
                except tracewire.TraceFailed as error:
                    result = error.result
                tokens[number], statuses[number] = result.token_ids, trace.status
                events = [event async for event in other.subscribe(trace.id)]
                finals[number] = sum(isinstance(event, tracewire.Final) for event in events)

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(one, number)
    return tokens, statuses, finals


async def cancelled_among_many(url, engine, adapter, count):
    """Undisturbed, then with cancels, on one engine."""
    figures = {}
    undisturbed, _, _ = await everything(url, count, {})
    generator = random.Random(1)
    cancelled = {number: generator.randrange(20) for number in generator.sample(range(count), count // 2)}
    tokens, statuses, finals = await everything(url, count, cancelled)
    figures["finals"] = sorted(set(finals.values()))
    figures["cancelled"] = sum(statuses[number] == "cancelled" for number in cancelled)
    figures["finished"] = sum(statuses[number] == "finished" for number in statuses if number not in cancelled)
    figures["differ"] = [
        number for number in tokens if number not in cancelled and tokens[number] != undisturbed[number]
    ]
    figures["prefixes"] = sum(tokens[number] == undisturbed[number][: len(tokens[number])] for number in cancelled)
    # What was steered is forgotten by a call that nobody waits for.
    while adapter.busy:  # noqa: ASYNC110
        await anyio.sleep(0.01)
    figures["tracked"] = await engine.tracked()
    # vLLM agrees to this only if no block is in use.
    figures["kv_free"] = await engine.llm.reset_prefix_cache()
    return figures
