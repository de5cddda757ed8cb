"""Blocks written as the body of a `with`: what is captured of them, what is refused, and that nothing of them runs."""

# mypy: ignore-errors

from __future__ import annotations

import gc
import linecache
import sys
import textwrap
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import ScriptedEngine, engine_info, tiny
from tracewire import (
    BlockError,
    Client,
    Model,
    Overloaded,
    Prompt,
    TraceRejected,
    TracewireError,
    UnknownModulePath,
    UntransportableVariable,
    intervention,
)
from tracewire_bus.bus import Bus
from tracewire_bus.wire.packing import unpack

SCALE = 3.0
PATIENCE = 20

ran = []


def scaled(value):
    """A helper that uses a global."""
    return value * SCALE


@pytest.fixture
async def model(client: Client, redis_url: str, prefix: str) -> AsyncIterator[Model]:
    """The model of an engine that is registered only; whoever traces this thread is left alone."""
    before = sys.gettrace()
    async with Bus.open(redis_url, prefix=prefix) as bus:
        await bus.registry.register(engine_info(engine="registered"), 60)
        yield await client.models.get("tiny")
    assert sys.gettrace() is before


@pytest.fixture
def engine(redis_url: str, prefix: str) -> Callable[[], Any]:
    """Runs a scripted engine: `async with engine():`."""
    return lambda: ScriptedEngine.running(redis_url, prefix, tiny, engine_info())


def block_of(tracer):
    return tracer._submission.block


def blocks_of(tracer):
    return [invoke.block for invoke in tracer._submission.invokes]


# --- one block --------------------------------------------------------------------------------------------------------


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


async def test_leaving_it_queues_it_whether_or_not_anybody_reads(
    model: Model, engine: Callable[[], Any], redis_url: str, prefix: str
) -> None:
    with model.trace("hello", max_tokens=3, detach=True) as tracer:
        logits = model.logits.save()
    async with engine(), tracewire.connect(redis_url, prefix=prefix) as other:
        with anyio.fail_after(PATIENCE):
            await tracer.start()
            texts = [event.text async for event in other.subscribe(tracer.id) if isinstance(event, tracewire.Output)]
    assert len(texts) == 3


async def test_a_client_that_is_closed_right_after_has_queued_it(redis_url: str, prefix: str) -> None:
    async with ScriptedEngine.running(redis_url, prefix, tiny, engine_info()):
        tracers = []
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            model = await client.models.get("tiny")
            for _ in range(20):
                with model.trace("hello", max_tokens=3, detach=True) as tracer:
                    logits = model.logits.save()
                tracers.append(tracer)
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            for tracer in tracers:
                with anyio.fail_after(PATIENCE):
                    events = [event async for event in client.subscribe(tracer.id)]
                assert events[-1].status == "finished"


async def test_its_outputs_and_saves_are_read_as_of_any_trace(model: Model, engine: Callable[[], Any]) -> None:
    with model.trace("hello", max_tokens=3) as tracer:
        logits = model.logits.save()
    with pytest.raises(TracewireError, match="read at its end"):
        _ = tracer.saves
    async with engine():
        with anyio.fail_after(PATIENCE):
            accepted = await tracer.accepted()
            items = [item async for item in tracer]
            result = await tracer.result()
    assert accepted.model == "tiny"
    assert len(items) == 3
    assert tracer.saves == result.saves
    assert tracer.status == "finished"


async def test_statements_are_queued_in_the_order_in_which_they_are_left(model: Model, client: Client) -> None:
    tracers = []
    for index in range(10):
        with model.trace("hello", max_tokens=1) as tracer:
            number = index.save()
        tracers.append(tracer)
    await tracers[-1].start()
    assert all(tracer._queued.ended.is_set() for tracer in tracers)
    assert [unpack(block_of(tracer).variables)["index"] for tracer in tracers] == list(range(10))


async def test_what_was_refused_is_raised_where_it_is_first_asked_for(
    model: Model, redis_url: str, prefix: str
) -> None:
    for ask in (
        lambda tracer: tracer.result(),
        lambda tracer: tracer.accepted(),
        lambda tracer: anext(aiter(tracer)),
        lambda tracer: tracer.start(),
    ):
        with model.trace("hello") as tracer:
            wrong = model.model.layerz[0].output.save()
        with pytest.raises(UnknownModulePath, match="layerz") as caught, anyio.fail_after(PATIENCE):
            await ask(tracer)
        assert caught.value.line == block_of(tracer).first_line


