"""A block's source text, compiled at its own lines, and the loops in it that stand for steps."""

from __future__ import annotations

import linecache
import traceback

import pytest

from tracewire_bus.wire.messages import Block, Helper
from tracewire_engine.worker.blocks.compiled_source import CompiledSource

_SOURCE = """\
for step in range(9):
    found = model.layers
    for layer in range(2):
        found = found[layer]
for row in rows:
    row.use()
while True:
    break
"""


def test_a_traceback_has_the_block_s_own_lines_until_it_is_forgotten() -> None:
    helper = Helper(name="half", source="def half():\n    return 1 / 0\n", filename="theirs.py", first_line=40)
    compiled = CompiledSource(Block("watch", "x = half()\n", "mine.py", 7, helpers=[helper]), "k")
    scope: dict[str, object] = {}
    for code in compiled.helpers:
        exec(code, scope)
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compiled.code, scope)
    frames = traceback.extract_tb(caught.tb)[1:]
    assert [(compiled.files[one.filename], one.lineno, one.line) for one in frames] == [
        (("mine.py", "watch"), 7, "x = half()"),
        (("theirs.py", "half"), 41, "return 1 / 0"),
    ]
    compiled.forget()
    assert not compiled.files.keys() & linecache.cache.keys()


def test_a_loop_over_numbers_that_pick_nothing_stands_for_steps() -> None:
    compiled = CompiledSource(Block("watch", _SOURCE, "mine.py", 10), "k")
    # In the body of the outer loop, and in that of the inner one, whose numbers are indices.
    assert [compiled.loop(line) for line in (11, 13)] == ["mine.py:10"] * 2
    # Over other things than numbers, and no `for` at all.
    assert [compiled.loop(line) for line in (15, 17)] == [None, None]


def test_annotations_are_not_evaluated() -> None:
    scope: dict[str, object] = {}
    exec(CompiledSource(Block("watch", "def f(x: NoSuchName) -> NorThis: return x\n"), "k").code, scope)
    assert callable(scope["f"])
