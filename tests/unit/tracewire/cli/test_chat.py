"""`tracewire chat` on a terminal and by a pipe."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus_engine import Stage
from tests.support.cli import command, steered_story
from tests.support.terminal import on_terminal, snapshot_of
from tracewire_bus.wire.messages import (
    ChatMessage,
    Failure,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)


async def polite(stage: Stage) -> None:
    """Answers with the number of messages, and with the live parameters."""
    chat = stage.submission.invokes[0].chat
    assert chat is not None
    await stage.accept()
    if chat.messages[-1]["content"] == "fail":
        await stage.final("failed", Failure(type="ValueError", message="no"))
        return
    answer = f"message {len(chat.messages)}"
    if stage.live:
        answer += f", alpha {stage.live['alpha']}"
    await stage.save(answer, {"p": float(len(chat.messages))})
    await stage.final(messages=[(0, 0, ChatMessage(content=answer))])


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


async def test_each_line_of_a_pipe_is_a_message(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/live\n/reset\nagain\n"))
    async with engine(polite) as serving:
        assert await command("chat", "tiny", "--system", "Be brief.", *where) == 0
        assert [
            [(message["role"], message["content"]) for message in one.invokes[0].chat.messages] for one in serving.taken
        ] == [
            [("system", "Be brief."), ("user", "hello")],
            [("system", "Be brief."), ("user", "again")],
        ]
    assert capsys.readouterr() == ("message 2\nmessage 2\n", "no live parameters\n")


async def test_an_answer_that_failed_is_no_part_of_the_conversation(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("fail\nhello\nmore\n"))
    async with engine(polite):
        assert await command("chat", "tiny", *where) == 1
    shown = capsys.readouterr()
    assert shown.out == "message 1\nmessage 3\n"
    assert shown.err == "tracewire: failed, 0 tokens: ValueError: no\n"


async def test_json_and_live_parameters(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = "one\n/steer alpha=8 beta=1 gamma\ntwo\n/nothing\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    async with engine(polite):
        assert await command("chat", "tiny", "--live", "alpha=0.5", "--json", *where) == 0
    shown = capsys.readouterr()
    events = [json.loads(line) for line in shown.out.splitlines()]
    assert [event["type"] for event in events] == ["submitted", "accepted", "output", "final"] * 2
    assert [event["text"] for event in events if event["type"] == "output"] == [
        "message 1, alpha 0.5",
        "message 3, alpha 8.0",
    ]
    assert "no live parameter 'beta'" in shown.err
    assert "expected NAME=VALUE" in shown.err
    assert "unknown command /nothing" in shown.err


async def calling(stage: Stage) -> None:
    """Calls two functions, and adds their results up."""
    chat = stage.submission.invokes[0].chat
    assert chat is not None
    results = [message["content"] for message in chat.messages if message["role"] == "tool"]
    await stage.accept()
    if "fail" in results:
        await stage.final("failed", Failure(type="ValueError", message="no"))
        return
    if results:
        delta, whole = MessageDelta(content="+".join(results)), ChatMessage(content="+".join(results))
    else:
        calls = [ToolCall(id=f"c{number}", name="get", arguments=f'{{"n": {number}}}') for number in (1, 2)]
        deltas = [
            ToolCallDelta(index=number, id=call.id, name=call.name, arguments=call.arguments)
            for number, call in enumerate(calls)
        ]
        delta, whole = MessageDelta(content="Wait.", tool_calls=deltas), ChatMessage(content="Wait.", tool_calls=calls)
    await stage.output("raw", message=delta, finish_reason="stop")
    await stage.final(messages=[(0, 0, whole)])


async def test_functions_that_an_answer_calls(
    engine: Callable[..., Any],
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    monkeypatch.setattr("sys.stdin", io.StringIO("add\n7\nfail\n8\n"))
    async with engine(calling) as serving:
        asked = ("--tools", str(tmp_path / "tools.json"), "--template", "thinking=false")
        # An answer fails, and the last line may be given again.
        assert await command("chat", "tiny", *asked, *where) == 1
        first, _, last = (one.invokes[0].chat for one in serving.taken)
    assert (first.tools, first.template_kwargs) == (tools, {"thinking": False})
    user, answer, *results = last.messages
    assert (user["content"], answer["role"], answer["content"]) == ("add", "assistant", "Wait.")
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "get", "arguments": f'{{"n": {number}}}'} for number in (1, 2)
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "8"},
    ]
    assert capsys.readouterr().out == 'Wait.\n-> get {"n": 1}\n-> get {"n": 2}\n7+8\n'


async def test_a_terminal(engine: Callable[..., Any], redis_url: str, prefix: str) -> None:
    async with engine(polite):
        options = ("--probe", "p=residual(0)", "--live", "alpha=1", "--prefix", prefix)
        with on_terminal("chat", "tiny", *options, TRACEWIRE_URL=redis_url) as terminal:
            await terminal.wait(lambda text: text.endswith("ends\n>"))
            terminal.press("hello\r")
            await terminal.wait(lambda text: text.count("finished") == 1 and text.endswith("\n>"))
            terminal.press("/steer alpha=2\r")
            await terminal.wait("alpha=2")
            terminal.press("more\r")
            await terminal.wait(lambda text: text.count("finished") == 2 and text.endswith("\n>"))
            terminal.press("\x04")
            assert await terminal.wait_end() == 0
            shown, kept = snapshot_of("chat", terminal.text())
    assert shown == kept


async def test_ctrl_c_ends_an_answer_and_then_the_command(
    engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    async with engine(steered_story):
        options = ("--probe", "p=residual(0)", "--live", "alpha=1", "--prefix", prefix)
        with on_terminal("chat", "tiny", *options, TRACEWIRE_URL=redis_url) as terminal:
            await terminal.wait(lambda text: text.endswith("ends\n>"))
            terminal.press("hello\r")
            await terminal.wait("running, 4 tokens")
            terminal.press("\x03")
            await terminal.wait(lambda text: "cancelled" in text and text.endswith("\n>"))
            terminal.press("\x03")
            assert await terminal.wait_end() == 0


async def test_an_unknown_model(where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("chat", "nobody", *where) == 1
    assert "no engine serves the model 'nobody'" in capsys.readouterr().err
