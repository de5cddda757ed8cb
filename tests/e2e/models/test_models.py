"""Other models than the demo's: another tree, experts, sliding windows. Tiny, with random weights.

Each test starts an engine of its own, and compares what it reads with the same checkpoint in transformers.
"""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.checkpoints import DTYPES, LAYERS, make_checkpoint
from tests.support.engine_inside import engine_inside, forgotten
from tracewire import LogitLens, Probe, Steer

pytestmark = pytest.mark.full

PROMPT = [(7 * place + place * place) % 4000 + 1 for place in range(40)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: By kind, a module of layer 1 whose output is `[tokens, hidden]`, to read and to write.
INNER = {
    "gpt2": "transformer.h.1.mlp",
    "opt": "model.decoder.layers.1.self_attn.out_proj",
    "gemma3": "model.layers.1.mlp",
    "mixtral": "model.layers.1.block_sparse_moe",
    "qwen3_moe": "model.layers.1.mlp",
    "cohere": "model.layers.1.mlp",
    "stablelm": "model.layers.1.mlp",
    "mamba2": "backbone.layers.1.mixer",
    "falcon_h1": "model.layers.1.mamba.mamba",
    "granitemoehybrid": "model.layers.0.mamba",
    "nemotron_h": "model.layers.0.mixer",
    "qwen3_next": "model.layers.0.linear_attn",
}


@tracewire.intervention
def reads(model, tracer, live, layers):
    """The residual stream after each layer at all positions, the logits and the samples, step by step."""
    streams = [].save()
    logits = [].save()
    sampled = [].save()
    for step in tracer.iter[:]:
        streams.append([model.residual(layer).output.clone() for layer in range(layers)])
        logits.append(model.logits[0].float().clone())
        sampled.append(int(model.samples))


@tracewire.intervention
def replaces(model, tracer, live, layer):
    """The stream is replaced; what the next layer hands on shows it."""
    before = model.residual(layer).output.save()
    model.residual(layer).output = -2 * before
    after = model.residual(layer).output.save()
    end = model.residual(-1).output.save()
    logits = model.logits[0].float().clone().save()


@tracewire.intervention
def zeroes(model, tracer, live, path):
    """A module's output, read and then replaced."""
    module = model
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    first = module.output
    read = (first[0] if isinstance(first, tuple) else first).clone().save()
    module.output = (first[0] * 0, *first[1:]) if isinstance(first, tuple) else first * 0
    logits = model.logits[0].float().clone().save()


def reference(path: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """What transformers computes of the prompt: the stream after each layer but the last, and the last logits."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False)
    # Behind the embeddings, which are not among Mamba's.
    first = 0 if model.config.model_type == "mamba2" else 1
    streams = [hidden[0].numpy() for hidden in output.hidden_states[first : first + LAYERS - 1]]
    return streams, output.logits[0, -1].numpy()


def close(one: Any, other: Any, tolerance: float = 2e-3) -> bool:
    """Whether they are equal but for rounding."""
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    assert one.shape == other.shape, (one.shape, other.shape)
    return bool(np.abs(one - other).max() <= tolerance * np.abs(other).max())


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("kind", list(INNER))
async def test_a_model_of_another_kind(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    await check_reads_and_writes(kind, path, path, inner=INNER[kind], dtype=DTYPES.get(kind, "float32"))


async def check_reads_and_writes(name: str, path: Path, compared: Path, *, inner: str, dtype: str) -> None:
    """Blocks and declared interventions on an engine of `path` read and write as transformers does on `compared`."""
    streams, logits = reference(compared)
    options = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": 8}
    async with engine_inside(model=path, name=name, **options) as (engine, url), tracewire.connect(url) as client:
        model = await client.models.get(name, timeout=30)
        assert model.info.layer_count == LAYERS

        def near(one: Any, other: Any, least: float = 0.0) -> bool:
            # In bfloat16, transformers itself is up to 0.045 off what it computes in float32.
            return close(one, other, max(least, 2e-3 if dtype == "float32" else 0.1))

        async def run(block: Any = None, prompt: Any = PROMPT, count: int = 6, **options: Any) -> Any:
            async with client.trace(model, prompt, block, max_tokens=count, **{**GREEDY, **options}) as trace:
                return await trace.result()

        plain = await run()
        # Reads, in the first step as transformers has them.
        traced = await run(reads(layers=LAYERS))
        assert traced.token_ids == plain.token_ids == traced.saves["sampled"]
        first = traced.saves["streams"][0]
        for layer, stream in enumerate(streams):
            assert near(first[layer], stream), f"residual({layer})"
        assert near(traced.saves["logits"][0], logits)
        assert [len(step[0]) for step in traced.saves["streams"]] == [len(PROMPT)] + [1] * 5
        # Writes.
        written = await run(replaces(layer=1), count=1)
        assert np.array_equal(written.saves["after"], -2 * written.saves["before"])
        assert near(written.saves["before"], streams[1])
        assert not near(written.saves["logits"], logits)
        empty = await run(zeroes(path=inner), count=1)
        assert empty.saves["read"].shape == (len(PROMPT), model.info.hidden_size)
        assert not near(empty.saves["logits"], logits)
        # Declared interventions: the probe reads what the block read, the lens at the end has the logits.
        probes = [Probe("all", "residual(2)", positions="all"), LogitLens("lens", "residual(-1)", top_k=3)]
        declared = await run(interventions=probes)
        for step, value in enumerate(declared.saves["all"]):
            assert near(value, traced.saves["streams"][step][2])
        for step, entry in enumerate(declared.saves["lens"]):
            assert int(np.asarray(entry["token_ids"]).reshape(-1)[0]) == plain.token_ids[step]
        vector = np.zeros(model.info.hidden_size, np.float32)
        vector[0] = 1.0
        steer = [Steer("residual(1)", vector, scale=50.0), Probe("there", "residual(1)", positions="all")]
        steered = await run(interventions=steer)
        moved = np.asarray(steered.saves["there"][0]) - np.asarray(first[1])
        assert near(moved[:, 0], np.full(len(PROMPT), 50.0), 1e-2)
        assert steered.token_ids != plain.token_ids
        # Together, with a prompt that is plain: each is what it is alone.
        results: dict[str, Any] = {}

        async def one(name: str, *arguments: Any, **options: Any) -> None:
            results[name] = await run(*arguments, **options)

        async with anyio.create_task_group() as group:
            group.start_soon(one, "plain")
            group.start_soon(one, "reads", reads(layers=LAYERS))
            group.start_soon(one, "zeroes", zeroes(path=inner))
            group.start_soon(one, "short", reads(layers=LAYERS), PROMPT[:7])
        assert results["plain"].token_ids == results["reads"].token_ids == plain.token_ids
        assert near(results["reads"].saves["streams"][0], first)
        assert near(results["zeroes"].saves["logits"], empty.saves["logits"])
        assert len(results["short"].saves["streams"][0][0]) == 7
        await forgotten(engine)
