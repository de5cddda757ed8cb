"""`tracewire replay` shows a trace again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.bus_engine import Stage
from tests.support.cli import command, story
from tests.support.terminal import on_terminal, path_of, stable
from tracewire import Client, Output
from tracewire.cli.replay import Pace

AT_ONCE = ("--speed", "0")


@pytest.fixture
async def trace_id(client: Client, engine: Callable[..., Any]) -> str:
    """The id of a trace that has ended."""
    async with engine(story, engine="e1"), client.trace("tiny", "x") as trace:
        await trace.until_done()
    return trace.id


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


async def test_each_form(trace_id: str, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("replay", trace_id, *AT_ONCE, *where) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("accepted by e1", "finished, 10 tokens", 12)
    assert await command("replay", trace_id, *AT_ONCE, "--json", "--names", "other", *where) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["delta"] for event in events[1:-1]] == [{}] * 10


async def test_a_terminal_shows_what_run_shows(trace_id: str, redis_url: str, prefix: str) -> None:
    options = (trace_id, "--speed", "5", "--prefix", prefix)
    with on_terminal("replay", *options, TRACEWIRE_URL=redis_url) as terminal:
        assert await terminal.wait_end() == 0
        shown = stable(terminal.text())
    # What `run` shows is written by its own test. The command that keeps a trace is a remark of `run` alone.
    kept = path_of("run").read_text()
    assert kept == f"{shown}tracewire: keep its saves with: tracewire export TRACE --to FILE\n"


async def test_a_trace_without_saves_is_its_text(
    client: Client, engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing(stage: Stage) -> None:
        await stage.accept()
        await stage.output("half a")
        await stage.final("failed")

    async with engine(failing), client.trace("tiny", "x") as trace:
        await trace.until_done()
    assert await command("replay", trace.id, *AT_ONCE, *where) == 1
    assert capsys.readouterr().out == "half a\n"
    assert await command("replay", trace.id, "--speed", "-1", *where) == 2
    assert "--speed: expected a number from 0 on, got -1" in capsys.readouterr().err


def test_the_pace_is_that_of_the_engine() -> None:
    def output(time: float) -> Output:
        return Output(attempt=1, seq=1, time=time)

    pace = Pace(2.0)
    assert pace.pause_before(output(100.0), now=5.0) == 0.0
    assert pace.pause_before(output(101.0), now=5.0) == 0.5
    assert pace.pause_before(output(101.0), now=5.4) == pytest.approx(0.1)
    assert pace.pause_before(output(102.0), now=7.0) == 0.0
    assert Pace(0.0).pause_before(output(1.0), now=0.0) == 0.0
    assert Pace(1.0).pause_before(output(0.0), now=0.0) == 0.0
