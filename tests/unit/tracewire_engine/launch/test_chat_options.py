"""The options about chats: read, checked, and handed on to vLLM's own server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tracewire_engine.launch.chat_options import add_chat_options, chat_options, server_options


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_chat_options(parser.add_argument_group("chats"))
    # vLLM's own.
    parser.add_argument("--reasoning-parser", default="")
    parser.add_argument("--reasoning-parser-plugin")
    return parser.parse_args(list(arguments))


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def test_they_are_read_and_handed_on(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    options = parsed(
        *TOOLS,
        *(
            "--chat-template",
            str(template),
            "--default-chat-template-kwargs",
            '{"a": 1}',
            "--reasoning-parser",
            "qwen3",
        ),
    )
    chats = chat_options(options)
    assert chats.chat_template == template.read_text()
    assert (chats.tool_call_parser, chats.reasoning_parser, chats.parses) == ("hermes", "qwen3", True)
    assert chats.default_chat_template_kwargs == {"a": 1}
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tracewire_engine.adapter.http_server import _of_vllm

    server = _of_vllm()[2](FlexibleArgumentParser()).parse_args(server_options(options))
    assert (server.tool_call_parser, server.enable_auto_tool_choice) == ("hermes", True)
    assert (server.chat_template, server.default_chat_template_kwargs) == (str(template), {"a": 1})
    assert server.structured_outputs_config.reasoning_parser == "qwen3"


def test_without_any_nothing_is_parsed() -> None:
    assert chat_options(parsed()).parses is False
    assert server_options(parsed()) == ["--chat-template-content-format", "auto"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tool-call-parser", "hermes"], "both --enable-auto-tool-choice"),
        (["--enable-auto-tool-choice"], "both --enable-auto-tool-choice"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "hermez"], "--tool-call-parser: .* mean 'hermes'"),
        (["--reasoning-parser", "qwenn3"], "--reasoning-parser: .* mean 'qwen3'"),
        (["--chat-template", "/no/such/file"], "--chat-template: "),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(arguments: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chat_options(parsed(*arguments))


def test_variables_are_a_json_object() -> None:
    with pytest.raises(argparse.ArgumentError, match="a JSON object"):
        parsed("--default-chat-template-kwargs", "[1]")
