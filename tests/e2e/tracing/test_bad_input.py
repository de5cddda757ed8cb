"""Bad input on the real engine: the caller is told which field is at fault, and the engine serves on.

Every test ends with a good trace on the same engine (`unharmed`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tracewire import Client, InterventionError, Model, TraceRejected
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.messages import Block, Final, Helper, Invoke, Submission
from tracewire_bus.wire.packing import pack

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(autouse=True)
async def unharmed(client: Client, model: Model) -> AsyncIterator[None]:
    """After each test, a good trace runs."""
    yield
    async with client.trace(model, PROMPT, blocks.two_names, max_tokens=3, ignore_eos=True) as trace:
        result = await trace.result()
    assert len(result.saves["first"]) == 3


@pytest.fixture
async def bus(engine_bus: str) -> AsyncIterator[Bus]:
    """The bus itself, for what the SDK would not send."""
    async with Bus.open(engine_bus) as bus:
        yield bus


async def final_of(bus: Bus, submission: Submission) -> Final:
    """Submit behind the SDK's back and return the final event."""
    await bus.submit(submission)
    events = [decode_event(entry.data) async for entry in bus.read(submission.trace)]
    assert isinstance(events[-1], Final)
    return events[-1]


def source_block(source: str, **options: Any) -> Block:
    return Block(name="written", source=source, filename="user.py", first_line=10, **options)


def submission(name: str, block: Block | None = None, **invoke: Any) -> Submission:
    return Submission(trace=name, model="demo", invokes=[Invoke(prompt=PROMPT, **invoke)], block=block)


async def test_a_literal_path_that_does_not_exist_is_refused_before_submission(client: Client, model: Model) -> None:
    @tracewire.intervention
    def wrong(model, tracer, live):  # type: ignore[no-untyped-def]
        model.model.layers[2].mpl.output.save()

    with pytest.raises(TraceRejected, match=r"model\.layers\.2\.mpl.*model\.layers\.2\.mlp") as refused:
        async with client.trace(model, PROMPT, wrong, max_tokens=2) as trace:
            await trace.result()
    assert refused.value.field == "block"


async def test_a_literal_path_is_refused_by_the_engine_too(bus: Bus) -> None:
    final = await final_of(bus, submission("bad-path", source_block("x = model.model.layers[99].output.save()")))
    assert final.status == "rejected"
    assert final.error is not None
    assert final.error.field == "block"
    assert "layers" in final.error.message
    assert final.error.line == 10


async def test_a_computed_path_is_the_block_s_error_when_it_asks(client: Client, model: Model) -> None:
    with pytest.raises(InterventionError) as failed:
        async with client.trace(model, PROMPT, blocks.computed_path(name="mpl"), max_tokens=30) as trace:
            await trace.result()
    error = failed.value
    assert error.type == "AttributeError"
    assert "'mlp'" in error.message
    assert error.source == "after = getattr(model.model.layers[1], name).output.save()"
    assert len(error.result.token_ids) == 1
    assert "before" in error.result.saves


async def test_a_block_that_does_not_compile(bus: Bus) -> None:
    final = await final_of(bus, submission("no-compile", source_block("x = 1\ny = (")))
    assert final.status == "rejected"
    assert final.error is not None
    assert (final.error.field, final.error.type, final.error.line) == ("block", "SyntaxError", 11)


async def test_a_block_that_raises_says_what_and_where(client: Client, model: Model) -> None:
    tokens = 0
    with pytest.raises(InterventionError, match="norm is high") as failed:
        async with client.trace(model, PROMPT, blocks.raises_at(at=3), max_tokens=50, ignore_eos=True) as trace:
            async for output in trace:
                if isinstance(output, tracewire.Output):
                    tokens += len(output.token_ids)
    error = failed.value
    assert (error.type, error.source) == (
        "ValueError",
        "raise ValueError(f\"norm is {'high' if norm > 0 else 'low'}\")",
    )
    assert error.filename is not None
    assert error.filename.endswith("blocks/tracing.py")
    assert tokens == 4
    assert len(error.result.saves["seen"]) == 4


