"""Runs of a harvest against a scripted engine: each prompt once, whatever ends a run, and errors where they belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tests.support.harvests import numbered, reads, s3_server, values_of
from tests.support.until import until
from tracewire import Client, HarvestProgress, Probe
from tracewire.harvest.stores import Store
from tracewire_bus.wire.messages import Failure

PROBE = Probe("hs", "residual(*)", positions="all")
PROMPTS = [f"prompt {index}" for index in range(40)]


def check(to: Any, prompts: list[str], **options: Any) -> tracewire.harvest.Harvested:
    """Each prompt is in the harvest once, with what the engine reads of it."""
    harvested = tracewire.harvest.open(to, **options)
    assert sorted(harvested.keys()) == list(range(len(prompts)))
    for prompt in harvested:
        whole = values_of(prompts[prompt.key])
        for layer in range(4):
            np.testing.assert_array_equal(prompt[f"hs.{layer}"], whole[:, layer])
    return harvested


def keys_of(to: Path) -> list[int]:
    entries = [json.loads(path.read_text()) for path in to.glob("journal/*.json")]
    return sorted(key for entry in entries for key in entry.get("prompts", []))


async def test_each_prompt_is_harvested_once(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    seen: list[HarvestProgress] = []
    async with engine(reads) as serving:
        done = await client.harvest(
            "tiny", PROMPTS, [PROBE], to=tmp_path / "acts", shard_prompts=15, concurrency=8, progress=seen.append
        )
        assert (done.prompts, done.failed, done.skipped, done.total, done.shards) == (40, 0, 0, 40, 3)
        assert done.bytes == sum(values_of(prompt).nbytes for prompt in PROMPTS)
        assert done.tokens == sum(len(prompt) + 1 for prompt in PROMPTS)
        assert done.tokens_per_second == done.tokens / done.seconds
        assert done.bytes_per_second == done.bytes / done.seconds
        assert seen[-1] == done
        assert [one.prompts + one.failed for one in seen] == sorted(one.prompts + one.failed for one in seen)
        harvested = check(tmp_path / "acts", PROMPTS)
        # Within a shard, prompts stand in the order of the data set.
        assert all(entry.prompts == sorted(entry.prompts) for entry in harvested._entries)
        assert serving.taken[0].invokes[0].sampling["max_tokens"] == 1
        again = await client.harvest("tiny", numbered(40), [PROBE], to=tmp_path / "acts")
        assert (again.prompts, again.skipped) == (0, 40)
        assert len(serving.taken) == 40


async def test_a_run_that_was_ended_is_gone_on_with(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    async with engine(reads) as serving:
        with anyio.CancelScope() as scope:

            def enough(progress: HarvestProgress) -> None:
                if progress.shards == 2:
                    scope.cancel()

            await client.harvest(
                "tiny", PROMPTS, [PROBE], to=tmp_path / "acts", shard_prompts=5, concurrency=4, progress=enough
            )
        before = keys_of(tmp_path / "acts")
        assert 10 <= len(before) < 40
        done = await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts", shard_prompts=5)
        assert (done.skipped, done.prompts) == (len(before), 40 - len(before))
    assert keys_of(tmp_path / "acts") == list(range(40))
    check(tmp_path / "acts", PROMPTS)


async def test_no_more_than_so_many_run_at_once(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    running = most = 0
    full = anyio.Event()

    async def counted(stage: Stage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 6:
            full.set()
        await full.wait()
        running -= 1
        await reads(stage)

    async with engine(counted):
        await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts", concurrency=6)
    assert most == 6


async def test_a_slow_store_holds_up_the_submission(
    client: Client, engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not take the first shard: two shards and the workers' prompts are in memory, and no more."""
    gate = anyio.Event()
    whole = Store.put

    def slow(self: Store, name: str, *pieces: bytes) -> None:
        anyio.from_thread.run(gate.wait)
        whole(self, name, *pieces)

    monkeypatch.setattr(Store, "put", slow)
    async with engine(reads) as serving, anyio.create_task_group() as group:
        run = {"to": tmp_path / "acts", "shard_prompts": 4, "concurrency": 3}
        group.start_soon(lambda: client.harvest("tiny", PROMPTS, [PROBE], **run))
        # One shard is written, one is full, and each worker holds a prompt.
        await until(lambda: len(serving.taken) == 4 + 4 + 3)
        with anyio.move_on_after(0.3):
            await until(lambda: len(serving.taken) > 11)
        assert len(serving.taken) == 11
        gate.set()
    check(tmp_path / "acts", PROMPTS)


