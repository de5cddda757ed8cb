"""A harvest's options are checked before anything is written or submitted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracewire
from tests.support.harvests import reads
from tracewire import Client, Probe, Steer
from tracewire.blocking import Client as BlockingClient

PROBE = Probe("hs", "residual(*)", positions="all")


@tracewire.intervention
def block(model, tracer, live):
    acts = [].save()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "zarr"}, "format: expected one of safetensors, parquet, got 'zarr'"),
        ({"every": 0}, "every: expected a positive integer"),
        ({"keep_top": -1}, "keep_top: expected a positive integer"),
        ({"concurrency": 0}, "concurrency: expected a positive integer"),
        ({"dtype": "float99"}, "dtype: expected one of"),
        ({"positions": "all"}, "positions: expected integers or a slice"),
        ({"positions": [1.5]}, "positions: expected integers or a slice"),
        ({"patience": -1}, "patience: expected 0 seconds or more"),
        ({"n": 2}, "sampling.n: a harvest has one sequence a prompt"),
        ({"max_token": 2}, "'max_token' is neither an option nor a sampling param; did you mean 'max_tokens'"),
        ({"progress": 3}, "progress: expected a function"),
        ({"block": block, "every": 2}, "positions and every: expected declared interventions alone"),
    ],
)
async def test_options_that_cannot_be(
    client: Client, engine: Callable[..., Any], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    async with engine(reads) as serving:
        with pytest.raises((TypeError, ValueError), match=message):
            await client.harvest("tiny", ["a"], [PROBE], to=tmp_path / "acts", **options)
    assert serving.taken == []


async def test_a_harvest_of_nothing_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(tracewire.TraceRejected, match="nothing would be saved"):
        await client.harvest("tiny", ["a"], to=tmp_path / "acts")
    assert not (tmp_path / "acts").exists()


async def test_a_model_that_nobody_serves_and_a_layer_that_there_is_not(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(tracewire.UnknownModel):
        await client.harvest("nope", ["a"], [PROBE], to=tmp_path / "acts")
    async with engine(reads):
        with pytest.raises(tracewire.TraceRejected, match=r"interventions\[0\].at"):
            await client.harvest("tiny", ["a"], [Probe("a", "residual(9)")], to=tmp_path / "acts")
    assert not (tmp_path / "acts").exists()


async def test_a_name_of_the_library_is_one_version_in_a_whole_harvest(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    steered = [Steer("residual(1)", "calm"), PROBE]
    await client.library.put("calm", [1.0] * 8)
    async with engine(reads) as serving:
        await client.harvest("tiny", ["a", "b"], steered, to=tmp_path / "acts")
        await client.library.put("calm", [2.0] * 8)
        # What continues a harvest steers by the same vector.
        with pytest.raises(tracewire.HarvestConflict, match="another interventions"):
            await client.harvest("tiny", ["a", "b", "c"], steered, to=tmp_path / "acts")
        first = [Steer("residual(1)", "calm@1"), PROBE]
        await client.harvest("tiny", ["a", "b", "c"], first, to=tmp_path / "acts")
    assert [one.interventions[0].vector[0] for one in serving.taken] == [1, 1, 1]


@pytest.mark.parametrize("missing", ["pyarrow", "safetensors.numpy", "fsspec"])
async def test_a_library_that_is_missing_is_told_of_at_once(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(tracewire.LibraryMissing, match=r"pip install 'tracewire\[harvest\]'"):
        await client.harvest("tiny", ["a"], [PROBE], to=tmp_path / "acts")


async def test_one_place_has_one_harvest(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    async with engine(reads):
        await client.harvest("tiny", ["a"], [PROBE], to=tmp_path / "acts")
        for options in ({"every": 2}, {"max_tokens": 2}, {"dtype": "float16"}, {"format": "parquet"}):
            with pytest.raises(tracewire.HarvestConflict, match="it is a harvest with another"):
                await client.harvest("tiny", ["a"], [PROBE], to=tmp_path / "acts", **options)
        for interventions in ([Probe("hs", "residual(0)")], [PROBE, Probe("more", "residual(0)")]):
            with pytest.raises(tracewire.HarvestConflict, match="another interventions"):
                await client.harvest("tiny", ["a"], interventions, to=tmp_path / "acts")
    head = json.loads((tmp_path / "acts" / "harvest.json").read_text())
    assert (head["model"], head["values"], head["sampling"]) == ("tiny", "safetensors", {"max_tokens": 1})


async def test_what_does_not_change_the_rows_may_differ(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    async with engine(reads) as serving:
        await client.harvest("tiny", ["a"], [PROBE], to=tmp_path / "acts", concurrency=3)
        await client.harvest(
            "tiny", ["a", "b"], [PROBE], to=tmp_path / "acts", shard_prompts=7, priority=3, token_strings=False
        )
    assert [submission.token_strings for submission in serving.taken] == [True, False]
    assert len(tracewire.harvest.open(tmp_path / "acts")) == 2


async def test_the_blocking_client_harvests(
    engine: Callable[..., Any], redis_url: str, prefix: str, tmp_path: Path
) -> None:
    import anyio.to_thread

    def harvest() -> tracewire.HarvestProgress:
        with BlockingClient(redis_url, prefix=prefix) as blocking:
            return blocking.harvest("tiny", ["a", "b"], [PROBE], to=tmp_path / "acts")

    async with engine(reads):
        done = await anyio.to_thread.run_sync(harvest)
    assert done.prompts == 2
