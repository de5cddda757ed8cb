"""Quantized models: blocks and declared interventions read and write what they do on any other.

Each test starts an engine of its own on a tiny Llama with random weights, and compares what it reads with transformers'
model in float32, whose weights are those that the codes stand for.
"""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracewire
from tests.e2e.models.test_models import GREEDY, PROMPT, check_reads_and_writes
from tests.support.engine_inside import engine_inside, forgotten
from tests.support.quantized import METHODS, make_quantized

pytestmark = pytest.mark.full


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("method", METHODS)
async def test_a_quantized_model(method: str, tmp_path: Path) -> None:
    quantized, stood_for = make_quantized(method, tmp_path)
    await check_reads_and_writes(method, quantized, stood_for, inner="model.layers.1.mlp", dtype="bfloat16")


@tracewire.intervention
def calls(model, tracer, live):
    """A quantized module, called on what it was given, gives what it gave."""
    module = model.model.layers[1].mlp.gate_up_proj
    rows = module.input.clone()
    answered = module(rows)
    gave = (module.output[0] if isinstance(module.output, tuple) else module.output).save()
    again = (answered[0] if isinstance(answered, tuple) else answered).save()


@tracewire.intervention
def calls_with(model, tracer, live, width, dtype):
    """A quantized module, called on rows of another width or kind of number."""
    module = model.model.layers[1].mlp.gate_up_proj
    answered = module(torch.ones(8, width, dtype=getattr(torch, dtype)))
    first = (answered[0] if isinstance(answered, tuple) else answered).save()


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("method", METHODS)
async def test_a_block_in_a_host_calls_quantized_modules(method: str, tmp_path: Path) -> None:
    quantized, _ = make_quantized(method, tmp_path)
    options = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 8, "blocks": "host", "check_collect": False}
    async with (
        engine_inside(model=quantized, name=method, **options) as (engine, url),
        tracewire.connect(url) as client,
    ):
        model = await client.models.get(method, timeout=30)

        async def run(block: Any = None) -> Any:
            return await client.trace(model, PROMPT, block, max_tokens=4, **GREEDY).result()

        plain = await run()
        called = await run(calls())
        assert called.saves["gave"].shape == (len(PROMPT), 2 * 128)
        assert np.array_equal(called.saves["again"], called.saves["gave"])
        for width, dtype in ((7, "bfloat16"), (640, "bfloat16"), (64, "float32"), (64, "float64"), (64, "int64")):
            with pytest.raises(tracewire.TraceFailed, match=r"takes rows of 64 numbers of torch\.bfloat16"):
                await run(calls_with(width=width, dtype=dtype))
        assert (await run()).token_ids == plain.token_ids
        await forgotten(engine)