async def test_a_prompt_that_fails_is_listed_and_run_again_only_if_asked(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = ["good", "bad one", "fine"]
    async with engine(reads) as serving:
        done = await client.harvest("tiny", prompts, [PROBE], to=tmp_path / "acts")
        assert (done.prompts, done.failed) == (2, 1)
        harvested = tracewire.harvest.open(tmp_path / "acts")
        assert list(harvested.failed) == [1]
        assert "a bad prompt" in harvested.failed[1]
        again = await client.harvest("tiny", prompts, [PROBE], to=tmp_path / "acts")
        assert (again.prompts, again.failed, again.skipped) == (0, 0, 3)
        assert len(serving.taken) == 3
        retried = await client.harvest("tiny", prompts, [PROBE], to=tmp_path / "acts", retry_failed=True)
        assert (retried.prompts, retried.failed, retried.skipped) == (0, 1, 2)

    async def mended(stage: Stage) -> None:
        await stage.accept(prompt_token_ids=[[1]])
        await stage.save("!", {"hs": values_of("x")})
        await stage.final()

    async with engine(mended):
        await client.harvest("tiny", prompts, [PROBE], to=tmp_path / "acts", retry_failed=True)
    harvested = tracewire.harvest.open(tmp_path / "acts")
    assert (sorted(harvested.keys()), harvested.failed) == ([0, 1, 2], {})


async def test_too_many_failures_in_turn_end_the_run(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    async with engine(reads) as serving:
        with pytest.raises(tracewire.InterventionError, match="a bad prompt") as ended:
            await client.harvest(
                "tiny", [f"bad {index}" for index in range(40)], [PROBE], to=tmp_path / "acts", max_failures=10
            )
        assert len(serving.taken) < 40 + 10
    assert "10" in ended.value.__notes__[0]


async def test_what_is_wrong_with_every_prompt_ends_the_run(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    async def refuses(stage: Stage) -> None:
        await stage.final("rejected", Failure(type="ValueError", message="no", field="interventions[0].weight"))

    async with engine(refuses):
        with pytest.raises(tracewire.TraceRejected, match=r"interventions\[0\].weight: no"):
            await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts")
    assert keys_of(tmp_path / "acts") == []


async def test_rows_of_another_shape_cost_their_own_prompt(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    async def odd(stage: Stage) -> None:
        prompt = stage.submission.invokes[0].prompt or ""
        await stage.accept(prompt_token_ids=[[1]])
        await stage.save("!", {"hs": np.zeros((1, 4, 5 if prompt == "odd" else 3), np.float32)})
        await stage.final()

    async with engine(odd):
        done = await client.harvest("tiny", ["a", "odd", "b"], [PROBE], to=tmp_path / "acts", concurrency=1)
    assert (done.prompts, done.failed) == (2, 1)
    assert "NotAnArray" in tracewire.harvest.open(tmp_path / "acts").failed[1]


async def test_a_trace_that_was_lost_is_submitted_again(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    lost: set[str] = set()

    async def loses(stage: Stage) -> None:
        prompt = stage.submission.invokes[0].prompt or ""
        if prompt in lost:
            await reads(stage)
            return
        lost.add(prompt)
        await stage.accept()
        gone = Failure(type="Cancelled", message="cancelled", by="the bus", reason="its submitter has gone")
        await stage.final("cancelled", gone)

    async with engine(loses):
        done = await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts")
    assert (done.prompts, done.failed) == (40, 0)
    check(tmp_path / "acts", PROMPTS)


async def test_a_queue_that_is_full_is_waited_for(client: Client, redis_url: str, prefix: str, tmp_path: Path) -> None:
    info = engine_info(queue_limit=2, capacity=1)
    async with BusEngine.running(redis_url, prefix, reads, info):
        done = await client.harvest("tiny", PROMPTS[:8], [PROBE], to=tmp_path / "acts", concurrency=8, patience=0)
    assert done.prompts == 8


async def test_engines_that_stay_away_end_the_run(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    async with engine(reads):
        await client.harvest("tiny", PROMPTS[:1], [PROBE], to=tmp_path / "acts")
    with pytest.raises(tracewire.UnknownModel):
        await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts", patience=0.2)


async def test_of_two_clients_in_one_place_one_stops(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    to, results = tmp_path / "acts", []

    async def one() -> None:
        try:
            await client.harvest("tiny", PROMPTS, [PROBE], to=to, shard_prompts=5)
        except tracewire.HarvestConflict as error:
            results.append(error)

    async with engine(reads), anyio.create_task_group() as group:
        group.start_soon(one)
        group.start_soon(one)
    assert keys_of(to) == list(range(40))
    (error,) = results
    assert "another client writes to it now" in str(error)
    check(to, PROMPTS)


async def test_another_prompt_under_the_same_key_is_refused(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    async with engine(reads):
        await client.harvest("tiny", PROMPTS[:3], [PROBE], to=tmp_path / "acts")
        with pytest.raises(tracewire.HarvestConflict, match="prompt 1 of the data set is another than was harvested"):
            await client.harvest("tiny", ["prompt 0", "other", "prompt 2"], [PROBE], to=tmp_path / "acts")


@pytest.mark.parametrize("how", ["cut short", "missing"])
async def test_a_damaged_shard_is_named_and_repaired_if_asked(
    client: Client, engine: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    to = tmp_path / "acts"
    async with engine(reads) as serving:
        await client.harvest("tiny", PROMPTS, [PROBE], to=to, shard_prompts=10)
        (path,) = to.glob("shards/000001-*.safetensors")
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(tracewire.ShardDamaged) as damaged:
            await client.harvest("tiny", PROMPTS, [PROBE], to=to)
        assert (damaged.value.file, damaged.value.prompts) == (f"shards/{path.name}", 10)
        assert len(serving.taken) == 40
        done = await client.harvest("tiny", PROMPTS, [PROBE], to=to, repair=True)
        assert (done.prompts, done.skipped) == (10, 30)
    assert not list(to.glob("shards/000001-*"))
    check(to, PROMPTS)


async def test_a_store_that_fails_in_the_middle_disturbs_nothing_else(
    client: Client, engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed stays, nothing of the shard in question does, and another trace of the client goes on."""
    whole, count = Store.put, 0

    def fails(self: Store, name: str, *pieces: bytes) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise tracewire.StoreFull(self.url, name, "OSError: [Errno 28] No space left on device")
        whole(self, name, *pieces)

    monkeypatch.setattr(Store, "put", fails)
    async with engine(reads), client.trace("tiny", "hang on") as other:
        await other.accepted()
        with pytest.raises(tracewire.StoreFull, match=r"has no room for shards/000001-\w+\.index\.parquet"):
            await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts", shard_prompts=10)
        assert other.status is None
        assert len(keys_of(tmp_path / "acts")) == 10
        assert not list((tmp_path / "acts").glob("shards/000001-*"))
        await client.harvest("tiny", PROMPTS, [PROBE], to=tmp_path / "acts")
    check(tmp_path / "acts", PROMPTS)


@pytest.mark.parametrize("readable", [True, False])
async def test_a_shard_whose_entry_was_written_keeps_its_files(
    client: Client, engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """The store loses the answer to an entry. The run goes on if it can read the entry, and removes nothing if not."""
    create, read = Store.create, Store.read
    lost = False

    def loses(self: Store, name: str, data: bytes) -> None:
        nonlocal lost
        create(self, name, data)
        if name == "journal/000001.json":
            lost = True
            raise tracewire.StoreUnavailable(self.url, name, "the answer is lost")

    def reads_back(self: Store, name: str) -> bytes:
        if lost and not readable:
            raise tracewire.StoreUnavailable(self.url, name, "away")
        return read(self, name)

    to, run = tmp_path / "acts", {"shard_prompts": 10}
    async with engine(reads):
        with monkeypatch.context() as patched:
            patched.setattr(Store, "create", loses)
            patched.setattr(Store, "read", reads_back)
            if readable:
                done = await client.harvest("tiny", PROMPTS, [PROBE], to=to, **run)
                assert (done.prompts, done.shards) == (40, 4)
            else:
                with pytest.raises(tracewire.StoreUnavailable, match="the answer is lost"):
                    await client.harvest("tiny", PROMPTS, [PROBE], to=to, **run)
        assert list(to.glob("shards/000001-*"))
        done = await client.harvest("tiny", PROMPTS, [PROBE], to=to, **run)
        assert done.skipped == (40 if readable else 20)
    check(to, PROMPTS)


async def test_a_shard_whose_number_another_client_took_leaves_no_files(
    client: Client, engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, to = Store.create, tmp_path / "acts"

    def late(self: Store, name: str, data: bytes) -> None:
        if name.startswith("journal/"):
            create(self, name, json.dumps({"number": 0, "shard": "000000-another"}).encode())
        create(self, name, data)

    monkeypatch.setattr(Store, "create", late)
    async with engine(reads):
        with pytest.raises(tracewire.HarvestConflict):
            await client.harvest("tiny", PROMPTS, [PROBE], to=to)
    assert not list(to.glob("shards/*"))


async def test_a_harvest_to_s3_whose_server_goes_away(client: Client, engine: Callable[..., Any]) -> None:
    with s3_server() as (process, options):
        async with engine(reads):
            with pytest.raises(tracewire.StoreRefused):
                wrong = {**options, "secret": "wrong"}
                await client.harvest("tiny", PROMPTS, [PROBE], to="s3://acts/run", storage_options=wrong)
            await client.harvest("tiny", PROMPTS, [PROBE], to="s3://acts/run", storage_options=options)
            await anyio.to_thread.run_sync(lambda: check("s3://acts/run", PROMPTS, storage_options=options))

            def end(progress: HarvestProgress) -> None:
                if progress.shards == 1:
                    process.kill()

            with pytest.raises(tracewire.StoreUnavailable, match="s3://acts/more cannot be used for shards/00000"):
                await client.harvest(
                    *("tiny", PROMPTS, [PROBE]),
                    to="s3://acts/more",
                    storage_options=options,
                    progress=end,
                    shard_prompts=10,
                )
