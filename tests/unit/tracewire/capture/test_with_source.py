"""The body of a `with` is found and cut out, or is refused as it is written."""

# mypy: ignore-errors

from __future__ import annotations

import linecache
import sys
import textwrap
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

from tests.support.captured import block_of
from tracewire import BlockError, Model, TraceRejected, TracewireError, UntransportableVariable
from tracewire_bus.wire.packing import unpack

SCALE = 3.0


ran = []


async def test_a_body_in_a_class_a_closure_and_a_nested_with(model: Model) -> None:
    outer = 7

    class Service:
        def __init__(self):
            self.model = model

        def submit(self, text):
            lm, inner = self.model, 8
            with nullcontext(), lm.trace(text) as tracer:
                total = (outer + inner + SCALE).save()
            return tracer

    tracer = Service().submit("hello")
    assert unpack(block_of(tracer).variables) == {"outer": 7, "inner": 8, "SCALE": SCALE}
    assert block_of(tracer).name == "submit"


async def test_headers_of_several_lines(model: Model) -> None:
    with (
        nullcontext() as nothing,
        model.trace(
            "hello",
            max_tokens=2,
        ) as tracer,
    ):

        @staticmethod
        def decorated():
            raise AssertionError

        ran.append(1)
    assert not ran
    assert nothing is None
    assert block_of(tracer).source.startswith("@staticmethod\ndef decorated")


UNCAPTURABLE = {
    "on one line": ("with model.trace('x') as tracer: ran.append(1)", BlockError, "a line of its own"),
    "try": (
        "with model.trace('x') as tracer:\n    try:\n        ran.append(1)\n    finally:\n        pass",
        BlockError,
        "try",
    ),
    "return": ("with model.trace('x') as tracer:\n    return 1", BlockError, "'return'"),
    "await": ("with model.trace('x') as tracer:\n    await ran", BlockError, "'await'"),
    "break": ("for _ in [1]:\n    with model.trace('x') as tracer:\n        break", BlockError, "compile"),
    "not last": (
        "with model.trace('x') as t, open('/dev/null') as f:\n    ran.append(1)",
        BlockError,
        "must be the last item",
    ),
    "not a with": ("model.trace('x').__enter__()", BlockError, "not entered by a with"),
    "an exit stack": (
        "stack = ExitStack()\nstack.enter_context(model.trace('x'))",
        BlockError,
        "not entered by a with",
    ),
    "an unknown name": (
        "with model.trace('x') as tracer:\n    a = nowhere.save()",
        BlockError,
        "'nowhere' is not defined",
    ),
    "what cannot travel": (
        "thing = object()\nwith model.trace('x') as tracer:\n    a = thing.save()",
        UntransportableVariable,
        "thing",
    ),
    "no prompt": ("with model.trace() as tracer:\n    a = 1", TraceRejected, "expected a prompt"),
    "an invoke without a prompt": (
        "with model.trace() as tracer:\n    with tracer.invoke():\n        a = model.logits.save()",
        TraceRejected,
        "no request",
    ),
    "both": ("with model.trace('x', prompts=['y']) as tracer:\n    a = 1", TraceRejected, "either a prompt"),
    "an empty prompt": ("with model.trace('') as tracer:\n    a = 1", TraceRejected, "empty"),
    "several prompts as one": ("with model.trace(['a', 'b']) as tracer:\n    a = 1", TraceRejected, "token ids"),
    "a shared number": (
        "with model.trace() as tracer:\n    n = (0).save()\n    with tracer.invoke('a'):\n        n += 1",
        BlockError,
        "a list, a dict or an array",
    ),
    "a shared name bound anew": (
        "with model.trace() as tracer:\n    n = [].save()\n    with tracer.invoke('a'):\n        n.append(1)\n"
        "    n = [].save()",
        BlockError,
        "'n' is shared",
    ),
    "an invoke's own name": (
        "with model.trace() as tracer:\n    with tracer.invoke('a'):\n        h = model.logits\n"
        "    with tracer.invoke('b'):\n        model.logits = h",
        BlockError,
        "'h' is not defined",
    ),
    "an error of the scope": ("with model.trace() as tracer:\n    a = 1 / 0", ZeroDivisionError, "division"),
    "an invoke outside": ("model.trace('x').invoke('y')", TracewireError, "was given a prompt"),
    "twice": ("t = model.trace('x')\nwith t:\n    a = 1\nwith t:\n    a = 2", TracewireError, "entered before"),
    "another's tracer": (
        "with model.trace('x') as one:\n    a = 1\nwith model.trace('x') as two:\n    b = one.saves",
        UntransportableVariable,
        "tracer of another trace",
    ),
    "an unknown option": ("with model.trace('x', live=3) as t:\n    a = 1", TraceRejected, "live"),
}


@pytest.mark.parametrize("case", UNCAPTURABLE)
async def test_what_cannot_be_captured_is_refused_as_it_is_written(model: Model, case: str) -> None:
    body, error, message = UNCAPTURABLE[case]
    source = "async def refused(model):\n" + textwrap.indent(body, "    ") + "\n    return None\n"
    filename = f"<{case}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"ran": ran, "ExitStack": ExitStack}
    exec(compile(source, filename, "exec"), names)
    with pytest.raises(error, match=message) as caught:
        await names["refused"](model)
    assert not ran
    assert type(caught.value.__context__).__name__ != "_Skipped"
    assert sys.gettrace() is None or "_line" not in repr(sys.gettrace())


async def test_source_that_cannot_be_read(model: Model) -> None:
    names: dict[str, Any] = {}
    exec("def typed(model):\n    with model.trace('x') as tracer:\n        a = 1\n", names)
    with pytest.raises(BlockError, match="cannot be read"):
        names["typed"](model)