async def test_a_block_that_exits_ends_itself_only(client: Client, model: Model) -> None:
    with pytest.raises(InterventionError, match="SystemExit"):
        async with client.trace(model, PROMPT, blocks.exits, max_tokens=3) as trace:
            await trace.result()


async def test_a_block_that_never_returns_is_interrupted(client: Client, model: Model) -> None:
    with pytest.raises(InterventionError, match="within one step") as failed:
        async with client.trace(model, PROMPT, blocks.never_returns, max_tokens=3) as trace:
            await trace.result()
    assert failed.value.type == "BlockTimeout"


@tracewire.intervention
def asks_again_and_again(model, tracer, live):  # type: ignore[no-untyped-def]
    while True:
        model.model.layers[2].output


@tracewire.intervention
def iterates_when_read(model, tracer, live):  # type: ignore[no-untyped-def]
    class Endless(list):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            while True:
                pass

    model.model.layers[2].output
    held = {"endless": Endless([1])}.save()


@tracewire.intervention
def binds_no_name(model, tracer, live):  # type: ignore[no-untyped-def]
    globals()["\ud800"] = [1].save()
    globals()[5] = model.model.layers[2].output[0].clone().save()


@tracewire.intervention
def deletes_modules(model, tracer, live):  # type: ignore[no-untyped-def]
    import sys

    model.model.layers[2].output
    for name in [name for name in sys.modules if name.startswith("nnsight")]:
        del sys.modules[name]


@tracewire.intervention
def asks_at_its_first_step(model, tracer, live):  # type: ignore[no-untyped-def]
    for step in tracer.iter[:]:
        if step == 0:
            first = float(model.model.layers[2].output[0][-1].float().norm()).save()


async def test_a_loop_over_numbers_is_told_of_in_the_result(
    client: Client, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    @tracewire.intervention
    def numbers(model, tracer, live):  # type: ignore[no-untyped-def]
        seen = [].save()
        for step in range(5):
            seen.append(float(model.model.layers[2].output[0][-1].float().norm()))

    async with client.trace(model, PROMPT, numbers, max_tokens=4, ignore_eos=True) as trace:
        result = await trace.result()
    assert len(set(result.saves["seen"])) == 1
    (warning,) = result.warnings
    assert "test_bad_input.py:" in warning
    assert "tracer.iter[:]" in warning
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (asks_again_and_again, "SameStep"),
        (iterates_when_read, "BlockTimeout"),
        (binds_no_name, None),
        (deletes_modules, None),
        (asks_at_its_first_step, None),
    ],
    ids=lambda given: getattr(given, "name", given),
)
async def test_what_a_block_does_is_its_own(client: Client, model: Model, block: Any, kind: str | None) -> None:
    """Others go on beside it, and after it, on the same engine."""
    engines = [engine.name for engine in await client.engines.list(model=model)]
    async with client.trace(model, PROMPT, blocks.two_names, temperature=0.0, max_tokens=40, ignore_eos=True) as other:
        async with client.trace(model, PROMPT, block, max_tokens=4, ignore_eos=True) as trace:
            if kind is None:
                result = await trace.result()
                assert len(result.token_ids) == 4
            else:
                with pytest.raises(InterventionError) as raised:
                    await trace.result()
                assert raised.value.type == kind
        assert len((await other.result()).saves["first"]) == 40
    async with client.trace(model, PROMPT, blocks.two_names, max_tokens=2, ignore_eos=True) as after:
        assert len((await after.result()).saves["first"]) == 2
    assert [engine.name for engine in await client.engines.list(model=model)] == engines