async def test_a_full_queue_refuses_it_and_it_can_be_started_again(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info(queue_limit=1), 60)
    model = await client.models.get("tiny")
    tracers = []
    for _ in range(2):
        with model.trace("hello", max_tokens=1) as tracer:
            logits = model.logits.save()
        tracers.append(tracer)
    with pytest.raises(Overloaded):
        await tracers[1].accepted()
    await tracers[0].cancel()
    await tracers[1].start()


async def test_it_can_be_cancelled_and_steered_right_away(client: Client, model: Model) -> None:
    with model.trace("hello", live={"alpha": 0.0}) as tracer:
        logits = (model.logits * tracer.live.alpha).save()
    assert await tracer.steer(alpha=1.0) == 1
    with model.trace("hello") as other:
        logits = model.logits.save()
    assert await other.cancel("enough")
    with pytest.raises(tracewire.TraceFailed, match="enough"), anyio.fail_after(PATIENCE):
        await other.result()
    await tracer.aclose()
    assert (await client.get_state(tracer.id)).status == "cancelled"


async def test_a_prompt_for_each_of_several(model: Model) -> None:
    with model.trace(prompts=["a", Prompt("b", max_tokens=2)], max_tokens=1) as tracer:
        logits = model.logits.save()
    assert [(one.prompt, one.sampling["max_tokens"]) for one in tracer._submission.invokes] == [("a", 1), ("b", 2)]
    assert block_of(tracer).source == "logits = model.logits.save()\n"


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


# --- several invokes --------------------------------------------------------------------------------------------------


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


async def test_prompts_with_blocks_of_their_own(client: Client, model: Model) -> None:
    @intervention
    def one(model, tracer, live):
        a = model.logits.save()

    trace = client.trace(model, prompts=[Prompt("a", one), "b", Prompt("c", block=one, max_tokens=2)])
    assert [invoke.block is not None for invoke in trace._submission.invokes] == [True, False, True]
    with pytest.raises(TraceRejected, match="expected an intervention"):
        client.trace(model, prompts=[Prompt("a", block=3)])


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}, [2, 3]),
        ({"input_ids": np.array([[1, 2]])}, [1, 2]),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, [1, 2]),
    ],
)
async def test_prompts_as_vllm_and_tokenizers_have_them(model: Model, form: Any, ids: list[int]) -> None:
    with model.trace(form) as tracer:
        logits = model.logits.save()
    assert tracer._submission.invokes[0].token_ids == ids


async def test_nnsight_s_other_words(model: Model) -> None:
    with model.generate({"prompt": "hello"}, max_new_tokens=3) as tracer:
        logits = model.logits.save()
    assert tracer._submission.invokes[0].sampling == {"max_tokens": 3}
    assert tracer._submission.invokes[0].prompt == "hello"


# --- what is refused --------------------------------------------------------------------------------------------------

_REFUSED = {
    "on one line": ("with model.trace('x') as tracer: ran.append(1)", BlockError, "a line of its own"),
    "try": (
        "with model.trace('x') as tracer:\n    try:\n        ran.append(1)\n    finally:\n        pass",
        BlockError,
        "try",
    ),
    "return": ("with model.trace('x') as tracer:\n    return 1", BlockError, "'return'"),
    "await": ("with model.trace('x') as tracer:\n    await ran", BlockError, "'await'"),
    "break": ("for _ in [1]:\n    with model.trace('x') as tracer:\n        break", BlockError, "compile"),
    "not last": ("with model.trace('x') as t, open('/dev/null') as f:\n    ran.append(1)", BlockError, "comes last"),
    "not a with": ("model.trace('x').__enter__()", BlockError, "not entered by a with"),
    "an exit stack": (
        "stack = ExitStack()\nstack.enter_context(model.trace('x'))",
        BlockError,
        "not entered by a with",
    ),
    "an unknown name": (
        "with model.trace('x') as tracer:\n    a = nowhere.save()",
        BlockError,
        "'nowhere' stands for nothing",
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
        "'h' stands for nothing",
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


@pytest.mark.parametrize("case", _REFUSED)
async def test_what_cannot_be_captured_is_refused_as_it_is_written(model: Model, case: str) -> None:
    body, error, message = _REFUSED[case]
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


def test_a_handle_without_a_client() -> None:
    from tracewire.traces.served_models import ModelInfo
    from tracewire_bus.domain.tree import ModuleTree

    info = engine_info()
    bare = Model(ModelInfo.of([info]), [ModuleTree(info)])
    with pytest.raises(TracewireError, match="no client"):
        bare.trace("x")
