"""What the pages say is there is there: code that compiles, names, calls, commands, options, files, tests and links."""

from __future__ import annotations

import ast
import codeop
import functools
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracewire
from tests.support.cells import blocks
from tests.support.documented import CODE_RUN_BY, RUN_BY, RUN_BY_NONE
from tests.support.documented import commands as documented
from tracewire.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
REFERENCE = ROOT / "docs" / "reference"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

#: What these names stand for in the pages' code.
HANDLES = {
    "client": tracewire.Client,
    "edits": tracewire.Edits,
    "model": tracewire.Model,
    "trace": tracewire.Trace,
    "tracewire": tracewire,
}
#: Options of programs that are not ours.
FOREIGN = {
    *("--api-key", "--ssl-certfile", "--ssl-keyfile"),  # of vLLM's HTTP server
    *("--address", "--head", "--num-cpus"),
    *("--max-connections",),  # of Inspect
    *("--factory", "--timeout-graceful-shutdown", "--workers"),
    *("--from-file", "--from-literal", "--scale", "--strict", "--target", "--wait"),
}
#: nnsight's own tests, which docs/nnsight.md and docs/edits.md compare with (tests/test_nnsight_page.py sees to ours).
NNSIGHT_PAGES = ("nnsight.md", "edits.md")


@functools.cache
def files() -> list[str]:
    """What is in the repository, by path."""
    folders = ("benchmarks", "bus", "deploy", "docs", "engine_adapter", "examples", "locks", "sdk", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in [*found, *ROOT.glob("*.*")] if "__pycache__" not in path.parts]


