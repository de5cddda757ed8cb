"""An engine that is told to leave ends the requests of plain clients as it does traces, and tells what edits left."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import anyio.to_thread
import openai
import pytest

import tracewire
from tests.support.blocks import edits as blocks
from tests.support.engine_process import running_engine
from tracewire_bus.transport.embedded import EmbeddedServer

pytestmark = pytest.mark.full

TOKENS = 400


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("told", ["by a signal", "on the bus"])
async def test_a_leaving_engine_lets_plain_requests_end(told: str, tmp_path: Path) -> None:
    async with EmbeddedServer.start() as server, tracewire.connect(server.url) as client:
        # Edits that stand there when an engine starts.
        edits = client.edits("demo")
        await edits.install("seen", blocks.watch, timeout=0)
        await edits.install("broken", blocks.mistaken, timeout=0)
        with running_engine(server.url, tmp_path, "--openai", "127.0.0.1:0", "--drain", "60") as engine:
            await client.models.get("demo", timeout=60)
            (info,) = await client._session.open_bus().registry.list()
            assert set(info.edit_errors) == {"broken"}
            assert [edit.engines for edit in await edits.list()] == [(info.engine,), ()]
            async with (
                openai.AsyncOpenAI(base_url=info.openai, api_key="none", max_retries=0) as api,
                edits.watch("seen") as watch,
            ):
                sampling = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
                stream = await api.completions.create(model="demo", prompt="x = ", stream=True, **sampling)
                chunks = aiter(stream)
                reasons = [(await anext(chunks)).choices[0].finish_reason]
                if told == "by a signal":
                    engine.process.send_signal(signal.SIGTERM)
                else:
                    await client.engines.drain(info.engine)
                while (await client._session.open_bus().registry.list())[0].state != "draining":
                    await anyio.lowlevel.checkpoint()
                with pytest.raises(openai.APIConnectionError):
                    async with openai.AsyncOpenAI(base_url=info.openai, api_key="none", max_retries=0) as late:
                        await late.completions.create(model="demo", prompt="x = ", **sampling)
                reasons += [chunk.choices[0].finish_reason async for chunk in chunks]
                assert reasons[-1] == "length"
                item = await anext(watch)
                assert len(item.saves["hidden"]) == item.tokens == TOKENS
            assert await anyio.to_thread.run_sync(engine.process.wait, 60) == 0
