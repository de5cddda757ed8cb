"""A block travels as source with everything that it uses, or is refused naming the line or the variable."""

# ruff: noqa: B006, B008, B023, C416, E731, F821

from __future__ import annotations

import collections
import enum
import functools
import math
import sys
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

if TYPE_CHECKING:
    import somewhere_else_entirely as elsewhere
    from engine_only import probe as remote_probe
from tests.support.captured import run, variables, written

HERE = Path(__file__)


SCALE = 3


LIMITS = {"low": 0.5, "high": [1, 2]}


DIRECTION = np.arange(4, dtype=np.float32)


Alias = collections.OrderedDict


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


def test_a_variable_without_a_value_is_named() -> None:
    @intervention
    def watch(model, tracer, live, direction):
        out = direction

    with pytest.raises(TraceRejected, match=r"watch\(direction=\.\.\.\)") as caught:
        watch.block()
    assert caught.value.field == "variables.direction"


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
        ("out = mine.wrong(1)", "'mine.wrong' is not defined: module 'mine' has no attribute 'wrong'"),
        ("out = getattr(mine, 'f')", "'mine' is a module of your own, of which only attributes can travel"),
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

    with pytest.raises(BlockError, match=r"pass that value to use\(\) as an argument") as caught:
        watch.block()
    assert caught.value.filename == str(tmp_path / "own_model.py")
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

    with pytest.raises(BlockError, match="move their code into its body"):
        intervention(wrapped)


def test_names_that_stand_for_nothing() -> None:
    @intervention
    def watch(model, tracer, live, direction=1):
        first = direction
        out = directon * 2  # mark: typo

    with pytest.raises(BlockError, match=r"'directon' is not defined.*did you mean 'direction'\?") as caught:
        watch.block()
    assert caught.value.line == line_of("typo")
    assert caught.value.filename == str(HERE)


def test_a_name_in_a_function_that_stands_for_nothing() -> None:
    def use():
        return nowhere_at_all  # mark: helper typo

    @intervention
    def watch(model, tracer, live):
        out = use()

    with pytest.raises(BlockError, match="'nowhere_at_all' is not defined") as caught:
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
    "an instance": (
        Holding(),
        "'thing.lock' is of type _thread.lock: bind the attributes that the block uses .* `layer = config.l",
    ),
    "a method": (Holding().method, "'thing.__self__.lock' is of type _thread.lock"),
    "a partial": (functools.partial(print, threading.Lock()), r"'thing\[1\]' is of type _thread.lock"),
    "a network with hooks": (hooked(), "of type torch.nn.modules.linear.Linear: it has hooks"),
    "a network of another's": (torch.nn.Sequential(hooked()), "'thing.0' is of type .*Linear: it has hooks"),
    "a lazy network": (torch.nn.LazyLinear(1), "of type .*LazyLinear: its weights have no shape yet: call it once"),
    "a generator of numbers": (
        torch.Generator(),
        "of type torch._C.Generator: bind the attributes that the block uses",
    ),
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
