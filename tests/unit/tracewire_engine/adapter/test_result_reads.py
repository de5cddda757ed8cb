"""Which blocks are told what their request put out: those that ask for `tracer.result`. It costs a call a request."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.messages import Block, Helper
from tracewire_engine.adapter.result_reads import asks_result


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("out = tracer.result.save()", True),
        ("with tracer.invoke():\n    text = tracer.result.outputs[0].text", True),
        ("tracer . result", True),
        ("t = tracer\nx = t.result", True),
        ("x = getattr(tracer, 'result')", True),
        ("x = tracer.__getattribute__('result')", True),
        ("x = globals()['tracer'].result", True),
        ("shown(tracer)", True),
        ("result = future.result()", False),
        ("x = model.lm_head.result", False),
        ("# tracer.result\nx = 'tracer.result'", False),
        ("saved = {'result': 1}.save()", False),
        ("result = [].save()\nfor step in tracer.iter[:]:\n    result.append(1)", False),
    ],
)
def test_it_is_told_by_the_syntax(source: str, asks: bool) -> None:
    helpers = [Helper("shown", "def shown(it):\n    return it.result", "f", 1)] if "shown" in source else []
    assert asks_result(Block(name="b", source=source, helpers=helpers)) == asks


def test_the_tracer_may_have_any_name() -> None:
    block = Block(name="b", source="x = t.result", parameters=("m", "t", "l"))
    assert asks_result(block)
    assert not asks_result(Block(name="b", source="x = tracer.result", parameters=("m", "t", "l")))
    assert not asks_result(None)
