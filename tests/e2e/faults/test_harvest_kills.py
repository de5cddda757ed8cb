"""A harvest of vLLM while its client, vLLM, the adapter and Redis are killed: each prompt is in the result once."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import numpy as np
import psutil
import pytest

import tracewire
from tests.support import ROOT
from tests.support.command_lines import with_words
from tests.support.engine_process import EngineProcess, running_engine
from tests.support.redis.durable import server
from tracewire import Probe

PROMPTS = [f"def function_{index}(first, second={index}):" for index in range(300)]
#: What is killed once so many prompts are in shards.
KILLS = {30: "client", 90: "EngineCore", 150: "redis", 210: "adapter", 260: "client"}
PATIENCE = 300


async def started_client(url: str, data: Path, to: Path) -> anyio.abc.Process:
    options = ("--read", "hs=residual(*)", "--concurrency", "8", "--shard-prompts", "15", "--max-attempts", "20")
    command = (sys.executable, "-m", "tracewire.cli", "harvest", "demo", str(data), "--url", url, "--to", str(to))
    return await anyio.open_process([*command, *options], cwd=ROOT, stdout=None, stderr=None)


def victim(engine: EngineProcess, kind: str) -> psutil.Process:
    if kind == "adapter":
        (adapter,) = psutil.Process(engine.process.pid).children()
        return adapter
    (found, *_) = with_words(engine.descendants(), kind)
    return found


def keys_of(to: Path) -> list[int]:
    entries = [json.loads(path.read_text()) for path in to.glob("journal/*.json")]
    return [key for entry in entries for key in entry.get("prompts", [])]


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
async def test_each_prompt_is_harvested_once_whatever_is_killed(tmp_path: Path) -> None:
    data, to = tmp_path / "prompts.jsonl", tmp_path / "acts"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    async with server(tmp_path / "redis", appendfsync="always") as redis:
        with running_engine(redis.url, tmp_path, "--drain", "0.1") as engine:
            client = await started_client(redis.url, data, to)
            try:
                due = dict(KILLS)
                with anyio.fail_after(PATIENCE):
                    while client.returncode is None:
                        done = len(keys_of(to))
                        if due and done >= min(due):
                            what = due.pop(min(due))
                            print(f"{done} prompts are in shards: {what} is killed")
                            if what == "client":
                                with suppress(ProcessLookupError):
                                    # It may have ended just now, and is run once more then.
                                    client.kill()
                                await client.wait()
                                client = await started_client(redis.url, data, to)
                            elif what == "redis":
                                redis.kill()
                                await redis.start()
                            else:
                                victim(engine, what).kill()
                        await anyio.sleep(0.02)
                assert client.returncode == 0
                assert due == {}
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
            harvested = tracewire.harvest.open(to, exact=True)
            assert harvested.failed == {}
            assert Counter(keys_of(to)) == Counter(range(len(PROMPTS)))
            async with tracewire.connect(redis.url) as connected:
                model = await connected.models.get("demo", timeout=PATIENCE)
                probe = Probe("hs", "residual(*)", positions="all")
                for key in (0, 123, 299):
                    trace = connected.trace(model, PROMPTS[key], interventions=[probe], max_tokens=1)
                    (whole,) = await (await trace.result()).load("hs", exact=True)
                    for layer in range(model.info.layer_count):
                        mine = harvested[key][f"hs.{layer}"].astype("float32")
                        np.testing.assert_allclose(mine, whole[:, layer].astype("float32"), rtol=0.05, atol=0.05)
