"""How subcommands are declared, and the page that lists them."""

from __future__ import annotations

import argparse
import re

import pytest

from tests.support import ROOT
from tests.support.command_page import page
from tracewire.cli.commands import EXITS, Parser, add_command, add_group, exits_of, positive, subparsers_of
from tracewire.cli.main import build_parser, main


async def nothing(options: argparse.Namespace) -> int:
    return 0


def test_help_has_examples_to_copy_and_exit_statuses() -> None:
    parser = Parser(prog="tracewire")
    commands = parser.add_subparsers()
    added = add_command(
        commands,
        "do",
        nothing,
        parents=(),
        help="do a thing",
        exits={3: "some were not done"},
        examples=(f"tracewire do {'x' * 200}",),
        json="an object",
    )
    text = added.format_help()
    assert "Do a thing." in text
    assert f"example: tracewire do {'x' * 200}\n" in text
    assert re.search(r"exit\s+status:\s+0: .* 1: .* 2: .* 3:\s+some\s+were\s+not\s+done", text, re.DOTALL)
    assert "print an object" in text
    assert exits_of(added) == {0: EXITS[0], 1: EXITS[1], 2: EXITS[2], 3: "some were not done"}


def test_an_error_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tracewire x")
    parser.add_argument("--number", type=int)
    for words in (["--number", "y"], ["--numb", "3"]):
        with pytest.raises(SystemExit) as left:
            parser.parse_args(words)
        assert left.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("tracewire x: error: ")
        assert error.endswith("(see tracewire x --help)\n")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "tracewire: error: no command is called 'rnu'; did you mean run? (see tracewire --help)"),
        (["engin", "demo"], "no command is called 'engin'; did you mean engine?"),
        (["xyzzy"], "no command is called 'xyzzy'; expected one of up, run, chat, "),
        (["edits", "instal"], "tracewire edits: error: no action is called 'instal'; did you mean install?"),
        (
            ["run", "demo", "hi", "--max-token", "5"],
            "tracewire run: error: unrecognized arguments: --max-token 5; did you mean --max-tokens?",
        ),
        (["run", "demo", "hi", "there"], "tracewire run: error: unrecognized arguments: there (see tracewire run"),
        (["ready", "--model", "\udcff"], r"expected arguments in UTF-8, got '\udcff'"),
    ],
)
def test_a_misspelt_word_is_told_with_the_nearest(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", str(1 << 31)])
def test_a_number_of_things_is_a_positive_integer(text: str) -> None:
    assert positive("32") == 32
    with pytest.raises(argparse.ArgumentTypeError, match="expected a positive integer"):
        positive(text)


def test_groups_have_subcommands() -> None:
    parser = Parser(prog="tracewire")
    commands = parser.add_subparsers()
    actions = add_group(commands, "many", "many things")
    add_command(actions, "a", nothing, parents=(), help="a")
    add_command(commands, "b", nothing, parents=(), help="b")
    assert list(subparsers_of(parser)) == ["many a", "b"]


def test_every_command_has_help_for_all_of_its_options() -> None:
    for name, parser in subparsers_of(build_parser()).items():
        assert parser.description, name
        for action in parser._actions:
            assert action.help or not action.option_strings, f"{name} {action.dest}"


def test_every_command_that_prints_data_prints_json() -> None:
    """The others serve, print code for a shell, or change something without a word."""
    without = {
        name for name, parser in subparsers_of(build_parser()).items() if "--json" not in parser._option_string_actions
    }
    assert without == {"acl", "completion", "dead drop", "edits remove", "gateway", "keys revoke", "redis"}


def test_the_page_lists_every_command_with_its_exit_statuses() -> None:
    """`python -m tests.support.command_page` writes the table anew."""
    found = (ROOT / "docs" / "cli.md").read_text()
    assert found == page(found)


def test_a_number_that_is_none_is_refused_with_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="do")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--speed", type=float)
    parser.add_argument("--count", type=positive)
    assert vars(parser.parse_args(["--seed", "-3", "--speed", "0.5"])) == {"seed": -3, "speed": 0.5, "count": None}
    for option, says in [
        ("--seed=x", "argument --seed: expected a whole number, got 'x'"),
        ("--speed=x", "argument --speed: expected a number, got 'x'"),
        ("--count=0", "argument --count: expected a positive integer, got 0"),
    ]:
        with pytest.raises(SystemExit):
            parser.parse_args([option])
        assert says in capsys.readouterr().err