async def test_a_read_out_of_order_is_the_block_s_error(client: Client, model: Model) -> None:
    @tracewire.intervention
    def backwards(model, tracer, live):  # type: ignore[no-untyped-def]
        late = model.residual(5).output.save()
        early = model.residual(1).output.save()

    with pytest.raises(InterventionError) as failed:
        async with client.trace(model, PROMPT, backwards, max_tokens=4) as trace:
            await trace.result()
    assert failed.value.type == "OutOfOrderError"
    assert failed.value.source == "early = model.residual(1).output.save()"


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"max_tokens": -3}, "sampling.max_tokens"),
        ({"top_p": 7}, "sampling.top_p"),
        ({"extra_sampling": {"temprature": 1.0}}, "sampling.temprature"),
        ({"n": 0}, "sampling.n"),
        ({"extra_sampling": {"extra_args": {"a": 1}}}, "sampling.extra_args"),
        ({"logit_bias": {5: "x"}}, "sampling.logit_bias"),
    ],
)
async def test_a_sampling_param_that_vllm_refuses(client: Client, model: Model, sampling: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as refused:
        async with client.trace(model, PROMPT, blocks.two_names, **sampling) as trace:
            await trace.result()
    assert refused.value.field == field


async def test_a_prompt_longer_than_the_model_takes(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match="2048") as refused:
        async with client.trace(model, [5] * 3000, blocks.two_names, max_tokens=3) as trace:
            await trace.accepted()
    assert refused.value.field == "prompt"


async def test_a_token_id_outside_the_vocabulary(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match="1000000") as refused:
        async with client.trace(model, [5, 1_000_000], None, max_tokens=3) as trace:
            await trace.accepted()
    assert refused.value.field == "token_ids"


async def test_one_bad_prompt_of_several_is_named(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected) as refused:
        async with client.trace(model, prompts=[PROMPT, [5] * 3000], block=blocks.two_names, max_tokens=3) as trace:
            await trace.accepted()
    assert refused.value.field == "invokes[1].prompt"


@pytest.mark.parametrize("prompt", ["", [], None])
async def test_an_empty_prompt(client: Client, model: Model, prompt: Any) -> None:
    with pytest.raises(TraceRejected) as refused:
        async with client.trace(model, prompt, None, max_tokens=3) as trace:
            await trace.accepted()
    assert refused.value.field == "prompt"


async def test_an_unknown_model(client: Client) -> None:
    with pytest.raises(tracewire.UnknownModel, match="demo"):
        await client.models.get("nope")


async def test_a_variable_that_cannot_travel(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match=r"vector.*object") as refused:
        async with client.trace(model, PROMPT, blocks.uses_everything(vector=object(), names=[], table={})) as trace:
            await trace.result()
    assert refused.value.field == "variables.vector"


async def test_a_save_that_cannot_travel_is_named_and_the_others_arrive(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, blocks.cannot_travel, max_tokens=5, ignore_eos=True) as trace:
        result = await trace.result()
    assert result.saves["good"] == [0, 1, 2, 3, 4]
    assert set(result.saves) <= {"good", "step"}
    assert set(result.save_errors) == {"0.0.bad", "0.0.loop"}
    assert "object" in result.save_errors["0.0.bad"]


async def test_a_module_that_the_engine_lacks(bus: Bus) -> None:
    block = source_block("x = 1", modules={"missing": "no_such_module_here"})
    final = await final_of(bus, submission("no-module", block))
    assert final.status == "failed"
    assert final.error is not None
    assert "no_such_module_here" in final.error.message


async def test_variables_that_are_garbage(bus: Bus) -> None:
    final = await final_of(bus, submission("garbage-variables", source_block("x = 1", variables=b"\xc1\xff")))
    assert final.status in ("rejected", "failed")
    assert final.error is not None


async def test_garbage_on_the_queue_is_dead_lettered(bus: Bus) -> None:
    before = len(await bus.dead_letters.list())
    await bus.queue.put("demo", "", b"\x00garbage")
    await bus.queue.put("demo", "x" * 1000, b"else")
    await final_of(bus, submission("after-the-garbage"))
    assert len(await bus.dead_letters.list()) == before + 2


async def test_garbage_that_names_a_trace_is_answered_there(bus: Bus) -> None:
    # A signed submission begins with the second one's byte.
    for trace, data, field in (("garbage", b"\xd9", "submission"), ("signed-garbage", b"\xc1", "signature")):
        await bus.queue.put("demo", trace, data)
        events = [decode_event(entry.data) async for entry in bus.read(trace)]
        assert isinstance(events[-1], Final)
        assert events[-1].status == "rejected"
        assert events[-1].error is not None
        assert events[-1].error.field == field


async def test_a_newer_major_schema_is_answered_on_its_stream(bus: Bus) -> None:
    body = encode(submission("from-the-future"))
    await bus.queue.put("demo", "from-the-future", body, schema="2.0")
    events = [decode_event(entry.data) async for entry in bus.read("from-the-future")]
    final = events[-1]
    assert isinstance(final, Final)
    assert final.error is not None
    assert (final.status, final.error.field) == ("rejected", "schema")
    assert "2.0" in final.error.message


async def test_a_newer_minor_schema_with_fields_unknown_here_runs(bus: Bus) -> None:
    import msgspec

    body = msgspec.msgpack.decode(encode(submission("a-little-newer", sampling={"max_tokens": 2})))
    body["colour"] = "green"
    data = msgspec.msgpack.encode(body)
    await bus.queue.put("demo", "a-little-newer", data, schema="1.9")
    events = [decode_event(entry.data) async for entry in bus.read("a-little-newer")]
    assert isinstance(events[-1], Final)
    assert events[-1].status == "finished"


async def test_live_parameters_that_were_not_declared(client: Client, model: Model) -> None:
    block = blocks.uses_everything(vector=[0.0] * 256, names=[], table={})
    with pytest.raises(TraceRejected, match=r"live\.alpha"):
        async with client.trace(model, PROMPT, block, live={"beta": 1.0}, max_tokens=2) as trace:
            await trace.result()


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "+".join(["1.5"] * 1200),
        "raise ValueError('\\udcff')",
        "class Odd(Exception):\n    def __str__(self):\n        return [][0]\nraise Odd()",
        "try:\n    model.lm_head.output\nfinally:\n    while True: pass",
        "x = model.model.layers[0].output[0].to('meta').save()",
        "x = type('Odd', (list,), {'__iter__': lambda self: 1 / 0})([1]).save()\nmodel.residual(0).output",
    ],
    ids=["deep", "surrogate", "odd-message", "endless-finally", "meta", "odd-list"],
)
async def test_hostile_blocks_end_themselves_only(bus: Bus, source: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    final = await final_of(bus, submission(f"hostile-{name}", source_block(source), sampling={"max_tokens": 3}))
    assert isinstance(final, Final)


async def test_a_helper_that_exits_when_it_is_defined(bus: Bus) -> None:
    block = source_block("x = 1", helpers=[Helper(name="h", source="def h(a=exit()): pass")])
    final = await final_of(bus, submission("helper-exits", block))
    assert final.status == "failed"


async def test_a_grammar_that_is_none(bus: Bus) -> None:
    sampling = {"max_tokens": 5, "structured_outputs": {"grammar": "this is ::= no ( grammar"}}
    final = await final_of(bus, submission("no-grammar", source_block("model.residual(0).output"), sampling=sampling))
    assert final.status in ("rejected", "failed")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"temperature": math.nan}, "sampling.temperature"), ({"logit_bias": {5: math.nan}}, "sampling.logit_bias")],
)
async def test_numbers_that_are_none(bus: Bus, sampling: dict[str, Any], field: str) -> None:
    """This client refuses them; others may not."""
    final = await final_of(bus, submission(f"nan-{field}", sampling={"max_tokens": 2, **sampling}))
    assert final.status == "rejected"
    assert final.error is not None
    assert (final.error.field, final.error.message) == (field, "expected a number, got NaN")


async def test_a_prompt_of_megabytes_is_refused_without_reading_it(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match="characters") as refused:
        async with client.trace(model, "x" * 3_000_000, None, max_tokens=3) as trace:
            await trace.accepted()
    assert refused.value.field == "prompt"


async def test_a_deadline_ends_what_still_runs(client: Client, model: Model) -> None:
    with pytest.raises(tracewire.TraceFailed, match="deadline") as late:
        async with client.trace(
            model, PROMPT, blocks.two_names, max_tokens=2000, ignore_eos=True, deadline=0.5
        ) as trace:
            await trace.result()
    assert late.value.status == "expired"


async def test_nothing_is_left_in_the_workers(client: Client, bus: Bus) -> None:
    """After all of the above, a packed dict that is no dict."""
    final = await final_of(bus, submission("not-a-dict", source_block("x = 1", variables=pack([1, 2]))))
    assert final.status in ("rejected", "failed")
