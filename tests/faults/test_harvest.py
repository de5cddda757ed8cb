"""A harvest while its client, the engine and Redis are killed again and again: each prompt is in the result once.

The engine is the scripted one, behind the adapter's own intake: its tokens and values follow from the prompt, so that
the result can be compared. `tests/e2e/faults/test_harvest_kills.py` does the same to vLLM.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import anyio
import anyio.abc
import pytest

import tracewire
from tests.faults.harness.processes import Child, Nursery, RedisServer, nursery
from tests.support import ROOT, scripted_engine
from tests.support.scripted_engine import expected

TOKENS = 2
ENGINE = (
    "--model",
    "tiny",
    "--rate",
    "200",
    "--lease",
    "1",
    "--patience",
    "1",
    "--certain",
    "1.2",
    "--retain-traces",
    "500",
)


async def start_client(url: str, data: Path, to: Path) -> anyio.abc.Process:
    command = (
        *(sys.executable, "-m", "tracewire.cli", "harvest", "tiny", str(data), "--url", url, "--to", str(to)),
        *("--block", f"{scripted_engine.__file__}:acts", "--max-tokens", str(TOKENS), "--max-attempts", "100"),
        *("--concurrency", "64", "--shard-prompts", "250"),
    )
    return await anyio.open_process(command, cwd=ROOT, stdout=None, stderr=None)


class Victims:
    """A client, an engine and Redis, each of which is started again when it was killed."""

    def __init__(self, births: Nursery, redis: RedisServer, data: Path, to: Path) -> None:
        self.births, self.redis, self.data, self.to = births, redis, data, to
        self.killed: Counter[str] = Counter()
        self.client: anyio.abc.Process
        self.engine: Child

    async def start(self) -> None:
        await self.redis.start()
        await self.start_engine()
        async with tracewire.connect(self.redis.url) as client:
            # A harvest that has not begun waits for no engine.
            await client.models.get("tiny", timeout=60)
        self.client = await start_client(self.redis.url, self.data, self.to)

    async def start_engine(self) -> None:
        self.engine = await self.births.start("engine", "--url", self.redis.url, *ENGINE)

    async def kill(self, what: str) -> None:
        self.killed[what] += 1
        if what == "client":
            with suppress(ProcessLookupError):
                # It may have ended just now, and is run once more then.
                self.client.kill()
            await self.client.wait()
            self.client = await start_client(self.redis.url, self.data, self.to)
        elif what == "engine":
            await self.engine.kill()
            await self.start_engine()
        else:
            self.redis.kill()
            await self.redis.start()
            if self.engine.ended.is_set():
                # It had just begun, and found no Redis.
                await self.start_engine()


def committed(to: Path) -> int:
    return sum(len(json.loads(entry.read_text())["prompts"]) for entry in to.glob("journal/*.json"))


async def harvest_while_killing(folder: Path, prompts: int, every: int, seed: int) -> Counter[str]:
    """Kill something whenever about `every` more prompts are in shards, until the command says that it is done."""
    random = Random(seed)
    data, to = folder / "prompts.jsonl", folder / "acts"
    data.write_text("".join(json.dumps({"prompt": f"prompt {index}"}) + "\n" for index in range(prompts)))
    redis = RedisServer(folder, appendonly="yes", appendfsync="always")
    async with nursery(folder) as births:
        victims = Victims(births, redis, data, to)
        try:
            await victims.start()
            due, order = every // 2, ["client", "engine", "redis"]
            while victims.client.returncode is None:
                if committed(to) >= due:
                    # In the middle of whatever goes on then.
                    await anyio.sleep(random.uniform(0, 0.5))
                    await victims.kill(order[sum(victims.killed.values()) % 3])
                    due = committed(to) + random.randrange(every // 2, every)
                if victims.engine.ended.is_set():
                    await victims.start_engine()
                await anyio.sleep(0.02)
            assert victims.client.returncode == 0
        finally:
            with anyio.CancelScope(shield=True):
                if getattr(victims, "client", None) is not None and victims.client.returncode is None:
                    victims.client.kill()
                    await victims.client.wait()
                await redis.aclose()
    return victims.killed


def check(to: Path, prompts: int) -> None:
    """Each prompt is in one shard, with the values that it asks for, and nothing else lies there."""
    harvested = tracewire.harvest.open(to)
    assert harvested.failed == {}
    entries = [json.loads(path.read_text()) for path in sorted(to.glob("journal/*"))]
    in_shards = Counter(key for entry in entries for key in entry.get("prompts", []))
    assert in_shards == Counter(range(prompts))
    for prompt in harvested:
        tokens, values = expected(f"prompt {prompt.key}", TOKENS)
        assert prompt.token_ids == tokens
        assert prompt["acts"].tolist() == values
    listed = {file["name"] for entry in entries for file in entry["files"]}
    assert {f"shards/{path.name}" for path in to.glob("shards/*")} == listed


async def test_a_harvest_that_is_killed_has_each_prompt_once(tmp_path: Path) -> None:
    killed = await harvest_while_killing(tmp_path, prompts=2000, every=500, seed=1)
    check(tmp_path / "acts", 2000)
    assert min(killed[what] for what in ("client", "engine", "redis")) >= 1, killed


@pytest.mark.full
async def test_a_harvest_of_10000_prompts_that_is_killed_has_each_prompt_once(tmp_path: Path) -> None:
    killed = await harvest_while_killing(tmp_path, prompts=10_000, every=600, seed=2)
    check(tmp_path / "acts", 10_000)
    print(f"10000 prompts, each once; killed: {dict(killed)}")
    assert min(killed[what] for what in ("client", "engine", "redis")) >= 3, killed
