"""`tracewire top` on a terminal, and as plain lines and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cli import command, steered_story
from tests.support.terminal import on_terminal, snapshot_of
from tracewire import Client

ENTER, ESCAPE, RIGHT = "\r", "\x1b", "\x1b[C"


async def test_a_trace_is_opened_and_steered(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    trace = client.trace("tiny", "x", live={"alpha": 0.0, "beta": 1.5})
    async with engine(steered_story, engine="e1"), trace:
        # The four tokens that come without a change are there before anybody looks.
        for _ in range(4):
            await anext(trace)
        options = ("--interval", "0.2", "--prefix", prefix)
        with on_terminal("top", *options, TRACEWIRE_URL=redis_url) as terminal:
            shown, kept = snapshot_of("top", await terminal.wait("running  0 tokens"))
            assert shown == kept
            terminal.press(ENTER)
            shown, kept = snapshot_of("top_open", await terminal.wait("running, 4 tokens"))
            assert shown == kept
            terminal.press(RIGHT)
            await terminal.wait("running, 5 tokens")
            assert (await client.get_live(trace.id)).values == {"alpha": 1.0, "beta": 1.5}
            assert "> alpha = 1.0   (step 1)" in terminal.text()
            terminal.press(ESCAPE)
            await terminal.wait("1 running traces")
            terminal.press("cc")
            await terminal.wait("0 running traces")
            assert (await trace.final()).status == "cancelled"
            terminal.press("q")
            assert await terminal.wait_end() == 0


async def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was(redis_url: str, prefix: str) -> None:
    with on_terminal("top", "--prefix", prefix, TRACEWIRE_URL=redis_url) as terminal:
        await terminal.wait(f"with the prefix {prefix!r}. Start one:")
        terminal.press("\x03")
        assert await terminal.wait_end() == 130


async def test_plain_lines_and_json(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--interval", "0.05", "--url", redis_url, "--prefix", prefix)
    async with engine(steered_story, engine="e1"), client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
        await anext(trace)
        assert await command("top", *where) == 0
        engine_line, trace_line = capsys.readouterr().out.splitlines()
        assert engine_line == "e1\ttiny\tserving\t0 of 16 traces\t0.0"
        assert trace_line.startswith(f"{trace.id}\ttiny\trunning\t")
        assert await command("top", "--json", "--count", "2", *where) == 0
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [[one["trace_id"] for one in look["traces"]] for look in looks] == [[trace.id]] * 2


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--interval", "0"), "--interval: expected seconds from 0.05 to 3600, got 0"),
        (("--count", "0"), "--count: expected a positive number, got 0"),
    ],
)
async def test_wrong_options(
    redis_url: str, capsys: pytest.CaptureFixture[str], option: tuple[str, str], says: str
) -> None:
    assert await command("top", *option, "--url", redis_url) == 2
    assert capsys.readouterr().err == f"tracewire: {says}\n"
