"""A command whose Redis is away says so once for each outage, and how to end the command."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tests.support.cli import command
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire.cli import outage
from tracewire_bus.transport.backoff import outages


async def test_run_says_once_for_each_outage_that_it_waits(
    engine: Callable[..., Any],
    redis_url: str,
    prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "_LOOK_S", 0.02)
    monkeypatch.setattr(outage, "_AWAY_S", 0.2)
    again, over = anyio.Event(), anyio.Event()
    shown: list[str] = ["", ""]
    ended: list[int] = []

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await again.wait()
        await stage.output(" two")
        await over.wait()
        await stage.final()

    def read(stream: int, text: str, often: int = 1) -> bool:
        for number, more in enumerate(capsys.readouterr()):
            shown[number] += more
        return shown[stream].count(text) == often

    async def run(url: str) -> None:
        ended.append(await command("run", "tiny", "x", "--url", url, "--prefix", prefix))

    async with engine(script), proxy(redis_url, tmp_path) as through, anyio.create_task_group() as group:
        group.start_soon(run, through.url)
        await until(lambda: read(0, "one"))
        for often, go_on, text in ((1, again, " two"), (2, over, "\n")):
            through.away = True
            await through.cut()
            await until(lambda: read(1, "still waiting", often))  # noqa: B023
            through.away = False
            await until(lambda: read(1, "answers again", often))  # noqa: B023
            go_on.set()
            await until(lambda: read(0, text))  # noqa: B023
    read(0, "")
    assert ended == [0]
    assert shown[0] == "one two\n"
    said = [line for line in shown[1].splitlines() if "Redis" in line]
    text = f"tracewire: still waiting for Redis at {through.url}, which has not answered for 0.2 s; "
    assert said == [f"{text}Ctrl-C ends this command", "tracewire: Redis answers again"] * 2
    # Without a handler, a program prints such records on standard error.
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not outages.disabled
