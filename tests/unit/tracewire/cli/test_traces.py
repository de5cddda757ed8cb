"""`tracewire traces` lists traces, and `tracewire watch` prints one to its end, or what becomes of all."""

# ruff: noqa: ASYNC220
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, tiny
from tests.support.cli import command
from tests.support.terminal import on_terminal, snapshot_of
from tests.support.until import until
from tracewire import Client
from tracewire.admin.traces import STATES
from tracewire.cli.traces import RUNNING
from tracewire_bus.wire.messages import Failure, Set


async def ends(stage: Stage) -> None:
    """One trace goes on until it is cancelled, one fails, and the others end well."""
    await stage.accept()
    if stage.trace == "b":
        await anyio.sleep_forever()
    await stage.output("x", finish_reason="stop")
    failed = stage.trace.endswith("c")
    await stage.final("failed" if failed else "finished", Failure("BlockError", "boom") if failed else None)


async def three_traces(client: Client) -> None:
    """One that has finished, one of a tenant that has failed, and one that runs."""
    await client.trace("tiny", "x", trace_id="a", by="ada").result()
    async with client.trace("tiny", "x", trace_id="red:c", by="bob") as failing:
        await failing.until_done()
    await client.trace("tiny", "x", trace_id="b", by="ada", detach=True).accepted()
    await until(lambda: is_listed(client))


async def is_listed(client: Client) -> bool:
    """Whether the list has come as far as the traces have."""
    return [trace.state for trace in await client.traces.list()] == ["running", "failed", "finished"]


