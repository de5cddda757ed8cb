"""A block travels as source with everything that it uses, or is refused naming the line or the variable."""

# The functions here are what people write, names that exist on the engine only included.
# ruff: noqa: B006, B008, B023, C416, E702, E731, F821

from __future__ import annotations
import __future__

import collections
import enum
import functools
import importlib
import inspect
import linecache
import math
import sys
import textwrap
import threading
import types
import xml.dom.minidom
from collections.abc import Callable
from math import sqrt as root
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import stack

import tracewire
from tracewire import BlockError, TraceRejected, UntransportableVariable, intervention
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack

if TYPE_CHECKING:
    import somewhere_else_entirely as elsewhere
    from engine_only import probe as remote_probe

HERE = Path(__file__)
SCALE = 3
LIMITS = {"low": 0.5, "high": [1, 2]}
DIRECTION = np.arange(4, dtype=np.float32)
Alias = collections.OrderedDict


def run(block: Block, model: Any = None, tracer: Any = None, live: Any = None) -> dict[str, Any]:
    """The block as an engine runs it: its statements at the top level of one scope. Returns what the scope holds."""
    flags = __future__.annotations.compiler_flag

    def compiled(source: str, first_line: int, filename: str) -> types.CodeType:
        return compile("\n" * (first_line - 1) + source, filename, "exec", flags=flags, dont_inherit=True)

    scope: dict[str, Any] = {"__name__": f"block.{block.name}"}
    for name, module in block.modules.items():
        scope[name] = importlib.import_module(module)
    for name, (module, path) in block.imports.items():
        scope[name] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    scope.update(zip(block.parameters, (model, tracer, live), strict=True))
    scope.update(unpack(block.variables))
    shared = dict(scope)
    for helper in block.helpers:
        exec(compiled(helper.source, helper.first_line, helper.filename), shared)
    for helper in block.helpers:
        scope[helper.name] = shared[helper.name]
    exec(compiled(block.source, block.first_line, block.filename), scope)
    return scope


def line_of(text: str) -> int:
    """The line of this file that holds `text` (with the mark that the tests put at its end)."""
    found = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# mark: {text}")]
    assert len(found) == 1, text
    return found[0]


def variables(block: Block) -> dict[str, Any]:
    values = unpack(block.variables)
    assert isinstance(values, dict)
    return values


