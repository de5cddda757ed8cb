"""`tracewire run` shows a trace on a terminal, as plain lines, and as JSON."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.cli import command, steered_story, story
from tests.support.terminal import on_terminal, snapshot_of
from tracewire import Client
from tracewire.cli import run
from tracewire_bus.wire.messages import Failure

PROBE = ("--probe", "projection=residual(2)")
TEXT = "def parse(text):\n    return text.split()\n"


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


async def test_the_text_alone_is_what_a_pipe_gets(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story):
        assert await command("run", "tiny", "a prompt", *where) == 0
    assert capsys.readouterr() == (TEXT, "")


async def test_with_saves_a_line_is_a_token(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story, engine="e1"):
        assert await command("run", "tiny", "a prompt", *PROBE, *where) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("tracewire: keep its saves with: tracewire export ")
    lines = shown.out.splitlines()
    assert lines[0] == "accepted by e1"
    assert lines[1] == '    0 "def"             projection=0'
    assert lines[2] == '    1 " parse"          projection=3.5'
    assert lines[-1] == "finished, 10 tokens"
    assert len(lines) == 12


async def test_json_lines_have_the_gateway_s_form(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story, engine="e1"):
        assert await command("run", "tiny", "a prompt", *PROBE, "--json", *where) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["type"] for event in events] == ["submitted", "accepted", *["output"] * 10, "final"]
    assert set(events[0]) == {"type", "trace_id", "model"}
    assert {"engine", "model", "live", "prompt_tokens", "versions"} <= events[1].keys()
    assert {"id", "index", "token_ids", "text", "delta", "finish_reason"} <= events[2].keys()
    assert events[3]["delta"] == {"projection": [3.5]}
    assert {"status", "usage", "error", "manifest"} <= events[-1].keys()
    assert "".join(event["text"] for event in events[2:-1]) == TEXT


async def test_all_options_reach_the_engine(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", np.arange(8.0))
    Path("probes.py").write_text(
        "import tracewire\n\n@tracewire.intervention\ndef watch(model, tracer, live, layer=1):\n"
        "    hs = model.residual(layer).output.save()\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    async with engine(story) as serving:
        options = ("--steer", "residual(3)@direction.npy*alpha=2", "--lens", "residual(*),top_k=2", *PROBE)
        options += ("--block", "probes.py::watch", "--set", "layer=3", "--live", "word=code", "--max-tokens", "7")
        options += ("--temperature", "0.5", "--seed", "9", "--stop", "x", "--ignore-eos", "--sampling", "top_p=0.9")
        options += ("--sampling", "deadline=30")
        assert await command("run", "tiny", "-", *options, *where) == 0
        (submission,) = serving.taken
        steer, probe, lens = submission.interventions
        assert (steer.at, steer.scale.live, steer.positions) == ("residual(3)", "alpha", "all")
        assert (probe.name, lens.name, lens.top_k) == ("projection", "lens", 2)
        assert submission.block.name == "watch"
        assert submission.invokes[0].prompt == "from a pipe"
        assert (submission.deadline_s, submission.token_strings) == (30.0, True)
        sampling = {"max_tokens": 7, "temperature": 0.5, "seed": 9, "stop": ["x"], "ignore_eos": True, "top_p": 0.9}
        assert submission.invokes[0].sampling == sampling
    error = capsys.readouterr().err
    assert error.startswith("tracewire: steer it with: tracewire steer ")
    assert " alpha=VALUE" in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--probe", "p=residual(9)"), "--probe 'p=residual(9)': residual(9): the model has 4 layers, 0 to 3"),
        (("--lens", "model.nothing"), "--lens 'model.nothing': "),
        (
            ("--sampling", "top_q=1"),
            "--sampling 'top_q' is neither an option nor a sampling param; did you mean 'top_p'?",
        ),
        (("--set", "layer=1"), "--set binds a variable of a block"),
        (("--block", "nothing.py"), "--block: expected a Python file, got 'nothing.py'"),
    ],
)
async def test_a_wrong_option_is_named_and_nothing_is_sent(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    says: str,
) -> None:
    async with engine(story) as serving:
        assert await command("run", "tiny", "x", *options, *where) == 2
        assert serving.taken == []
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


async def test_a_trace_that_fails_exits_with_1(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("half a")
        place = {"filename": "mine.py", "line": 7, "source": "    x = y.z"}
        await stage.final("failed", Failure(type="ValueError", message="no", field="block", **place))

    async with engine(script):
        assert await command("run", "tiny", "x", *where) == 1
    shown = capsys.readouterr()
    assert shown.out == "half a\n"
    assert shown.err == "tracewire: failed, 1 token: ValueError: no, at mine.py:7: x = y.z\n"


async def test_a_trace_that_the_engine_refuses_exits_with_1(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.final("rejected", Failure(type="TraceRejected", message="too long", field="prompt"))

    async with engine(script):
        assert await command("run", "tiny", "x", *where) == 1
    assert "too long" in capsys.readouterr().err


async def test_saves_that_are_not_those_of_the_engine_exit_with_1(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("a", {"p": 1.0})
        from tracewire_bus.wire.messages import Manifest

        await stage.final(manifest=[Manifest(invoke=0, choice=0, name="p", kind="list", length=1, digest=b"x" * 16)])

    async with engine(script):
        assert await command("run", "tiny", "x", *where) == 1
    assert "differ" in capsys.readouterr().err


async def test_no_engine_is_said_with_what_to_start(where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("run", "tiny", "x", *where) == 1
    assert "start one with `tracewire engine tiny`" in capsys.readouterr().err


async def test_a_trace_that_waits_is_told_of(
    registered: str, where: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_QUEUED_S", 0.01)
    assert await command("run", "tiny", "x", "--sampling", "deadline=1", *where) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(" waits in the queue; tracewire top shows the engines")
    assert "expired" in last


async def test_a_detached_trace_runs_on(
    client: Client, engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story):
        assert await command("run", "tiny", "x", "--detach", *where) == 0
        trace_id = capsys.readouterr().out.strip()
        assert (await client.subscribe(trace_id).result()).text == TEXT
        assert await command("run", "tiny", "x", "--detach", "--json", *where) == 0
        trace_id = json.loads(capsys.readouterr().out)["trace_id"]
        assert (await client.subscribe(trace_id).result()).text == TEXT


async def test_the_terminal_shows_saves_beside_the_text(
    engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    async with engine(story):
        with on_terminal("run", "tiny", "x", *PROBE, "--prefix", prefix, TRACEWIRE_URL=redis_url) as terminal:
            assert await terminal.wait_end() == 0
            shown, kept = snapshot_of("run", terminal.text())
    assert shown == kept


async def test_a_text_does_not_control_the_terminal(engine: Callable[..., Any], redis_url: str, prefix: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("first")
        await stage.output("\x1b[2J\x1b[Hsecond")
        await stage.final()

    async with engine(script):
        with on_terminal("run", "tiny", "x", "--prefix", prefix, TRACEWIRE_URL=redis_url) as terminal:
            assert await terminal.wait_end() == 0
            assert terminal.text() == "first␛[2J␛[Hsecond"


async def test_ctrl_c_cancels_the_trace(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    async with engine(steered_story):
        options = (*PROBE, "--live", "alpha=0", "--prefix", prefix)
        with on_terminal("run", "tiny", "x", *options, TRACEWIRE_URL=redis_url) as terminal:
            await terminal.wait("running, 4 tokens")
            (listed,) = await client.traces.list()
            terminal.press("\x03")
            assert await terminal.wait_end() == 130
        *_, final = [event async for event in client.subscribe(listed.trace_id)]
    assert isinstance(final, tracewire.Final)
    assert final.status == "cancelled"


async def test_a_prompt_as_a_chat_s_message(
    engine: Callable[..., Any], where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(story) as serving:
        assert await command("run", "tiny", "hello", "--chat", "--system", "Be brief.", *where) == 0
        assert await command("run", "tiny", "hello", "--system", "Be brief.", *where) == 2
        (chat,) = (one.invokes[0].chat for one in serving.taken)
    assert [(one["role"], one["content"]) for one in chat.messages] == [("system", "Be brief."), ("user", "hello")]
    shown = capsys.readouterr()
    assert shown.out == TEXT
    assert "--system is an option of a chat: give --chat" in shown.err
