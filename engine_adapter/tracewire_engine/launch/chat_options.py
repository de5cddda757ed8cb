"""The options of `tracewire engine` about chats: templates and parsers, by the names that vLLM's server gives them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracewire_engine.adapter.chats import ChatOptions

__all__ = ["add_chat_options", "chat_options", "server_options"]


def _object(text: str) -> dict[str, Any]:
    """An argparse converter for a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def add_chat_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to a parser's group. vLLM's engine has `--reasoning-parser` and `--reasoning-parser-plugin`."""
    group.add_argument(
        "--chat-template", metavar="FILE", help="a chat template, or its text, in place of the model's own"
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=["auto", "string", "openai"],
        default="auto",
        help="whether the template gets a message's content as text or as a list of parts",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=_object,
        metavar="JSON",
        help='variables of the template that a chat may replace, for example {"enable_thinking": false}',
    )
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help="the parser of vLLM that finds tool calls in this model's output"
    )
    group.add_argument("--tool-parser-plugin", metavar="FILE", help="a file that registers further tool parsers")
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="serve tools; takes --tool-call-parser, too"
    )
    group.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="leave the tools out of the prompt of a chat whose tool_choice is none",
    )


def chat_options(options: argparse.Namespace) -> ChatOptions:
    """How the engine is to render and parse chats, by the command's options.

    Raises:
        ValueError: vLLM has no such parser, or a template or plugin cannot be read; names the option.
    """
    from tracewire_engine.adapter.chats import ChatOptions, template_text

    if options.enable_auto_tool_choice != bool(options.tool_call_parser):
        raise ValueError("tools take both --enable-auto-tool-choice and --tool-call-parser NAME")
    if options.tool_call_parser or options.reasoning_parser:
        _check_parsers(options)
    template = None
    if options.chat_template is not None:
        try:
            template = template_text(options.chat_template)
        except ValueError as error:
            raise ValueError(f"--chat-template: {error}") from error
    return ChatOptions(
        chat_template=template,
        chat_template_content_format=options.chat_template_content_format,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        enable_auto_tool_choice=options.enable_auto_tool_choice,
        exclude_tools_when_tool_choice_none=options.exclude_tools_when_tool_choice_none,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser or "",
    )


def _check_parsers(options: argparse.Namespace) -> None:
    """Load plugins, and check the parsers' names. Importing the parsers takes a while."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for plugin, load in (
        (options.tool_parser_plugin, ToolParserManager.import_tool_parser),
        (getattr(options, "reasoning_parser_plugin", None), ReasoningParserManager.import_reasoning_parser),
    ):
        if plugin:
            load(plugin)
    _check_name("--tool-call-parser", options.tool_call_parser, ToolParserManager.list_registered())
    _check_name("--reasoning-parser", options.reasoning_parser, ReasoningParserManager.list_registered())


def _check_name(option: str, name: str | None, known: Sequence[str]) -> None:
    if name and name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option}: vLLM has no parser {name!r}{hint}")


def server_options(options: argparse.Namespace) -> list[str]:
    """The same options for vLLM's own server on this engine (`--openai`)."""
    found = []
    for name in ("chat_template", "chat_template_content_format", "tool_call_parser", "tool_parser_plugin"):
        if value := getattr(options, name):
            found += [f"--{name.replace('_', '-')}", value]
    if options.default_chat_template_kwargs is not None:
        found += ["--default-chat-template-kwargs", json.dumps(options.default_chat_template_kwargs)]
    for name in ("enable_auto_tool_choice", "exclude_tools_when_tool_choice_none"):
        if getattr(options, name):
            found.append(f"--{name.replace('_', '-')}")
    if options.reasoning_parser:
        found.append(f"--structured-outputs-config.reasoning_parser={options.reasoning_parser}")
    return found
