"""Help for `tracewire engine`, and checks of its arguments, without vLLM: importing vLLM takes many seconds.

The names of vLLM's options are read from the source text of the installed vLLM. A name that is not there is refused at
once, and so is a wrong value of one of Tracewire's options. vLLM's parser checks the values of its own options later.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from tracewire_bus.domain.limit_table import parse_limits

from .chat_options import add_chat_options
from .options import add_options, redis_url
from .vllm_versions import unknown_vllm

__all__ = ["checked", "help_parser", "print_help", "vllm_options"]

_PROG = "tracewire engine"
_DESCRIPTION = (
    "Serve a model to the bus. Besides the options below the command takes every option of vLLM's engine: "
    "--help-vllm lists them."
)
_EXITS = (
    "Exit statuses: 0 after a drain; 1 if vLLM died and is not restarted, or the hub with the model cannot be reached; "
    "2 if the command refuses its settings; "
    "128 + N if signal N killed the adapter. Example: tracewire engine demo --url redis://localhost"
)
_VLLM_HELP = "--help-vllm"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage has too many options to read."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def help_parser() -> argparse.ArgumentParser:
    """The parser whose help `tracewire engine --help` prints: of Tracewire's options alone."""
    parser = _Parser(
        prog=_PROG, usage=f"{_PROG} MODEL [options] [options of vLLM's engine]", description=_DESCRIPTION, epilog=_EXITS
    )
    what = "print vLLM's options, or those of a group or with a word in their names, or all; imports vLLM"
    parser.add_argument(_VLLM_HELP, nargs="?", metavar="GROUP|WORD|all", help=what)
    add_options(parser.add_argument_group("tracewire"), {})
    add_chat_options(parser.add_argument_group("chats"))
    return parser


def print_help(arguments: Sequence[str]) -> bool:
    """Print the help that the arguments ask for. Returns whether they ask for any."""
    for number, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            help_parser().print_help()
            return True
        option, equals, word = argument.partition("=")
        if option in (_VLLM_HELP, "--help"):
            following = arguments[number + 1 : number + 2]
            _print_vllm_help(word if equals else "".join(following) or "all")
            return True
    return False


def _print_vllm_help(word: str) -> None:
    # Imported here, since it takes many seconds.
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog=_PROG, add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    FlexibleArgumentParser._search_keyword = word
    print(parser.format_help())


def vllm_options() -> frozenset[str]:
    """The names of the options of vLLM's engine, read from its source. Empty if it cannot be known without vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None or entry_points(group="vllm.platform_plugins"):
        # A platform that is a plugin may add options.
        return frozenset()
    try:
        text = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()
    except OSError:
        return frozenset()
    names = set(re.findall(r'"(--[a-z][\w-]*)"', text))
    return frozenset(names | {name.replace("--", "--no-", 1) for name in names})


def checked(arguments: Sequence[str], secrets: Mapping[str, str] = MappingProxyType({})) -> argparse.Namespace:
    """Check what can be checked without vLLM, and return the values of Tracewire's options.

    Exits the process with status 2 if an option is unknown or has a wrong value, or if the model or the URL is missing.
    """
    parser = _Parser(prog=_PROG, add_help=False, allow_abbrev=False)
    add_options(parser.add_argument_group("tracewire"), secrets, model=False)
    add_chat_options(parser.add_argument_group("chats"))
    options, more = parser.parse_known_args([_dashed(argument) for argument in arguments])
    if refused := _unknown(more, parser):
        parser.error(refused)
    if not options.unknown_vllm and (refused := unknown_vllm()):
        parser.error(refused)
    if any(argument.partition("=")[0] == "--config" for argument in more):
        # vLLM's parser reads further options from that file.
        return options
    if all(argument.startswith("-") for argument in more):
        parser.error("MODEL is missing: a Hugging Face model's folder or name, or 'demo'")
    if refused := _missing_folder(arguments[0]):
        parser.error(refused)
    try:
        redis_url(options)
        parse_limits(options.limit)
    except ValueError as error:
        parser.error(str(error))
    return options


def _missing_folder(model: str) -> str:
    """An error about a `MODEL` that is written as a path and holds no model, or `""`."""
    if not model.startswith(("./", "../", "/", "~")):
        return ""
    folder = Path(model)
    if not folder.exists():
        return f"MODEL: {model} does not exist"
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "params.json")):
        return f"MODEL: the folder {model} has no config.json, so it is no model's"
    return ""


def _dashed(argument: str) -> str:
    """An option as vLLM's parser reads it: with dashes in place of underscores, up to a dot."""
    if not argument.startswith("--"):
        return argument
    option, equals, value = argument.partition("=")
    name, dot, key = option.partition(".")
    return f"{name.replace('_', '-')}{dot}{key}{equals}{value}"


def _unknown(more: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """An error about the first option that is neither Tracewire's nor vLLM's, or `""`."""
    theirs = vllm_options()
    known = theirs | parser._option_string_actions.keys()
    for argument in more if theirs else ():
        if argument == "--":
            break
        name = re.split(r"[=.]", argument, maxsplit=1)[0]
        # argparse takes an unambiguous beginning of a name, too.
        if name.startswith("--") and not any(one.startswith(name) for one in known):
            near = get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"neither Tracewire nor vLLM's engine has an option {name}{hint}"
    return ""
