"""What only a GPU shows of blocks that write in hosts: a stream waits for them (`worker/block_host/stream_visits.py`).

    python -m tests.gpu_visits --model FOLDER [--layer 3] [--model-runner second]

Starts an engine whose blocks run in hosts, with CUDA graphs and taps at all layers, and then the same with blocks in
the worker, with dummy weights. Prints one JSON object: by block, `apart`, the greatest relative difference of what both
saved, and `tokens`, whether both generated the same; `visits_ms`, the processor time that the thread which asks hosts
while the stream waits took for the blocks, before and after some failed; and `errors`, what became of blocks that fail,
and that never end, among others.

Exits with 1 if values are apart, tokens or errors differ from what they should be, or a stream did not wait.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil

import tracewire
from tests.gpu_later_kinds import parsed
from tests.gpu_taps import GREEDY, PROMPTS, figures_of
from tests.support.engine_inside import engine_inside

STEPS = 24


@tracewire.intervention
def in_place(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        hidden = model.model.layers[layer].output[0]
        hidden[:] *= 1.05
        found.append(hidden[-1].float().clone())


@tracewire.intervention
def assigned(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        hidden, residual = model.model.layers[layer].output
        model.model.layers[layer].output = (hidden * 1.1, residual + 0.01)
        found.append(model.logits[0, :16].float().clone())


@tracewire.intervention
def stream(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        model.residual(layer).output *= 1.02
        found.append(model.residual(layer + 1).output[-1].float().clone())


@tracewire.intervention
def late(model, tracer, live, layer):
    found = [].save()
    for step in tracer.iter[:]:
        if step > 4:
            model.logits[:, 7] += 2.0
        found.append(model.samples.clone())


@tracewire.intervention
def adds(model, tracer, live, layer, vector):
    found = [].save()
    for _ in tracer.iter[:]:
        hidden = model.model.layers[layer].output[0]
        hidden += vector.to(hidden.dtype) * 0.5
        found.append(hidden[-1].float().clone())


@tracewire.intervention
def directed(model, tracer, live, layer, vector):
    found = [].save()
    unit = vector / vector.norm()
    for _ in tracer.iter[2:9]:
        stream = model.residual(layer).output
        stream[:] = stream - (stream.float() @ unit)[:, None] * unit
        found.append(model.residual(layer + 1).output[-1].float().clone())


@tracewire.intervention
def decides(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        hidden = model.model.layers[layer].output[0]
        if hidden[-1, 0] < 1e9:
            hidden[:] *= 1.05
        found.append(hidden[-1].float().clone())


@tracewire.intervention
def only_reads(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        found.append(model.model.layers[layer].output[0][-1].float().clone())


@tracewire.intervention
def fails(model, tracer, live, layer):
    for step in tracer.iter[:]:
        model.model.layers[layer].output[0][:] *= 1.0
        1 / (step - 3)


@tracewire.intervention
def never_ends(model, tracer, live, layer):
    for step in tracer.iter[:]:
        model.model.layers[layer].output[0][:] *= 1.0
        if step == 5:
            for number in range(10**12):
                number + 1


BLOCKS = {one.__name__: one for one in (in_place, assigned, stream, late, only_reads, adds, directed, decides)}
#: Those with a vector. What they write the worker does, as for `in_place` and `stream`: no stream waits for them.
VECTOR = {"adds", "directed"}
BROKEN = {"fails": fails, "never_ends": never_ends}


def visits_ms() -> float:
    """The processor time of threads that ask hosts while a stream waits, of the processes below this one."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{process.pid}/task").glob("*"):
            if (thread / "comm").read_text().startswith("tw-visits"):
                found += int((thread / "schedstat").read_text().split()[0]) / 1e6
    return found


async def on(options: Any, blocks: str) -> dict[str, Any]:
    """What blocks come to on an engine, several traces of each at once, and the errors of broken ones beside them."""
    given: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "gpu_memory_utilization": 0.1}
    given |= {"kv_cache_memory_bytes": 2 << 30, "model_runner": options.model_runner, "blocks": blocks}
    if options.model is not None:
        given["load_format"] = "dummy"
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    inside = engine_inside(model=options.model, check_collect=False, taps=["model.layers.*.output"], **given)
    async with inside as (_, url), tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=60)
        vector = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32)

        async def one(key: str, block: Any, place: int) -> None:
            more = {"vector": vector + place} if block.name in VECTOR else {}
            work = block(layer=options.layer, **more)
            try:
                async with client.trace(model, PROMPTS[place], block=work, max_tokens=STEPS, **GREEDY) as trace:
                    results[key] = await trace.result()
            except tracewire.TraceFailed as error:
                errors[key] = error.type

        async def all_of(named: dict[str, Any]) -> None:
            async with anyio.create_task_group() as group:
                for name, block in named.items():
                    for place in range(4):
                        group.start_soon(one, f"{name}-{place}", block, place)

        async def time_of(named: dict[str, Any]) -> float:
            # A thread that waits for nothing takes no time.
            before = visits_ms()
            await all_of(named)
            return visits_ms() - before

        await time_of({"only_reads": only_reads})
        spent = [await time_of(BLOCKS)]
        calm = dict(results)
        await all_of({**BLOCKS, **BROKEN})
        beside = {key: results[key] for key in calm}
        spent.append(await time_of(BLOCKS))
    return {"results": calm, "errors": errors, "visits_ms": spent, "beside": beside}


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """By block, whether traces have the same tokens, and how far their saves are apart."""
    found: dict[str, Any] = {}
    for key, one in ours.items():
        other, name = theirs[key], key.rpartition("-")[0]
        mine, its = (np.asarray(list(map(np.asarray, of.saves["found"])), np.float64) for of in (one, other))
        figures = found.setdefault(name, {"apart": 0.0, "tokens": True})
        figures["tokens"] &= list(one.token_ids) == list(other.token_ids)
        figures["apart"] = max(figures["apart"], float(np.abs(mine - its).max() / (np.abs(its).max() + 1e-9)))
    return found


async def run(options: Any) -> dict[str, Any]:
    """All of it, one engine after the other."""
    hosts = await on(options, "host")
    inline = await on(options, "inline")
    return {
        "blocks": apart(hosts["results"], inline["results"]),
        "beside": apart(hosts["beside"], inline["results"]),
        "visits_ms": hosts["visits_ms"],
        "errors": hosts["errors"],
    }


def main() -> int:
    """Print the figures; whether they are as they should be."""
    figures = figures_of(run, parsed(__doc__))
    print(json.dumps(figures))
    good = all(one["tokens"] and one["apart"] < 0.02 for one in figures["blocks"].values())
    broken = sorted(figures["errors"]) == [f"{name}-{place}" for name in sorted(BROKEN) for place in range(4)]
    return 0 if good and broken and min(figures["visits_ms"]) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
