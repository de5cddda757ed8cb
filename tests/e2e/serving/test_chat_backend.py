"""The chat service on a real engine: an answer is bent while it is written, and only from there on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

import tracewire
from examples.chat_backend.settings import Settings
from examples.demo_model.score import CodeScore
from tests.examples.test_chat_backend import Seen, following, opened, said, serving, steered, text
from tests.support import ROOT

#: Prose, which greedy decoding never leaves by itself.
PROMPT = "This module provides"
#: Far enough that, whichever token it holds from, greedy decoding goes on with code.
ALPHA = 3.0
#: So many tokens that a change comes in time on any machine, and that enough come after it to be scored.
TOKENS = 512
#: How many tokens are read before the answer is bent.
BEFORE = 12


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
async def test_the_try_out(tmp_path: Path) -> None:
    """`python -m examples.chat_backend`: a Redis, an engine and the service; Ctrl-C ends all three."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "examples.chat_backend", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        said_ = await anyio.to_thread.run_sync(lambda: [process.stdout.readline() for _ in range(3)])  # type: ignore[union-attr]
        assert [line.partition(":")[0] for line in said_] == ["bus", "engine", "service"], said_
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            with anyio.fail_after(60):
                while True:
                    with suppress(httpx.ConnectError):
                        await http.get("/")
                        break
                    await anyio.sleep(0.05)
            told = await said(http, await opened(http, temperature=0.0, max_tokens=16), PROMPT)
            async with following(http, told["stream"]) as events:
                seen = await events.rest()
        assert seen[-1].data["status"] == "finished"
        assert sum(one["count"] for one in tokens(seen)) == seen[-1].data["usage"]["completion_tokens"] > 0
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        process.send_signal(signal.SIGINT)
        assert await anyio.to_thread.run_sync(process.wait, 60) == 0
        assert psutil.wait_procs(below, timeout=10)[1] == []
    finally:
        if process.poll() is None:
            process.terminate()
            await anyio.to_thread.run_sync(process.wait, 60)
    assert "socket.send() raised" not in (tmp_path / "log").read_text()


@pytest.fixture
async def http(engine: Any, engine_bus: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the service on the shared engine's bus."""
    async with tracewire.connect(engine_bus) as client:
        await client.models.get("demo", timeout=60)
    # Greedy decoding repeats itself, and must not end before it has been bent.
    async with serving(Settings(url=engine_bus, sampling={"ignore_eos": True})) as http:
        yield http


def tokens(seen: list[Seen]) -> list[dict[str, Any]]:
    """What the token events say, in order; every index once."""
    found = [event.data for event in seen if event.name == "token"]
    assert [one["index"] for one in found] == [sum(one["count"] for one in found[:n]) for n in range(len(found))]
    assert all(len(one["meter"]) == one["count"] for one in found)
    return found


def parts(seen: list[Seen], first: int) -> tuple[str, str]:
    """The text before token `first`, and from it on, but for that of an output which holds tokens of both."""
    found = tokens(seen)
    before = "".join(one["text"] for one in found if one["index"] + one["count"] <= first)
    return before, "".join(one["text"] for one in found if one["index"] >= first)


async def answer(http: httpx.AsyncClient, alpha: float | None = None) -> list[Seen]:
    """All events of a greedy answer, bent to `alpha` once its first tokens are there."""
    conversation = await opened(http, temperature=0.0, max_tokens=TOKENS)
    told = await said(http, conversation, PROMPT)
    seen: list[Seen] = []
    async with following(http, told["stream"]) as events:
        while alpha is not None and sum(one["count"] for one in tokens(seen)) < BEFORE:
            seen += await events.through("token")
        if alpha is not None:
            response = await steered(http, conversation, alpha=alpha, if_version=0)
            assert response.status_code == 200, response.text
            assert response.json()["version"] == 1
        seen += [event async for event in events]
    assert seen[-1].name == "final"
    assert seen[-1].data["status"] == "finished", seen[-1].data
    assert sum(one["count"] for one in tokens(seen)) == TOKENS
    return seen


async def test_an_answer_is_bent_from_one_token_on(http: httpx.AsyncClient) -> None:
    with anyio.fail_after(300):
        straight = await answer(http)
        again = await answer(http)
        bent = await answer(http, ALPHA)
    assert text(straight) == text(again), "greedy decoding of one request at a time repeats itself"
    (change,) = (event.data for event in bent if event.name == "steered")
    assert change["values"] == {"alpha": ALPHA}
    assert change["by"] == "chat"
    first = change["first"]
    assert BEFORE <= first < TOKENS - 64, "too few tokens are left to see it by"
    # The event stands where it holds: what was sampled before came before it.
    at = next(number for number, event in enumerate(bent) if event.name == "steered")
    assert all(one["index"] < first for one in tokens(bent[:at]))
    before, after = parts(bent, first)
    assert text(straight).startswith(before)
    tail = text(straight).removeprefix(before)
    assert after != tail
    score = CodeScore.load()
    assert score(after) > score(tail) + 0.3
    meters = [value for one in tokens(bent) for value in one["meter"]]
    # It is read behind what bends it: the first bent token lies further along by nearly all of it.
    assert meters[first] > max(meters[:first])
    assert sum(meters[first:]) / len(meters[first:]) > sum(meters[:first]) / first + ALPHA / 2
