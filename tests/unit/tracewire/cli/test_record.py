"""`tracewire record` writes a file, which `tracewire replay` shows without Redis and runs again with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import Stage
from tests.support.cli import command, story
from tests.support.queue import settled
from tracewire import Client, Recording


async def test_a_trace_is_recorded_shown_and_run_again(
    client: Client,
    engine: Callable[..., Any],
    prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = ("--url", client.url, "--prefix", prefix)
    path = tmp_path / "t.twrec"
    began = anyio.Event()

    async def waits(stage: Stage) -> None:
        await story(stage)

    async with engine(waits, engine="e1"), client.trace("tiny", "x") as trace:
        began.set()
        await trace.until_done()
        (await trace.record()).save(path)
        await settled(client._session.open_bus())
        assert await command("record", trace.id, "-o", str(tmp_path / "late.twrec"), *where) == 0
        said = capsys.readouterr()
        assert said.out == f"{tmp_path / 'late.twrec'}: 12 events\n"
        assert "the file cannot run again" in said.err
        assert await command("record", trace.id, "-o", str(tmp_path / "l.twrec"), "--json", *where) == 0
        assert json.loads(capsys.readouterr().out)["again"] is False
        assert await command("replay", str(path), "--on", "tiny", *where) == 0
        assert capsys.readouterr().out.startswith("all 10 tokens are the same")
        assert await command("replay", str(path), "--on", "tiny", "--json", *where) == 0
        assert json.loads(capsys.readouterr().out)["same"] is True
    # Without any Redis.
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    assert await command("replay", str(path), "--speed", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("accepted by e1", "finished, 10 tokens", 12)
    assert await command("replay", str(path), "--speed", "0", "--json", "--names", "other") == 0
    assert [json.loads(line).get("delta") for line in capsys.readouterr().out.splitlines()][1:-1] == [{}] * 10
    assert Recording.open(path).complete


async def test_what_cannot_be_read_or_written_is_named(
    client: Client, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", client.url, "--prefix", prefix)
    assert await command("record", "nobody", "-o", str(tmp_path / "nowhere" / "t"), *where) == 2
    assert "no such folder" in capsys.readouterr().err
    assert await command("record", "nobody", *where) == 1
    assert "nobody" in capsys.readouterr().err
    odd = tmp_path / "odd.twrec"
    odd.write_text("odd")
    assert await command("replay", str(odd)) == 1
    assert "the file is none" in capsys.readouterr().err
    assert await command("replay", str(tmp_path / "none.twrec")) == 2
    assert "no such file" in capsys.readouterr().err
    assert await command("replay", "nobody", "--on", "tiny", *where) == 2
    assert "--on: expected a recording" in capsys.readouterr().err
    assert await command("replay", "nobody", "--tolerance", "-1", *where) == 2
    assert "--tolerance" in capsys.readouterr().err
