"""Saves are read by an output, in the evaluation's process and from a log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelOutput

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client
from tracewire.inspect.provider import TracewireAPI

ARRAY = np.arange(64, dtype=np.float32)


async def saving(stage: Stage) -> None:
    """Two choices, each with a large array of its own."""
    await stage.accept()
    for choice in range(stage.submission.invokes[0].sampling.get("n", 1)):
        ref = await stage.store(ARRAY + choice)
        await stage.save("a", {"rows": ref, "norm": 1.0 + choice}, choice=choice, finish_reason="stop")
    await stage.final()


@pytest.fixture
def generated(engine: Callable[..., Any], redis_url: str, prefix: str) -> Callable[..., Any]:
    """A provider, and an output of it with two choices."""

    @asynccontextmanager
    async def generating() -> AsyncIterator[tuple[TracewireAPI, ModelOutput]]:
        provider = TracewireAPI("tiny", url=redis_url, prefix=prefix)
        async with engine(saving):
            output, _ = await provider.generate(
                [ChatMessageUser(content="x")], [], "auto", GenerateConfig(num_choices=2)
            )
            yield provider, output
            await provider.aclose()

    return generating


async def test_a_scorer_reads_the_arrays(generated: Callable[..., Any]) -> None:
    async with generated() as (_, output):
        assert output.metadata["saves"] == {"norm": [1.0], "rows": {"dtype": "float32", "shape": [1, 64]}}
        found = await tracewire.inspect.saves(output)
        assert np.array_equal(found["rows"][0], ARRAY)
        assert np.array_equal((await tracewire.inspect.saves(output, choice=1)).to_numpy("rows"), [ARRAY + 1])
        with pytest.raises(tracewire.InvalidRequestError, match=r"choice: expected less than 2, .* got 2"):
            await tracewire.inspect.saves(output, choice=2)


async def test_a_reader_of_the_log_reads_the_arrays(generated: Callable[..., Any], client: Client) -> None:
    async with generated() as (provider, output):
        logged = ModelOutput.model_validate_json(output.model_dump_json())
    del provider
    # No provider of this process has the bus: the output names it.
    assert np.array_equal((await tracewire.inspect.saves(logged))["rows"][0], ARRAY)
    assert np.array_equal((await tracewire.inspect.saves(logged, client=client))["rows"][0], ARRAY)
    hidden = logged.model_copy(update={"metadata": {**logged.metadata, "url": "redis://me:***@localhost:1"}})
    assert np.array_equal((await tracewire.inspect.saves(hidden, url=client.url))["rows"][0], ARRAY)
    with pytest.raises(tracewire.InvalidUrl, match=r"url: expected the URL of redis://me:\*\*\*@localhost:1 with"):
        await tracewire.inspect.saves(hidden)


async def test_an_output_of_another_provider_is_refused() -> None:
    with pytest.raises(tracewire.InvalidRequestError, match="output: expected one of a model tracewire/"):
        await tracewire.inspect.saves(ModelOutput.from_content("mockllm/model", "x"))
