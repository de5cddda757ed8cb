"""A block's source text is what stands in its file, cut out and dedented, or is refused at its line."""

# ruff: noqa: C416, E702, E731, F821

from __future__ import annotations

import functools
import linecache
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracewire
from tests.support.captured import run, variables, written
from tracewire import BlockError, intervention

HERE = Path(__file__)


SCALE = 3


def line_of(text: str) -> int:
    """The line of this file that holds `text` (with the mark that the tests put at its end)."""
    found = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# mark: {text}")]
    assert len(found) == 1, text
    return found[0]


@intervention
def plain(model, tracer, live):
    """What it is for."""
    first = 1  # mark: plain first
    # A comment stays.
    second = first + 1


def test_body_is_the_exact_text_at_its_own_lines() -> None:
    block = plain.block()
    assert block.name == "plain"
    assert block.filename == str(HERE)
    assert block.parameters == ("model", "tracer", "live")
    lines = block.source.splitlines()
    assert lines[0] == '"""What it is for."""'
    assert lines[1] == "first = 1  # mark: plain first"
    assert lines[2] == "# A comment stays."
    assert block.first_line + 1 == line_of("plain first")
    assert run(block)["second"] == 2
    assert variables(block) == {}
    assert not block.helpers
    assert not block.modules
    assert not block.imports


def test_parameters_may_be_called_anything() -> None:
    @intervention
    def watch(m, /, t, steering, *, factor=2):
        out = (m, t, steering, factor)

    block = watch.block()
    assert block.parameters == ("m", "t", "steering")
    assert run(block, 1, 2, 3)["out"] == (1, 2, 3, 2)


def test_multi_line_strings_keep_their_text_and_continuations_their_meaning() -> None:
    # fmt: off
    @intervention
    def watch(model, tracer, live):
        text = """one
    two
            three
"""
        joined = "a\
 b"
        total = (1 +
    2
                 + 3)
    # a comment at the margin
        if total:
            other = [
  4,
            ]
        escaped = f"""{total}
        end"""
    # fmt: on
    scope = run(watch.block())
    assert scope["text"] == "one\n    two\n            three\n"
    assert scope["joined"] == "a b"
    assert scope["total"] == 6
    assert scope["other"] == [4]
    assert scope["escaped"] == "6\n        end"


def test_body_on_the_line_of_the_def() -> None:
    # fmt: off
    @intervention
    def watch(model, tracer, live): a = "é"; b = [a,
                                                  2]
    # fmt: on
    assert run(watch.block())["b"] == ["é", 2]


def test_body_in_tabs_and_with_a_form_feed(tmp_path: Path) -> None:
    head = "from tracewire import intervention\n\x0c\n@intervention\ndef watch(model, tracer, live):\n"
    source = head + "\tif model:\n\t\ta = 1\n\tb = 2\n"
    module = written(tmp_path, source)
    assert module.watch.first_line == 5
    assert run(module.watch.block(), model=True)["a"] == 1


def test_body_that_begins_with_a_decorated_function() -> None:
    @intervention
    def watch(model, tracer, live):
        @functools.cache
        def square(x):
            return x * x

        out = square(3)

    block = watch.block()
    assert block.source.startswith("@functools.cache")
    assert block.modules == {"functools": "functools"}
    assert run(block)["out"] == 9


def noted(**notes: Any) -> Callable[[Any], Any]:
    def keep(made: Any) -> Any:
        made.notes = notes
        return made

    return keep


# A comment above.
@noted(
    key="a value",
    # between the lines of a decorator
    other=[1, 2],
)
# A comment between decorators.
@tracewire.intervention
# A comment under them.
def decorated(
    model,
    tracer,
    live,
    amount=2,  # a default
):
    # A comment before the first statement.
    out = amount * 2


def test_decorators_of_many_lines_and_comments_between_them() -> None:
    assert decorated.notes == {"key": "a value", "other": [1, 2]}
    assert decorated(amount=4).notes == decorated.notes
    assert run(decorated.block())["out"] == 4
    assert run(decorated(amount=5).block())["out"] == 10


class Watches:
    @intervention
    def bare(model, tracer, live):
        out = SCALE

    @staticmethod
    @intervention
    def inside(model, tracer, live):
        out = SCALE + 1

    @intervention
    @staticmethod
    def outside(model, tracer, live):
        out = SCALE + 2


def test_functions_of_a_class() -> None:
    assert run(Watches.bare.block())["out"] == 3
    assert run(Watches().bare.block())["out"] == 3
    assert run(Watches.inside.block())["out"] == 4
    assert run(Watches().outside.block())["out"] == 5


def test_source_of_a_notebook_cell() -> None:
    name = "/tmp/ipykernel_1/cell.py"
    text = "factor = 4\n\n@intervention\ndef watch(model, tracer, live):\n    out = factor * helper(2)\n"
    text += "\ndef helper(x):\n    return x + 1\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"intervention": intervention, "__name__": "__main__"}
    try:
        exec(compile(text, name, "exec"), namespace)
        block = namespace["watch"].block()
    finally:
        del linecache.cache[name]
    assert block.filename == name
    assert block.first_line == 5
    assert run(block)["out"] == 12