@functools.cache
def options() -> set[str]:
    """The options that our programs take, vLLM's engine's among them."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    sources = [ROOT / path for path in files() if path.endswith(".py")]
    sources.append(Path(spec.origin).parent / "engine" / "arg_utils.py")
    return {option for path in sources for option in re.findall(r'"(--[a-z][\w-]+)"', path.read_text())}


def commands(page: Path) -> Iterator[list[str]]:
    """Each `tracewire` command in a block of the page, or between backticks, as it would be typed."""
    text = page.read_text()
    lines = re.findall(r"^(?:    )?(tracewire [a-z].*)$", text, re.MULTILINE)
    for line in [*lines, *re.findall(r"`(tracewire [a-z][^`]*)`", text)]:
        yield shlex.split(re.sub(r" \[any option.*|[\[\]]", "", line.replace("\n", " ")), comments=True)[1:]


@each_page
def test_code_compiles_and_calls_what_there_is(page: Path) -> None:
    for text in blocks(page, "python"):
        code = compile(text, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(code):
            match node:
                case ast.ImportFrom(module="tracewire", names=names):
                    assert [one.name for one in names if not hasattr(tracewire, one.name)] == []
                case ast.Call(func=ast.Attribute(value=ast.Name(id=handle), attr=name), keywords=keywords) if (
                    handle in HANDLES and handle != "model"
                ):
                    called = getattr(HANDLES[handle], name)
                    taken = inspect.signature(called).parameters
                    if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
                        assert {one.arg for one in keywords} <= taken.keys(), f"{handle}.{name}"
                case ast.Attribute(value=ast.Name(id="tracewire"), attr=name):
                    assert hasattr(tracewire, name), name


def test_the_tutorial_s_code_can_be_pasted_into_a_prompt() -> None:
    """`python -m asyncio` reads a line at a time: after a loop it wants an empty line."""
    prompt = codeop.CommandCompiler()
    prompt.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for text in blocks(ROOT / "docs" / "tutorial.md", "python"):
        lines: list[str] = []
        # Enter, at the end.
        for line in [*text.splitlines(), ""]:
            lines.append(line)
            if prompt("\n".join(lines)) is not None:
                lines = []
        assert lines == [], text


@each_page
def test_calls_in_the_text_are_there(page: Path) -> None:
    for handle, name in re.findall(r"`(?:await )?(client|edits|trace)\.(\w+)\(", page.read_text()):
        blocking = handle == "client" and hasattr(tracewire.blocking.Client, name)
        assert blocking or hasattr(HANDLES[handle], name), f"{handle}.{name}"


@each_page
def test_commands_are_there_with_their_options(page: Path) -> None:
    actions = next(action for action in build_parser()._actions if action.choices)
    assert isinstance(actions.choices, dict)
    for words in commands(page):
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[0] == "engine":
            assert given <= options(), words
            continue
        parser = actions.choices[words[0].partition("|")[0]]
        nested = next((action.choices for action in parser._actions if isinstance(action.choices, dict)), None)
        if nested is not None and len(words) > 1:
            names = words[1].split("|")
            assert set(names) <= nested.keys(), words
            parser = nested[names[0]]
        assert given <= parser._option_string_actions.keys(), words


@each_page
def test_options_modules_and_targets_are_there(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= options() | FOREIGN
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


@each_page
def test_variables_of_the_environment_are_read_somewhere(page: Path) -> None:
    sources = "\n".join((ROOT / path).read_text() for path in files() if path.endswith((".py", ".sh", ".yaml")))
    for name in re.findall(r"\b(?:TRACEWIRE|CHAT)_[A-Z_]+\b", page.read_text()):
        assert name in sources, name


@each_page
def test_files_and_tests_are_there(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml|sh|acl|html|json|npy|txt))`", text):
        if page.name in NNSIGHT_PAGES and re.search(r"test_\w+\.py|redteam", name):
            continue
        assert any(path == name or path.endswith(f"/{name}") for path in files()), name
    tests = "\n".join((ROOT / path).read_text() for path in files() if path.startswith("tests/"))
    for name in re.findall(r"::(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_tests_that_the_page_of_security_names_are_in_the_files_that_it_names() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 60
    for path, name in named:
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), (path, name)


def test_the_tests_that_the_page_of_edits_names_are_there() -> None:
    text = (ROOT / "docs" / "edits.md").read_text()
    files_by_letter = dict(re.findall(r"`(\w)` is `(tests/[\w/]+\.py)`", text))
    assert set(files_by_letter) == {"E", "O"}
    named = re.findall(r"\b([EO]) ((?:`\w+`(?:, )?)+)", text)
    assert len(named) > 10
    for letter, names in named:
        source = (ROOT / files_by_letter[letter]).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert f"def test_{name}(" in source, f"{letter} {name}"


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if REFERENCE in there.parents:
            # Generated with the site, whose links tests/test_site.py follows.
            continue
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings], target


def test_each_cell_of_the_comparison_has_its_evidence() -> None:
    """Each of our cells leads to what shows it, or says no, and no cell is empty."""
    lines = (ROOT / "docs" / "comparison.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [row for row in rows if row[1] not in ("Tracewire", "---")]
    assert len(rows) > 40
    for feature, ours, *others in rows:
        assert len(others) == 6, feature
        assert all([feature, ours, *others]), feature
        assert "](" in ours or ours.startswith("**no**"), feature


def longest_start(command: str) -> str:
    """The entry of the tables that a command falls under, or an empty text."""
    starts = [start for start in (*RUN_BY, *RUN_BY_NONE) if command.startswith(start)]
    return max(starts, key=len, default="")


def is_there(test: str) -> bool:
    """Whether there is a test `FILE::NAME`, or for `FILE::*` its file."""
    path, _, name = test.partition("::")
    source = (ROOT / path).read_text()
    return name == "*" or re.search(rf"^(async )?def {name}\(", source, re.MULTILINE) is not None


@each_page
def test_each_command_is_run_by_a_test_or_it_is_said_why_not(page: Path) -> None:
    for command in documented(page.read_text()):
        start = longest_start(command)
        assert start, f"no test runs {command!r}: add it to tests/support/documented.py, with the test or the reason"
        if start in RUN_BY_NONE:
            print(f"no test runs {command!r}: {RUN_BY_NONE[start]}")


def test_each_command_of_the_table_is_in_the_pages_and_its_test_is_there() -> None:
    used = {longest_start(command) for page in PAGES for command in documented(page.read_text())}
    assert {*RUN_BY, *RUN_BY_NONE} - used == set()
    assert not RUN_BY.keys() & RUN_BY_NONE.keys()
    for start, test in RUN_BY.items():
        if not test:
            assert start.startswith("python -m pytest tests/")
            continue
        assert is_there(test), test


def test_the_code_of_each_page_is_run_by_a_test() -> None:
    assert {str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")} == CODE_RUN_BY.keys()
    for test in (test for tests in CODE_RUN_BY.values() for test in tests):
        assert is_there(test), test


def test_a_command_that_no_test_runs_is_found() -> None:
    text = "```\nexport A=b\nX=$(curl -s there | jq -r .id)\nfrobnicate --hard  # at night\n```\n"
    text += "\n    python -m \\\n        this &\n"
    assert list(documented(text)) == ["curl -s there | jq -r .id", "frobnicate --hard", "python -m this"]
    assert longest_start("frobnicate --hard") == ""
    assert longest_start("python -m benchmarks.bus --rate 300 --sweep --seconds 6").endswith("--sweep")


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("demo", "examples/demo/run.py"),
        ("demo JSON=1", "examples/demo/run.py --json"),
        ("test WORKERS=2", '-m pytest -q -m "not full" -n 2 --dist loadfile --no-loadscope-reorder'),
        ("test ARGS=-x", '-m pytest -q -m "not full" -x'),
        ("test-full", "-m pytest -q"),
        ("test WORKERS=0", '-m pytest -q -m "not full"'),
        (
            "test-engineless WORKERS=2",
            '-m pytest -q -m "not full and not engine" -n 2 --dist loadfile --no-loadscope-reorder',
        ),
        ("bench", "-m benchmarks.blobs"),
        ("docs", "-m mkdocs build --strict"),
        ("docs-serve", "-m mkdocs serve"),
        ('faults JSON=1 ARGS="--trials 3"', "-m tests.faults.harness --json --trials 3"),
    ],
)
def test_what_make_runs(target: str, runs: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", *shlex.split(target)]
    # Without what make itself hands down, where it runs the tests.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
    }
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout
    assert said.rstrip().endswith(f"/python {runs}"), said