def written(folder: Path, source: str, name: str = "written") -> types.ModuleType:
    """A module of the user's own, made of `source`."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


# --- the source -------------------------------------------------------------------------------------------------------


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


def test_imports_that_only_a_type_checker_runs_travel_by_name() -> None:
    @intervention
    def watch(model, tracer, live):
        out = elsewhere.score(remote_probe)

    block = watch.block()
    assert block.modules == {"elsewhere": "somewhere_else_entirely"}
    assert block.imports == {"remote_probe": ("engine_only", "probe")}


def test_modules_that_every_engine_has_need_no_import(tmp_path: Path) -> None:
    module = written(
        tmp_path,
        """
        from tracewire import intervention

        @intervention
        def watch(model, tracer, live):
            kept = nnsight.save([])
            kept.append(torch.zeros(2))
        """,
    )
    assert module.watch.block().modules == {"nnsight": "nnsight", "torch": "torch"}


# --- scopes -----------------------------------------------------------------------------------------------------------


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


def test_shadowed_names_are_not_captured() -> None:
    @intervention
    def watch(model, tracer, live):
        SCALE = 10
        DIRECTION = [LIMITS for LIMITS in range(3)]
        out = (lambda root: root + SCALE)(1)

    block = watch.block()
    assert variables(block) == {}
    assert not block.imports
    assert run(block)["out"] == 11


def test_a_global_that_shadows_a_builtin_wins(tmp_path: Path) -> None:
    module = written(
        tmp_path,
        """
        from tracewire import intervention

        max = 7
        length = len

        @intervention
        def watch(model, tracer, live):
            out = (max, length([1]), min(1, 2))
        """,
    )
    block = module.watch.block()
    assert variables(block) == {"max": 7}
    assert block.imports == {"length": ("builtins", "len")}
    assert run(block)["out"] == (7, 1, 1)


def test_names_are_looked_up_at_submission() -> None:
    value = 1

    @intervention
    def watch(model, tracer, live):
        out = value

    value = 2
    assert run(watch.block())["out"] == 2
    value = 3
    assert run(watch.block())["out"] == 3


# --- variables --------------------------------------------------------------------------------------------------------


def test_bound_variables_defaults_and_rebinding() -> None:
    @intervention
    def watch(model, tracer, live, a, b=SCALE, *, c=LIMITS):
        out = (a, b, c)

    assert run(watch(a=1).block())["out"] == (1, 3, LIMITS)
    once = watch(a=1, b=2)
    twice = once(b=5, c=None)
    assert run(once.block())["out"] == (1, 2, LIMITS)
    assert run(twice.block())["out"] == (1, 5, None)
    assert dict(twice.variables) == {"a": 1, "b": 5, "c": None}
    assert dict(watch.variables) == {}


def test_rest_of_variables_by_name_and_as_a_dict() -> None:
    threshold = "of the closure"

    @intervention
    def watch(model, tracer, live, first=0, **variables):
        out = (direction, threshold, first, sorted(variables), variables["direction"])

    block = watch(direction=1, threshold=2).block()
    assert run(block)["out"] == (1, 2, 0, ["direction", "threshold"], 1)

    @intervention
    def by_name(model, tracer, live, **variables):
        out = direction

    assert variables(by_name(direction=1).block()) == {"direction": 1}


def test_a_variable_without_a_value_is_named() -> None:
    @intervention
    def watch(model, tracer, live, direction):
        out = direction

    with pytest.raises(TraceRejected, match=r"watch\(direction=\.\.\.\)") as caught:
        watch.block()
    assert caught.value.field == "variables.direction"


def test_wrong_bindings_are_type_errors() -> None:
    @intervention
    def watch(model, tracer, live, direction=0):
        out = direction

    with pytest.raises(TypeError, match=r"takes no variable 'directoin' \(variables: direction\)"):
        watch(directoin=1)
    with pytest.raises(TypeError, match=r"by name, as in watch\(direction=\.\.\.\)"):
        watch(1)
    with pytest.raises(TypeError, match="'live' is bound by the engine"):
        watch(live=1)

    @intervention
    def rest(model, tracer, live, **variables):
        pass

    with pytest.raises(TypeError, match="no variable 'variables'"):
        rest(variables=1)
    with pytest.raises(TypeError, match="no name that a body can use"):
        rest(**{"a b": 1})


def test_values_of_all_kinds() -> None:
    array = np.arange(6).reshape(2, 3)[:, ::2]
    tensor = torch.linspace(0, 1, 5, dtype=torch.bfloat16, requires_grad=False)
    tree = {"a": [1, (2.5, None)], 3: b"x", "text": "é", "deep": {"t": torch.tensor(4.0)}}
    weights = torch.nn.Linear(2, 1).weight

    @intervention
    def watch(model, tracer, live):
        out = (array, tensor, tree, weights, DIRECTION, 2**70)

    values = variables(watch.block())
    assert np.array_equal(values["array"], array)
    assert values["tensor"].dtype == ml_dtypes.bfloat16
    assert values["tensor"].astype(np.float32).tolist() == tensor.float().tolist()
    assert values["tree"]["a"] == [1, (2.5, None)]
    assert values["tree"]["deep"]["t"].shape == ()
    assert values["weights"].shape == (1, 2)
    assert values["DIRECTION"].tolist() == [0, 1, 2, 3]


def test_many_variables() -> None:
    @intervention
    def watch(model, tracer, live, **variables):
        pass

    many = {f"v{number}": number for number in range(300)}
    assert variables(watch(**many).block()) == many


def test_the_same_block_packs_to_the_same_bytes() -> None:
    @intervention
    def watch(model, tracer, live, **variables):
        out = a + b + SCALE

    assert watch(a=1, b=2).block() == watch(b=2, a=1).block()


# --- modules and imports ----------------------------------------------------------------------------------------------


def test_modules_by_name_and_what_is_reached_through_them() -> None:
    @intervention
    def watch(model, tracer, live):
        a = np.zeros(2)
        b = F.relu(torch.ones(1))
        c = xml.dom.minidom.parseString("<a/>").documentElement.tagName
        d = math.pi

    block = watch.block()
    shown = {name: path for name, path in block.modules.items() if not name.startswith("_tw_")}
    assert shown == {"np": "numpy", "F": "torch.nn.functional", "torch": "torch", "xml": "xml", "math": "math"}
    assert "xml.dom.minidom" in block.modules.values()
    assert run(block)["c"] == "a"


def test_what_is_used_of_a_module_of_one_s_own_travels(tmp_path: Path) -> None:
    """By value and as source, as if each thing had been imported by name; the engine needs no such module."""
    below = written(tmp_path, "def root(x): return x ** 0.5", "below")
    mine = written(
        tmp_path,
        """
        import math
        import xml.dom.minidom
        import numpy as np
        SCALE = 3
        UNUSED = object()
        def halved(n): return n // 2
        def scaled(n): return scaled(halved(n)) if n > 10 else n * SCALE
        """,
        "mine",
    )
    mine.below = below

    def helper(n):
        return mine.halved(n) + mine.SCALE

    @intervention
    def watch(model, tracer, live):
        out = mine.scaled(40)
        size = mine.np.linalg.norm([3.0, 4.0])
        tag = mine.xml.dom.minidom.parseString("<a/>").documentElement.tagName
        five = mine.below.root(25)
        more = helper(mine.SCALE)

    block = watch.block()
    assert "mine" not in block.modules.values()
    held = run(block)
    assert (held["out"], held["size"], held["tag"], held["five"], held["more"]) == (30, 5.0, "a", 5.0, 4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out = mine.wrong(1)", "'mine.wrong' stands for nothing: module 'mine' has no attribute 'wrong'"),
        ("out = getattr(mine, 'f')", "'mine' is a module of your own, of which only what is used by name can travel"),
        ("mine.COUNT = 1", "a block cannot change 'mine.COUNT'"),
        ("out = mine.Own()", "'mine.Own' is a class of your own"),
        ("out = mine.lock", "'mine.lock' is of type _thread.lock"),
        ("mine.cached()", "'mine.cached' is of type functools._lru_cache_wrapper"),
        ("mine.wrapped()", r"mine.wrapped\(\) is decorated"),
    ],
)
def test_what_a_module_of_one_s_own_cannot_lend_is_refused_at_its_line(body: str, message: str, tmp_path: Path) -> None:
    mine = written(
        tmp_path,
        """
        import functools, threading
        COUNT = 0
        lock = threading.Lock()
        class Own: pass
        def f(): pass
        cached = functools.cache(f)
        @functools.wraps(f)
        def wrapped(): pass
        """,
        "mine",
    )
    source = f"""
        from tracewire import intervention
        def made(mine):
            @intervention
            def watch(model, tracer, live):
                first = 1
                {body}
            return watch
        """
    watch = written(tmp_path, source, "uses").made(mine)
    with pytest.raises(TraceRejected, match=message) as caught:
        watch.block()
    assert (caught.value.filename, caught.value.line) == (str(tmp_path / "uses.py"), 7)


def test_names_imported_from_installed_packages() -> None:
    from torch import bfloat16
    from torch.nn.functional import gelu as smooth

    kind, alias = torch.float16, torch.relu

    @intervention
    def watch(model, tracer, live, make=np.float32):
        out = (root(4), stack([torch.ones(1)]).dtype, Alias(), smooth, Path("a"), bfloat16, kind, make(1), alias)

    block = watch.block()
    assert block.imports == {
        "root": ("math", "sqrt"),
        "stack": ("torch", "stack"),
        "Alias": ("collections", "OrderedDict"),
        "smooth": block.imports["smooth"],
        "Path": ("pathlib", "Path"),
        "bfloat16": ("torch", "bfloat16"),
        "kind": ("torch", "float16"),
        "make": ("numpy", "float32"),
        "alias": ("torch", "relu"),
    }
    assert run(block)["out"][3] is smooth


def test_names_of_a_star_import(tmp_path: Path) -> None:
    source = """
        from itertools import *
        from math import *
        from tracewire import intervention

        @intervention
        def watch(model, tracer, live):
            out = (list(chain([1], [2])), floor(2.5))
        """
    block = written(tmp_path, source).watch.block()
    assert block.imports == {"chain": ("itertools", "chain"), "floor": ("math", "floor")}
    assert run(block)["out"] == ([1, 2], 2)


def test_constants_imported_from_anywhere_travel_by_value() -> None:
    from math import pi

    @intervention
    def watch(model, tracer, live):
        out = pi

    assert variables(watch.block()) == {"pi": math.pi}


# --- functions --------------------------------------------------------------------------------------------------------


def scaled(x: SomeType, factor: int = SCALE) -> SomeType:
    # A comment stays.
    return offset(x) * factor  # mark: scaled


def offset(x):
    return x + DIRECTION.shape[0] + math.floor(0.5)


def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


def even(n):
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def test_functions_that_call_functions_travel_with_what_they_use() -> None:
    @intervention
    def watch(model, tracer, live):
        out = scaled(1)

    block = watch.block()
    assert [helper.name for helper in block.helpers] == ["scaled", "offset"]
    helper = block.helpers[0]
    assert helper.source.startswith("def scaled(")
    assert "# A comment stays." in helper.source
    assert helper.first_line + 2 == line_of("scaled")
    assert helper.filename == str(HERE)
    assert run(block)["out"] == 15


def test_recursion_alone_and_with_each_other() -> None:
    @intervention
    def watch(model, tracer, live):
        out = (factorial(5), even(10))

    block = watch.block()
    assert sorted(helper.name for helper in block.helpers) == ["even", "factorial", "odd"]
    assert run(block)["out"] == (120, True)


def test_functions_defined_in_functions_keep_their_closure() -> None:
    def make(amount):
        def add(x, *, times=amount + 1):
            return x + amount if x > limit else add(x + 1) * times

        limit = 1
        return add

    plus = make(4)

    @intervention
    def watch(model, tracer, live):
        out = plus(0)

    block = watch.block()
    assert run(block)["out"] == plus(0)


def test_functions_under_another_name_and_as_variables() -> None:
    alias = factorial

    @intervention
    def watch(model, tracer, live, score):
        out = (alias(3), score(2), score(2, 2))

    block = watch(score=scaled).block()
    assert {"alias", "factorial", "score", "offset"} == {helper.name for helper in block.helpers}
    assert run(block)["out"] == (6, 18, 12)


def test_default_values_travel_as_they_were_evaluated() -> None:
    base = [1]

    # fmt: off
    def late(x, table={"k": base}, act=math.sqrt, text="kept", *, size=len(
        base
    ), then=lambda v: v + SCALE):
        return (x, table, act(4), text, size, then(1))
    # fmt: on

    base = "changed since"

    @intervention
    def watch(model, tracer, live):
        out = late(0)

    block = watch.block()
    assert run(block)["out"] == (0, {"k": [1]}, 2.0, "kept", 1, 4)
    helper = next(helper for helper in block.helpers if helper.name == "late")
    assert 'text="kept"' in helper.source
    assert helper.source.count("\n") == 4  # as many lines as it had


def test_lambdas_bound_to_names() -> None:
    power = 2
    square = lambda x: x**power
    one, two = lambda x: x + 1, lambda y, k=SCALE: y + k
    choose = lambda x: "big" if x > power else "small"
    # fmt: off
    long = (lambda
            x: [
                x,
            ])
    # fmt: on
    nested = (lambda: lambda x: x * power)()
    outer = lambda: lambda x: x * power

    @intervention
    def watch(model, tracer, live):
        out = (square(3), one(1), two(1), choose(5), long(1), nested(4), outer()(5))

    assert run(watch.block())["out"] == (9, 2, 4, "big", [1], 8, 10)


def test_lambdas_that_look_the_same_are_told_apart_or_refused() -> None:
    pair = [lambda x: x + 1, lambda x: x + 1]
    second = pair[1]

    @intervention
    def watch(model, tracer, live):
        out = second(1)

    assert run(watch.block())["out"] == 2


def test_a_generator_function_may_be_called() -> None:
    def count(n):
        yield from range(n)

    @intervention
    def watch(model, tracer, live):
        out = list(count(3))

    assert run(watch.block())["out"] == [0, 1, 2]


def test_functions_see_the_variables_and_parameters_of_the_block() -> None:
    def help_out():
        return late_bound + model.value

    @intervention
    def watch(model, tracer, live, **variables):
        out = help_out()

    block = watch(late_bound=1).block()
    assert run(block, model=types.SimpleNamespace(value=2))["out"] == 3


def test_a_name_with_two_meanings_is_refused(tmp_path: Path) -> None:
    other = written(tmp_path, "SCALE = 4\ndef use():\n    return SCALE\n", "other_module")
    use = other.use

    @intervention
    def watch(model, tracer, live):
        out = use() + SCALE

    with pytest.raises(
        BlockError, match=r"'SCALE' means 3 in watch\(\) and 4 in use\(\)|means 4 in use\(\) and 3"
    ) as caught:
        watch.block()
    assert caught.value.line is not None
    other.SCALE = 3
    assert run(watch.block())["out"] == 6


def test_a_function_that_has_its_own_model_is_refused(tmp_path: Path) -> None:
    other = written(tmp_path, "model = 'mine'\ndef use():\n    return model\n", "own_model")
    use = other.use

    @intervention
    def watch(model, tracer, live):
        out = use()

    with pytest.raises(BlockError, match=r"pass it to use\(\) as an argument") as caught:
        watch.block()
    assert caught.value.filename == str(tmp_path / "own_model.py")
    assert caught.value.line == 3


# --- what is refused --------------------------------------------------------------------------------------------------

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
    "def watch(self, model, tracer, live):\n    pass": "no method",
    "def watch(model, tracer, *, live):\n    pass": "three parameters first",
    "def watch(model, tracer, amount=1):\n    pass": "'amount' is bound by the engine and has no default",
}


@pytest.mark.parametrize("source", SIGNATURES)
def test_signatures_that_no_block_can_have(source: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=SIGNATURES[source]) as caught:
        written(tmp_path, f"from tracewire import intervention\n@intervention\n{source}\n")
    assert caught.value.line == 3


def test_what_is_no_function_of_ones_own() -> None:
    with pytest.raises(TypeError, match="an intervention already"):
        intervention(plain)
    with pytest.raises(TypeError, match="made of a function, not of builtin_function_or_method"):
        intervention(len)
    with pytest.raises(BlockError, match="write the intervention as a def"):
        intervention(lambda model, tracer, live: None)

    @functools.wraps(test_what_is_no_function_of_ones_own)
    def wrapped(model, tracer, live):
        pass

    with pytest.raises(BlockError, match="put what they do into its body"):
        intervention(wrapped)


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


def test_names_that_stand_for_nothing() -> None:
    @intervention
    def watch(model, tracer, live, direction=1):
        first = direction
        out = directon * 2  # mark: typo

    with pytest.raises(BlockError, match=r"'directon' stands for nothing.*did you mean 'direction'\?") as caught:
        watch.block()
    assert caught.value.line == line_of("typo")
    assert caught.value.filename == str(HERE)


def test_a_name_in_a_function_that_stands_for_nothing() -> None:
    def use():
        return nowhere_at_all  # mark: helper typo

    @intervention
    def watch(model, tracer, live):
        out = use()

    with pytest.raises(BlockError, match="'nowhere_at_all' stands for nothing") as caught:
        watch.block()
    assert caught.value.line == line_of("helper typo")


def test_a_closure_that_has_no_value_yet() -> None:
    @intervention
    def watch(model, tracer, live):
        out = later

    with pytest.raises(BlockError, match="'later' has no value yet"):
        watch.block()
    later = 1
    assert run(watch.block())["out"] == 1


class Color(enum.Enum):
    RED = 1


class Holding:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def method(self) -> int:
        return 1


def hooked() -> torch.nn.Module:
    network = torch.nn.Linear(1, 1)
    network.register_forward_hook(lambda *_: None)
    return network


UNTRANSPORTABLE = {
    "a class without source": (type("Made", (), {}), "is a class of your own, .*Made: the source of the class"),
    "an instance": (Holding(), "'thing.lock' is of type _thread.lock: bind what the block uses .* `layer = config.l"),
    "a method": (Holding().method, "'thing.__self__.lock' is of type _thread.lock"),
    "a partial": (functools.partial(print, threading.Lock()), r"'thing\[1\]' is of type _thread.lock"),
    "a network with hooks": (hooked(), "of type torch.nn.modules.linear.Linear: it has hooks"),
    "a network of another's": (torch.nn.Sequential(hooked()), "'thing.0' is of type .*Linear: it has hooks"),
    "a lazy network": (torch.nn.LazyLinear(1), "of type .*LazyLinear: its weights have no shape yet: call it once"),
    "a generator of numbers": (torch.Generator(), "of type torch._C.Generator: bind what the block uses"),
    "something deep": ({"a": [1, {"b": Holding()}]}, r"thing\['a'\]\[1\]\['b'\].lock. is of type _thread.lock"),
    "a file": (sys.stdout, "of type"),
    "an object array": (np.array([object()]), "of type numpy.ndarray"),
    "an object array in a list": ([Color.RED, np.array([object()])], r"an array of dtype object cannot travel"),
    "an intervention": (plain, "cannot call another"),
    "an intervention in a list": ([plain], r"'thing\[0\]' is an intervention, and a block cannot call another"),
}


@pytest.mark.parametrize("case", UNTRANSPORTABLE)
def test_values_that_cannot_travel_are_named(case: str) -> None:
    thing, message = UNTRANSPORTABLE[case]

    @intervention
    def watch(model, tracer, live):
        out = thing  # mark: untransportable

    with pytest.raises(UntransportableVariable, match=message) as caught:
        watch.block()
    error = caught.value
    assert error.variable == "thing"
    assert error.field == "variables.thing"
    assert error.line == line_of("untransportable")
    assert error.filename == str(HERE)
    assert "What can travel: numbers, strings" in str(error)
    assert str(error).count("What can travel") == 1

    @intervention
    def bound(model, tracer, live, thing=None):
        out = thing

    with pytest.raises(UntransportableVariable, match=message):
        bound(thing=thing).block()


def test_values_that_refer_to_themselves() -> None:
    loop: list[Any] = []
    loop.append(loop)

    @intervention
    def watch(model, tracer, live):
        out = loop

    with pytest.raises(UntransportableVariable):
        watch.block()


def test_the_main_module_cannot_travel() -> None:
    program = sys.modules["__main__"]

    @intervention
    def watch(model, tracer, live):
        out = program

    with pytest.raises(UntransportableVariable, match="__main__"):
        watch.block()


def test_functions_that_cannot_travel() -> None:
    @functools.wraps(factorial)
    def wrapped(n):
        return n

    @functools.cache
    def cached(n):
        return n

    async def later():
        pass

    counter = 0

    def counting():
        nonlocal counter
        counter += 1

    def setting():
        global SCALE
        SCALE = 3

    twins = [(lambda x: x + n) for n in range(2)]
    generated = twins[0]

    for function, message in (
        (wrapped, "decorated"),
        (cached, "functools._lru_cache_wrapper"),
        (later, "coroutine function"),
        (counting, "rebind"),
        (setting, "a block cannot use 'global'"),
    ):

        @intervention
        def watch(model, tracer, live, use=None):
            use()

        with pytest.raises(TraceRejected, match=message):
            watch(use=function).block()

    @intervention
    def loop(model, tracer, live):
        out = generated(1)

    assert run(loop.block())["out"] == 2


# --- what it looks like -----------------------------------------------------------------------------------------------


def test_an_intervention_looks_like_its_function() -> None:
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "What it is for."
    assert plain.name == "plain"
    assert list(inspect.signature(plain).parameters) == ["model", "tracer", "live"]
    assert plain.filename == str(HERE)
    assert plain.source == plain.block().source

    @intervention
    def watch(model, tracer, live, direction, scale=1.5, **variables):
        pass

    assert repr(watch).startswith("<intervention watch(model, tracer, live, direction, scale=1.5, **variables) at ")
    bound = repr(watch(direction=torch.zeros(2, 3), extra="x"))
    assert "direction=torch.Tensor[2, 3], scale=1.5, extra='x'" in bound
