"""`tracewire steer`, `pause`, `resume`, `cancel` and `state`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.cli import command, steered_story, story
from tracewire import Client, Output, Paused, Resumed, Steered

PATIENCE = 60


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


async def test_a_trace_is_steered_paused_resumed_and_cancelled(
    client: Client, engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    live = {"alpha": 0.0, "mode": "prose", "count": 1, "vector": np.zeros(2, np.float32)}
    async with engine(steered_story), client.trace("tiny", "x", live=live) as trace:
        seen: list[Any] = []

        async def until(kind: type) -> None:
            with anyio.fail_after(PATIENCE):
                async for item in trace:
                    seen.append(item)
                    if isinstance(item, kind):
                        return

        await until(Output)
        assert await command("steer", trace.id, "alpha=8", "mode=code", "count=2", "vector=[1, 2]", *where) == 1
        assert "live.vector" in capsys.readouterr().err
        assert await command("steer", trace.id, "alpha=8", "mode=7", "count=2", *where) == 0
        assert capsys.readouterr().out == f"{trace.id}: version 1\n"
        await until(Steered)
        assert seen[-1].changes[-1].values == {"alpha": 8.0, "mode": "7", "count": 2}
        assert await command("steer", trace.id, "alpha=9", "--if-version", "0", *where) == 1
        assert "version" in capsys.readouterr().err
        assert await command("steer", trace.id, "alpha=9", "--if-version", "1", "--json", *where) == 0
        assert json.loads(capsys.readouterr().out) == {"trace_id": trace.id, "version": 2}

        for word, event, said in (("pause", Paused, "was paused already"), ("resume", Resumed, "was not paused")):
            assert await command(word, trace.id, *where) == 0
            assert capsys.readouterr().out == f"{trace.id}: {word}d\n"
            await until(event)
            assert await command(word, trace.id, *where) == 0
            assert capsys.readouterr().out == f"{trace.id}: {said}\n"
            assert await command(word, trace.id, "--json", *where) == 0
            assert json.loads(capsys.readouterr().out) == {"trace_id": trace.id, "changed": False}

        assert await command("cancel", trace.id, "--reason", "enough", *where) == 0
        assert capsys.readouterr().out == f"{trace.id}: cancelled\n"
        final = await trace.final()
        assert final.error is not None
        assert final.error.reason == "enough"
        assert await command("cancel", trace.id, *where) == 0
        assert capsys.readouterr().out == f"{trace.id}: had ended already\n"
        assert await command("steer", trace.id, "alpha=1", *where) == 1
        assert "has ended" in capsys.readouterr().err


async def test_the_state_of_a_trace(
    client: Client, engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story, engine="e1"), client.trace("tiny", "x", live={"alpha": 1.5}) as trace:
        await trace.result()
    assert await command("state", trace.id, *where) == 0
    assert capsys.readouterr().out.splitlines() == [
        "finished\t10 tokens\te1",
        f"text\t0.0\t{trace.state().text!r}",
        "save\t0.0\tprojection\t10 items, last: 1.5",
        "live\tversion 0\talpha=1.5",
    ]
    assert await command("state", trace.id, "--json", *where) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["id"], state["status"], state["live"], state["live_version"]) == (
        trace.id,
        "finished",
        {"alpha": 1.5},
        0,
    )
    assert state["invokes"][0][0]["saves"]["projection"][:2] == [0.0, 3.5]


@pytest.mark.parametrize(
    "words", [["steer", "nobody", "a=1"], ["pause", "nobody"], ["cancel", "nobody"], ["state", "nobody"]]
)
async def test_an_unknown_trace(where: tuple[str, ...], capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert await command(*words, *where) == 1
    assert capsys.readouterr().err.startswith("tracewire: no trace 'nobody'")


def test_a_value_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from tracewire.cli.main import main

    with pytest.raises(SystemExit) as left:
        main(["steer", "trace", "alpha"])
    assert left.value.code == 2
    assert "expected NAME=VALUE, as in alpha=8" in capsys.readouterr().err
