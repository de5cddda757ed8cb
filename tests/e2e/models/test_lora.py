"""LoRA adapters beside blocks: two on one engine, made on the spot, each in its own requests' forward pass."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.checkpoints import make_lora
from tests.support.engine_process import running_engine
from tracewire import Client, Model, Probe, Prompt, TraceRejected
from tracewire_bus.transport.embedded import EmbeddedServer

pytestmark = pytest.mark.full

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
async def served(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of the Redis of an engine with two adapters."""
    folder = tmp_path_factory.mktemp("lora")
    options = []
    for seed, name in enumerate(("red", "blue")):
        options += ["--lora", f"{name}={make_lora(folder, name, seed)}"]
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, folder, *options, "--max-loras", "2", "--check-collect"):
            yield server.url


@pytest.fixture
async def client(served: str) -> AsyncIterator[Client]:
    async with tracewire.connect(served) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    return await client.models.get("demo", timeout=30)


@tracewire.intervention
def reads(model, tracer, live):
    """What the adapter changes, and what comes of it."""
    projected = model.model.layers[2].self_attn.qkv_proj.output[0].clone().save()
    stream = model.residual(5).output.save()
    logits = model.logits[0].float().clone().save()


@tracewire.intervention
def zeroes(model, tracer, live):
    """An edit on top of the adapter's."""
    model.model.layers[4].output[0][:] = 0
    logits = model.logits[0].float().clone().save()


async def run(client: Client, model: Model, block: Any = None, **options: Any) -> Any:
    async with client.trace(model, PROMPT, block, **{**GREEDY, **options}) as trace:
        return await trace.result()


def differ(one: Any, other: Any) -> bool:
    """Whether they are another adapter's: further apart than rounding goes."""
    return float(np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).max()) > 0.1


async def test_the_registry_names_the_adapters(client: Client, model: Model) -> None:
    assert model.info.loras == ("red", "blue")


async def test_what_is_read_is_adapted(client: Client, model: Model) -> None:
    base, red, blue = [await run(client, model, reads, lora=lora) for lora in (None, "red", "blue")]
    for one, other in ((base, red), (base, blue), (red, blue)):
        for name in ("projected", "stream", "logits"):
            assert one.saves[name].shape == other.saves[name].shape
            assert differ(one.saves[name], other.saves[name]), name
    # Without a block it is the same.
    assert (await run(client, model, lora="red")).token_ids == red.token_ids
    assert (await run(client, model)).token_ids == base.token_ids


async def test_an_edit_lands_on_what_is_adapted(client: Client, model: Model) -> None:
    clean = await run(client, model, reads, lora="red")
    edited = await run(client, model, zeroes, lora="red")
    assert differ(clean.saves["logits"], edited.saves["logits"])


async def test_declared_interventions_read_what_is_adapted(client: Client, model: Model) -> None:
    probe = [Probe("probed", "residual(5)")]
    block = await run(client, model, reads, lora="blue")
    probed = await run(client, model, interventions=probe, lora="blue")
    assert not differ(probed.saves["probed"][0], block.saves["stream"][-1])
    assert differ(probed.saves["probed"][0], (await run(client, model, reads)).saves["stream"][-1])


async def test_adapters_share_a_batch(client: Client, model: Model) -> None:
    alone = [await run(client, model, reads, lora=lora) for lora in (None, "red", "blue")]
    prompts = [Prompt(PROMPT), Prompt(PROMPT, lora="red"), Prompt(PROMPT, lora="blue")]
    async with client.trace(model, prompts=prompts, block=reads, **GREEDY) as trace:
        result = await trace.result()
    for invoke, one in zip(result.invokes, alone, strict=True):
        assert not differ(invoke.choices[0].saves["logits"], one.saves["logits"])
        assert invoke.choices[0].token_ids == one.token_ids


async def test_adapters_share_no_prefix(client: Client, model: Model) -> None:
    prompt = [7 * place % 4000 + 1 for place in range(200)]
    cached = []
    for lora in ("red", "blue", None, "red"):
        async with client.trace(model, prompt, lora=lora, **GREEDY) as trace:
            cached.append((await trace.result()).usage.cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0


async def test_an_adapter_that_is_not_there_is_refused(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match=r"no adapter 'green' \(it has red, blue\)") as caught:
        await run(client, model, lora="green")
    assert caught.value.field == "lora"
    with pytest.raises(TraceRejected, match="expected the name of an adapter"):
        await run(client, model, lora=3)
