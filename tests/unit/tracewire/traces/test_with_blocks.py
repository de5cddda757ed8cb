"""Blocks written as the body of a `with`: what is captured of them, what is refused, and that nothing of them runs."""

# mypy: ignore-errors

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.captured import block_of, blocks_of
from tracewire import Client, Model, intervention
from tracewire_bus.wire.packing import unpack

SCALE = 3.0


PATIENCE = 60


ran = []


def scaled(value):
    """A helper that uses a global."""
    return value * SCALE


async def test_the_body_travels_as_it_stands_and_runs_nowhere_here(model: Model) -> None:
    direction, layer, unused = np.arange(4.0), 2, object()
    with model.trace("hello", max_tokens=3) as tracer:
        # A comment before it.
        ran.append("here")
        hidden = scaled(model.model.layers[layer].output[0] @ direction).save()
        text = """
  as it stands"""
    assert not ran
    assert "hidden" not in locals()
    submission = tracer._submission
    assert [(invoke.prompt, invoke.sampling) for invoke in submission.invokes] == [("hello", {"max_tokens": 3})]
    block = block_of(tracer)
    lines = block.source.splitlines()
    assert lines[0] == 'ran.append("here")'
    assert lines[1].startswith("hidden = scaled(")
    assert 'text = """\n  as it stands"""' in block.source
    assert linecache.getline(block.filename, block.first_line).strip() == lines[0]
    assert block.name == "test_the_body_travels_as_it_stands_and_runs_nowhere_here"
    assert block.parameters == ("model", "_tw_tracer", "_tw_live")
    variables = unpack(block.variables)
    assert variables["layer"] == 2
    assert variables["SCALE"] == SCALE
    assert variables["direction"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert variables["ran"] == []
    assert set(variables) == {"layer", "SCALE", "direction", "ran"}
    assert [helper.name for helper in block.helpers] == ["scaled"]
    assert unused is not None


async def test_names_of_the_model_the_tracer_and_modules(model: Model) -> None:
    lm, layers, norm = model, model.model.layers, model.model.norm
    with model.trace("hello", live={"alpha": 1.0}) as t:
        for step in t.iter[:]:
            first = lm.model.layers[0].output.save()
            again = model.logits.save()
            one = layers[1].output + t.live.alpha
            two = norm.output
    block = block_of(t)
    assert block.parameters == ("lm", "t", "_tw_live")
    assert block.paths == {"model": "", "layers": "model.layers", "norm": "model.norm"}
    assert unpack(block.variables) == {}


async def test_a_module_can_be_a_variable_of_a_function_too(client: Client, model: Model) -> None:
    @intervention
    def norms(lm, tracer, live, module):
        norm = module.output.norm().save()

    trace = client.trace(model, "hello", norms(module=model.model.layers[3]))
    assert trace._submission.block.paths == {"module": "model.layers.3"}


async def test_a_name_that_the_body_binds_is_taken_along_only_if_it_is_read_first(model: Model) -> None:
    count, hidden, stale, maybe = 1, object(), object(), 5
    with model.trace("hello") as tracer:
        count = count + 1
        hidden = model.logits
        rows = [].save()
        for stale in tracer.iter[:]:
            row = stale * 2
            rows.append(row)
        if count > 2:
            maybe = 6
        rows.append(maybe)
        rows.append([stale * 2 for stale in range(3)])
        late = lambda: hidden + count  # noqa: E731
    assert unpack(block_of(tracer).variables) == {"count": 1, "maybe": 5}
    assert stale is not None


async def test_an_empty_body_has_no_block(model: Model, engine: Callable[[], Any]) -> None:
    with model.trace("hello", max_tokens=2) as tracer:
        """Nothing."""
    assert block_of(tracer) is None
    async with engine():
        with anyio.fail_after(PATIENCE):
            assert (await tracer.result()).text


async def test_what_the_header_raises_comes_out(model: Model) -> None:
    with pytest.raises(ZeroDivisionError), model.trace(str(1 / 0)) as tracer:
        ran.append(1)
    with pytest.raises(TypeError), model.trace("hello") as (_, _):
        ran.append(1)
    assert not ran


async def test_whoever_traces_the_thread_goes_on(model: Model) -> None:
    lines = []

    def trace(frame, event, argument):
        if frame.f_code.co_name == "traced":
            lines.append(frame.f_lineno)
            return trace
        return None

    def traced():
        with model.trace("hello") as tracer:
            ran.append(1)
        return tracer

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        tracer = traced()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert not ran
    first = traced.__code__.co_firstlineno
    assert {first + 1, first + 3} <= set(lines)
    assert block_of(tracer).source == "ran.append(1)\n"


async def test_it_holds_no_frame(model: Model) -> None:
    class Held:
        pass

    def traced():
        held = Held()
        with model.trace("hello", max_tokens=1) as tracer:
            logits = model.logits.save()
        return tracer, weakref.ref(held)

    tracer, held = traced()
    await tracer.start()
    gc.collect()
    # What the function held went with its frame.
    assert held() is None


async def test_each_invoke_has_a_prompt_a_block_and_sampling_of_its_own(
    model: Model, engine: Callable[[], Any]
) -> None:
    with model.trace(max_tokens=5, temperature=0.5) as tracer:
        with tracer.invoke("one"):
            a = model.logits.save()
        with tracer.invoke([1, 2, 3], temperature=1.0, max_tokens=16):
            for step in tracer.iter[:]:
                b = model.samples.save()
    first, second = tracer._submission.invokes
    assert (first.prompt, first.sampling) == ("one", {"max_tokens": 5, "temperature": 0.5})
    assert (second.token_ids, second.sampling) == ([1, 2, 3], {"max_tokens": 16, "temperature": 1.0})
    assert block_of(tracer) is None
    assert first.block.source == "a = model.logits.save()\n"
    assert second.block.parameters == ("model", "tracer", "_tw_live")
    async with engine():
        with anyio.fail_after(PATIENCE):
            assert len((await tracer.result()).invokes) == 2


async def test_invokes_of_a_loop_take_the_values_of_their_turn(model: Model) -> None:
    def scope(value):
        return value + 1

    with model.trace(max_tokens=1) as tracer:
        for index, text in enumerate(["a", "b", "c"]):
            shifted = scope(index)
            with tracer.invoke(text):
                hidden = (model.model.layers[index].output + shifted).save()
    assert [unpack(block.variables) for block in blocks_of(tracer)] == [
        {"index": index, "shifted": index + 1} for index in range(3)
    ]
    assert [invoke.prompt for invoke in tracer._submission.invokes] == ["a", "b", "c"]
    assert "shifted" not in locals()


async def test_an_invoke_in_a_function_that_the_scope_calls(model: Model) -> None:
    def ask(tracer, text, layer):
        with tracer.invoke(text):
            hidden = model.model.layers[layer].output.save()

    with model.trace(max_tokens=1) as tracer:
        ask(tracer, "a", 1)
        ask(tracer, "b", 2)
    assert [unpack(block.variables) for block in blocks_of(tracer)] == [{"layer": 1}, {"layer": 2}]


async def test_what_the_scope_saves_is_shared(model: Model) -> None:
    nnsight = None
    with model.trace(max_tokens=1) as tracer:
        rows, names, plain = [].save(), nnsight.save({"a": 1}), [1]
        table = np.zeros(3).save()
        rows.append(0)
        with tracer.invoke("a"):
            rows.append(plain)
            table[0] = 1
        alias = rows
        with tracer.invoke("b"):
            names["b"] = alias
    shared = unpack(tracer._submission.shared)
    assert (shared["rows"], shared["names"], shared["table"].tolist()) == ([0], {"a": 1}, [0.0, 0.0, 0.0])
    assert set(shared) == {"rows", "names", "table"}
    first, second = blocks_of(tracer)
    assert first.shared == {"rows": "rows", "table": "table"}
    assert unpack(first.variables) == {"plain": [1]}
    assert second.shared == {"alias": "rows", "names": "names"}


async def test_shared_values_of_a_function_s_traces(client: Client, model: Model) -> None:
    rows = [1]

    @intervention
    def collect(model, tracer, live, seen):
        seen["a"] = rows

    trace = client.trace(model, prompts=["a", "b"], block=collect, shared={"seen": {}, "rows": [2]})
    block = trace._submission.block
    assert block.shared == {"seen": "seen", "rows": "rows"}
    assert unpack(trace._submission.shared) == {"seen": {}, "rows": [2]}
    bound = client.trace(model, prompts=["a"], block=collect(seen={"b": 1}), shared={"seen": {}})._submission.block
    assert bound.shared == {}
    assert unpack(bound.variables) == {"seen": {"b": 1}, "rows": [1]}