def test_body_need_not_be_runnable_here() -> None:
    @intervention
    def watch(model, tracer, live):
        import no_such_module_here
        from another_missing import thing as renamed

        out = no_such_module_here.call(renamed)

    block = watch.block()
    assert "import no_such_module_here" in block.source
    assert not block.modules
    assert not block.imports


def test_nested_functions_comprehensions_lambdas_walrus_and_classes_in_the_body() -> None:
    threshold = 2

    @intervention
    def watch(model, tracer, live, items=(1, 2, 3)):
        def generate(upper):
            def inner(x: Unknown = 0) -> AlsoUnknown:
                yield x
                return

            total = 0

            def count():
                nonlocal total
                total += 1
                return total

            for value in range(upper):
                count()
                yield from inner(value)

        async def never():
            await something_local

        something_local = None
        kept = [y for x in items if (y := x * 2) > threshold]
        double = lambda x, *, k=SCALE: x * k + last
        last = y
        table = {a: b for a, b in zip(kept, generate(9), strict=False)}
        note: NeverEvaluated = "annotation"

        class Point:
            size = threshold
            doubled = size * 2

            def area(self):
                return self.size * last

        out = (kept, double(1), table, Point().area(), Point.doubled, note)

    block = watch.block()
    assert set(variables(block)) == {"items", "threshold", "SCALE"}
    assert run(block)["out"] == ([4, 6], 9, {4: 0, 6: 1}, 12, 4, "annotation")


BODIES = {
    "return": "return",
    "return value": "x = 1\nreturn x",
    "yield": "x = yield",
    "yield from": "yield from []",
    "nonlocal": "nonlocal outer\nouter = 2",
    "global": "global HERE\nHERE = 1",
    "return in a branch": "if live:\n    for _ in []:\n        return",
    "return in with": "with tracer:\n    return",
    "yield in a default": "def f(x=(yield)):\n    pass",
    "yield in a call": "print((yield 1))",
    "global in a nested def": "def f():\n    global HERE\n    HERE = 1",
    "nonlocal in a nested def": "x = 1\ndef f():\n    nonlocal x\n    x = 2",
}


LINES = {
    "return value": 2,
    "return in a branch": 3,
    "return in with": 2,
    "global in a nested def": 2,
    "nonlocal in a nested def": 3,
}


@pytest.mark.parametrize("case", BODIES)
def test_statements_that_no_block_can_have(case: str, tmp_path: Path) -> None:
    body = textwrap.indent(BODIES[case], "        ")
    head = "from tracewire import intervention\ndef make():\n    outer = 1\n    @intervention\n"
    source = f"{head}    def watch(model, tracer, live):\n{body}\nmake()\n"
    with pytest.raises(BlockError) as caught:
        written(tmp_path, source)
    assert caught.value.filename == str(tmp_path / "written.py")
    assert caught.value.line == 5 + LINES.get(case, 1)
    assert str(caught.value).startswith(f"{caught.value.filename}:{caught.value.line}: a block cannot ")
    assert caught.value.field == "block"


SIGNATURES = {
    "async def watch(model, tracer, live):\n    await model": "coroutine function",
    "def watch(model, tracer):\n    pass": "three parameters first",
    "def watch():\n    pass": r"\(these are positional here: none\)",
    "def watch(*args):\n    pass": r"not by \*args",
    "def watch(self, model, tracer, live):\n    pass": "not a method",
    "def watch(model, tracer, *, live):\n    pass": "three parameters first",
    "def watch(model, tracer, amount=1):\n    pass": "'amount' is bound by the engine and has no default",
}


@pytest.mark.parametrize("source", SIGNATURES)
def test_signatures_that_no_block_can_have(source: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=SIGNATURES[source]) as caught:
        written(tmp_path, f"from tracewire import intervention\n@intervention\n{source}\n")
    assert caught.value.line == 3


def test_source_that_cannot_be_read() -> None:
    namespace: dict[str, Any] = {"intervention": intervention}
    with pytest.raises(BlockError, match="define it in a file or in a notebook's cell"):
        exec("@intervention\ndef watch(model, tracer, live):\n    pass\n", namespace)


def test_a_file_that_changed_since_it_was_imported(tmp_path: Path) -> None:
    module = written(tmp_path, "def use():\n    return 1\n", "changing")
    use = module.use
    (tmp_path / "changing.py").write_text("# now a line more\n\ndef use():\n    return 2\n")

    @intervention
    def watch(model, tracer, live):
        out = use()

    with pytest.raises(BlockError, match="has changed since it was imported"):
        watch.block()


def test_a_function_in_the_body_may_be_called_as_a_symbol_table_is() -> None:
    """Python's symbol tables take the names of any function called `top` for those of the module."""

    @intervention
    def watch(model, tracer, live):
        def top(stream, count=2):
            found = stream.topk(count)
            import math

            return math.floor(found.values[0]) + scale

        total = top(model.residual(0).output)

    scale = 3
    assert set(watch._source.free_names) == {"scale"}
