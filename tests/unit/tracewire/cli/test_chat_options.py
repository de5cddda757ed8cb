"""The options of a chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire import MessageDelta, Output, ToolCallDelta
from tracewire.cli.chat_options import add_chat_options, assistant_message, conversation_of, text_of
from tracewire.cli.commands import Parser, UsageError
from tracewire_bus.wire.messages import ChatMessage


def parsed(*words: str) -> object:
    parser = Parser(prog="tracewire")
    add_chat_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("option", ["--system=x", "--template=a=1"])
def test_options_of_a_chat_belong_to_a_chat(option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option.split('=')[0]} is an option of a chat: give --chat$"):
        conversation_of(parsed(option), chats=False)
    assert conversation_of(parsed(option)).messages or conversation_of(parsed(option)).options
    assert conversation_of(parsed(), chats=False) == conversation_of(parsed()) == ([], {})


@pytest.mark.parametrize("text", ["{", "{}", '[{"function": {}}]', "[1]", None])
def test_a_file_without_tools_is_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "tools.json").write_text(text)
    with pytest.raises(SystemExit):
        parsed("--tools", str(tmp_path / "tools.json"))
    shown = capsys.readouterr().err
    assert "--tools" in shown
    assert "list of tools" in shown


def test_tool_calls_as_text() -> None:
    def shown(*calls: ToolCallDelta, begun: bool = False, **fields: str) -> str:
        return text_of(Output(1, 0, text="raw", message=MessageDelta(tool_calls=list(calls), **fields)), begun=begun)

    first = ToolCallDelta(index=0, id="c0", name="add", arguments='{"a"')
    assert text_of(Output(1, 0, text="raw"), begun=True) == "raw"
    assert shown(first) == '-> add {"a"'
    assert shown(first, begun=True) == '\n-> add {"a"'
    assert shown(first, content="Wait.") == 'Wait.\n-> add {"a"'
    assert shown(ToolCallDelta(index=0, arguments=": 1}"), begun=True) == ": 1}"


def test_an_answer_without_calls_has_none() -> None:
    assert assistant_message(ChatMessage(content=None)) == {"role": "assistant", "content": ""}
