"""The pages of the command line, from the parsers: `tracewire`'s own commands, and `tracewire engine`."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Iterator

from tracewire.cli.main import build_parser

HEAD = """# Commands

Every command of `tracewire`, generated from the parsers: what `tracewire COMMAND --help` prints. `--url` may be left
out where the environment variable `TRACEWIRE_URL` is set. [The command line](../cli.md) explains the commands, and
[the engine](engine-command.md) has a page of its own.
"""
ENGINE_HEAD = """# `tracewire engine`

Generated from the parser. Beside the options below, the command takes every option of vLLM's engine, such as
`--max-model-len` or `--tensor-parallel-size`.
"""


def pages() -> dict[str, str]:
    """The pages, by their paths on the site."""
    return {"reference/commands.md": _commands(), "reference/engine-command.md": _engine()}


def _commands() -> str:
    sections = [HEAD]
    for name, parser in _leaves("tracewire", build_parser()):
        parts = (f"## `{name}`", _described(parser), _usage(parser), _table(parser._actions), _epilog(parser))
        sections.append("\n\n".join(part for part in parts if part))
    return "\n".join(sections)


def _engine() -> str:
    from tracewire_engine.launch.chat_options import add_chat_options
    from tracewire_engine.launch.options import add_options

    parser = argparse.ArgumentParser(prog="tracewire engine", add_help=False)
    add_options(parser.add_argument_group("Options of Tracewire"), {})
    add_chat_options(parser.add_argument_group("Chats"))
    groups = [group for group in parser._action_groups if group._group_actions]
    return "\n".join([ENGINE_HEAD, *(f"## {group.title}\n\n{_table(group._group_actions)}" for group in groups)])


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands below a parser, by their whole names: those that have no further subcommands."""
    choices = _subcommands(parser)
    if not choices:
        yield name, parser
    for word, below in choices.items():
        yield from _leaves(f"{name} {word}", below)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _described(parser: argparse.ArgumentParser) -> str:
    text = _plain(parser.description or "")
    return text[:1].upper() + text[1:]


def _usage(parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").replace("[-h] ", "").split())
    lines = textwrap.wrap(usage, 88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", *lines, "```"])


def _table(actions: Iterable[argparse.Action]) -> str:
    """A table of arguments; empty for none."""
    rows = [_row(action) for action in actions if _is_shown(action)]
    return "\n".join(["| argument | meaning |", "| --- | --- |", *rows, ""]) if rows else ""


def _epilog(parser: argparse.ArgumentParser) -> str:
    return f"\n```text\n{parser.epilog.strip()}\n```\n" if parser.epilog else ""


def _is_shown(action: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return action.help is not argparse.SUPPRESS and not isinstance(action, hidden)


def _row(action: argparse.Action) -> str:
    value = _value(action)
    names = [f"`{f'{name} {value}'.strip()}`" for name in action.option_strings] or [f"`{value}`"]
    return f"| {', '.join(names)} | {_plain(action.help or '')}{_default(action)} |"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    name = metavar if isinstance(metavar, str) else " ".join(metavar)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _default(action: argparse.Action) -> str:
    """The default, as a remark; empty where there is none, or where the help says it."""
    if action.default in (None, "", [], False, argparse.SUPPRESS) or "default" in (action.help or ""):
        return ""
    return f" (default: `{action.default}`)"


def _plain(text: str) -> str:
    """A parser's text as Markdown in a table."""
    text = re.sub(r"\s+", " ", text.replace("%%", "%")).strip()
    return re.sub(r"([|*_<\[\]])", r"\\\1", text)