async def test_traces_are_listed(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", redis_url, "--prefix", prefix)

    async def lines(*options: str) -> list[list[str]]:
        assert await command("traces", *options, *where) == 0
        return [re.sub(r"\d+ s", "N s", line).split("\t") for line in capsys.readouterr().out.splitlines()]

    finished = ["a", "tiny", "finished", "1 token", "N s", "ada"]
    failed = ["red:c", "tiny", "failed: BlockError", "1 token", "N s", "bob", "red"]
    running = ["b", "tiny", "running", "-", "N s", "ada"]
    async with engine(ends):
        await three_traces(client)
        assert await lines() == [running, failed, finished]
        assert await lines("--running") == [running]
        assert await lines("--ended", "--model", "tiny") == [failed, finished]
        assert await lines("--client", "ada") == [running, finished]
        assert await lines("--tenant", "red") == [failed]
        assert await command("traces", "--limit", "1", *where) == 0
        said = capsys.readouterr()
        assert said.out.startswith("b\t")
        assert said.err == "tracewire: there may be more traces than 1: --limit N\n"
        assert await command("traces", "--json", *where) == 0
        (_, second, first) = json.loads(capsys.readouterr().out)
        assert (first["trace_id"], first["tenant"], first["state"], first["tokens"]) == ("a", None, "finished", 1)
        assert (second["tenant"], second["error"], second["client"]) == ("red", "BlockError", "bob")
        assert first["queued_at"] <= first["ended_at"] <= second["queued_at"]
        with on_terminal("traces", "--prefix", prefix, TRACEWIRE_URL=redis_url) as terminal:
            assert await terminal.wait_end() == 0
            # How long ago it was, and so the width of that column, differ from run to run.
            steady = re.sub(r" {2,}", "  ", re.sub(r"\d+ s\b", "N s", re.sub("─+", "─", terminal.text())))
            shown, kept = snapshot_of("traces", steady)
        assert shown == kept
        await client.cancel("b")
    assert await command("traces", "--running", "--tenant", "red", *where) == 0
    assert "No running traces of the tenant 'red' on " in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--running", "--ended"), ("--limit", "0"), ("--limit", "some")])
async def test_wrong_options_of_the_list(words: tuple[str, ...], redis_url: str) -> None:
    with pytest.raises(SystemExit) as ended:
        await command("traces", *words, "--url", redis_url)
    assert ended.value.code == 2


def test_the_states_of_a_trace_that_has_not_ended() -> None:
    assert STATES.difference(RUNNING) == {"finished", "stopped", "cancelled", "expired", "rejected", "failed"}


async def test_watch_prints_a_trace_to_its_end(
    client: Client, redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with BusEngine.running(redis_url, prefix, tiny) as engine:
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        assert await command("watch", trace.id, "--url", redis_url, "--prefix", prefix) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            f"accepted by {engine.info.engine}",
            '0.0     0 "one"  scores=[0]',
            '0.0     1 " two"  scores=[0.5]',
            '0.0     2 " three"  scores=[1]',
            "finished, 3 tokens",
        ]
        options = ("--names", "other", "--since", "1-2")
        assert await command("watch", trace.id, "--url", redis_url, "--prefix", prefix, *options) == 0
        assert capsys.readouterr().out.splitlines() == ['0.0     2 " three"', "finished, 3 tokens"]


async def test_watch_as_json(client: Client, redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with BusEngine.running(redis_url, prefix, tiny):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        assert await command("watch", trace.id, "--json", "--url", redis_url, "--prefix", prefix) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["type"] for event in events] == ["accepted", "output", "output", "output", "final"]
    assert events[1]["delta"] == {"scores": [0.0]}


async def test_lifecycle_events_as_json(client: Client, redis_url: str, prefix: str) -> None:
    async with BusEngine.running(redis_url, prefix, tiny), client.trace("tiny", "hello") as trace:
        await trace.result()
    arguments = ("watch", "--json", "--since", "start", "--url", redis_url, "--prefix", prefix)
    watching = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        assert watching.stdout is not None
        events = [json.loads(await anyio.to_thread.run_sync(watching.stdout.readline)) for _ in range(3)]
    finally:
        watching.kill()
        watching.communicate()
    assert [event["type"] for event in events] == ["queued", "accepted", "final"]
    assert {event["trace_id"] for event in events} == {trace.id}


async def test_watch_tells_how_a_trace_failed(
    client: Client, redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.restart("moved")
        await stage.output("a", [Set(path=("t",), value={"k": "v" * 100})])
        await stage.final("failed", Failure(type="ValueError", message="no", field="block"))

    async with BusEngine.running(redis_url, prefix, script):
        async with client.trace("tiny", "hello") as trace:
            with pytest.raises(tracewire.InterventionError):
                await trace.result()
        assert await command("watch", trace.id, "--url", redis_url, "--prefix", prefix) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "restarted: moved"
    assert lines[2].endswith("...}")
    assert lines[3] == "failed, 1 token: ValueError: no"


@pytest.mark.parametrize(
    "arguments", [["watch", "TRACE"], ["watch", "--since", "start"], ["models"], ["engines", "--json"]]
)
async def test_a_reader_that_has_had_enough_ends_it_without_a_word(
    client: Client, redis_url: str, prefix: str, arguments: list[str]
) -> None:
    """As `head` does: whether what is printed is flushed line by line or at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    async with BusEngine.running(redis_url, prefix, tiny), client.trace("tiny", "hello") as trace:
        await trace.result()
        words = [trace.id if word == "TRACE" else word for word in arguments]
        reading, writing = os.pipe()
        os.close(reading)
        process = subprocess.Popen(
            [sys.executable, "-m", "tracewire.cli", *words, "--url", redis_url, "--prefix", prefix],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        os.close(writing)
        _, said = await anyio.to_thread.run_sync(process.communicate)
    # What a shell reports of a program that SIGPIPE ended.
    assert process.returncode == 128 + signal.SIGPIPE
    assert [line for line in said.splitlines() if not line.startswith("tracewire: go on with --since ")] == []


async def test_watch_without_a_trace_prints_what_becomes_of_all(client: Client, redis_url: str, prefix: str) -> None:
    async with BusEngine.running(redis_url, prefix, tiny) as engine, client.trace("tiny", "hello") as trace:
        await trace.result()
    arguments = ("watch", "--model", "tiny", "--since", "start", "--url", redis_url, "--prefix", prefix)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    watching = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # Whoever runs the tests in the background has it ignored, and that is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert watching.stdout is not None
    lines = [await anyio.to_thread.run_sync(watching.stdout.readline) for _ in range(3)]
    watching.send_signal(signal.SIGINT)
    _, said = await anyio.to_thread.run_sync(watching.communicate)
    assert watching.returncode == 130
    assert [line.rstrip("\n").split("\t")[1:] for line in lines] == [
        ["queued", trace.id, "tiny", f"by {client._session.name}"],
        ["accepted", trace.id, "tiny", f"by {engine.info.engine}, attempt 1"],
        ["final", trace.id, "tiny", "finished, 3 tokens"],
    ]
    async with client.watch(since=said.split("--since ")[1].strip()) as later:
        with anyio.move_on_after(0):
            await anext(later)
    assert await command("watch", "--since", "nonsense", "--url", redis_url, "--prefix", prefix) == 2
