"""The source of a class: found in files and notebooks, told apart from others, and named in errors."""

# mypy: ignore-errors

from __future__ import annotations

import enum
import linecache
import sys
import textwrap
import types
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.block_runs import run
from tracewire import BlockError, UntransportableVariable, intervention


@dataclass
class Config:
    layer: int


def arriving(value: Any) -> Any:
    """`value` as a block has it on the engine."""

    @intervention
    def watch(model, tracer, live):
        out = value

    return run(watch.block())["out"]


def test_a_class_s_own_lines_are_named_in_errors() -> None:
    class Wrong:
        def go(self):
            return nowhere_at_all  # noqa: F821

    with pytest.raises(BlockError, match="'nowhere_at_all' is not defined") as caught:
        arriving(Wrong())
    assert caught.value.filename == __file__
    assert linecache.getline(__file__, caught.value.line).strip().startswith("return nowhere_at_all")


def test_classes_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/tmp/ipykernel_1/classes.py"
    text = textwrap.dedent(
        """
        @dataclass
        class Cell:
            layer: int = 3

        class Kind(enum.Enum):
            A = 1

        @intervention
        def watch(model, tracer, live):
            out = (cell.layer, cell, Kind.A, kind)
        """
    )
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    # The cell before it, which defined another one of the name.
    linecache.cache["/tmp/ipykernel_1/before.py"] = (3, None, ["class Cell:\n", "    other = 1\n"], "before")
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = vars(main)
    names.update(dataclass=dataclass, enum=enum, intervention=intervention)
    try:
        exec(compile(text, name, "exec"), names)
        names.update(cell=names["Cell"](), kind=names["Kind"].A)
        layer, cell, member, kind = run(names["watch"].block())["out"]
    finally:
        del linecache.cache[name], linecache.cache["/tmp/ipykernel_1/before.py"]
    assert (layer, cell.layer) == (3, 3)
    assert member is kind


def test_two_classes_of_one_name_are_told_apart_by_what_is_in_them() -> None:
    def first() -> Any:
        class Twin:
            a = 1

            def which(self):
                return 1

        return Twin()

    one, two = first(), Config(2)
    assert arriving(one).which() == 1
    made = [type("Config", (), {})(), two]
    with pytest.raises(UntransportableVariable, match=r"is a class of your own, .*Config"):
        arriving(made)
