"""What a new user gets wrong in the first hour is told where it happens, in the user's own terms."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import Script, ScriptedEngine, Stage, engine_info, tiny
from tracewire import (
    BlockError,
    BlockOnly,
    Client,
    ConnectError,
    Prompt,
    SaveMissing,
    StateMismatch,
    TraceRejected,
    UnknownPosition,
    UnknownTrace,
    intervention,
)
from tracewire_bus.wire.messages import Manifest
from tracewire_bus.wire.packing import unpack

PATIENCE = 20


@pytest.fixture
def engine(redis_url: str, prefix: str) -> Callable[..., Any]:
    """Runs a scripted engine: `async with engine(script):`."""

    def running(script: Script = tiny, **info: Any) -> Any:
        return ScriptedEngine.running(redis_url, prefix, script, engine_info(**info))

    return running


async def saving(stage: Stage) -> None:
    """One token that saves a value, and one save that could not travel."""
    await stage.accept()
    await stage.save("one", {"projection": 1.5})
    await stage.final(save_errors={"0.0.model": "a value of type Llama cannot travel"})


# --- connecting -------------------------------------------------------------------------------------------------------


async def test_an_awaited_client_stays_open_until_it_is_closed(redis_url: str, prefix: str) -> None:
    client = await tracewire.connect(redis_url, prefix=prefix)
    gc.collect()
    assert await client.models.list() == []
    await client.aclose()
    await client.aclose()
    with pytest.raises(ConnectError, match="the client is closed"):
        await client.models.list()


async def test_a_client_outlives_what_it_was_entered_by(redis_url: str, prefix: str) -> None:
    """As in a notebook: nothing holds what `__aenter__` was called on."""
    client = await tracewire.connect(redis_url, prefix=prefix).__aenter__()
    gc.collect()
    assert await client.models.list() == []
    await client.aclose()


async def test_a_client_that_is_not_connected_yet_says_how(redis_url: str) -> None:
    connecting = tracewire.connect(redis_url)
    with pytest.raises(AttributeError, match=r"no 'models' before it is connected.*await tracewire\.connect"):
        _ = connecting.models
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = connecting.modle
    async with connecting:
        with pytest.raises(tracewire.TracewireError, match="entered before"):
            await connecting.__aenter__()


# --- following --------------------------------------------------------------------------------------------------------


async def test_a_service_learns_before_it_answers_that_there_is_nothing_to_follow(client: Client) -> None:
    for junk in ("later", "5", "1-2-3", "-1", "0x1-2", ""):
        with pytest.raises(UnknownPosition, match="an event's id '<attempt>-<seq>'") as caught:
            client.subscribe("t", since=junk)
        assert isinstance(caught.value, ValueError)
        assert caught.value.since == junk
    for unknown in ("nobody-s", "no id at all \n", "x" * 5000):
        with pytest.raises(UnknownTrace):
            await client.subscribe(unknown).start()


async def test_a_name_that_was_never_saved_is_told(
    client: Client, engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(saving), client.trace("tiny", "hello") as trace:
        await trace.result()
        with caplog.at_level(logging.WARNING, "tracewire"), anyio.fail_after(PATIENCE):
            async for _ in client.subscribe(trace.id, names={"projction", "projection", "model"}):
                pass
    (record,) = caplog.records
    assert "'projction'" in record.message
    assert "did you mean 'projection'?" in record.message


# --- what was saved ---------------------------------------------------------------------------------------------------


async def test_a_save_that_is_missing_says_why(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(saving), client.trace("tiny", "hello") as trace:
        result = await trace.result()
    assert result.saves == {"projection": [1.5]}
    with pytest.raises(KeyError, match=r"'model' could not be sent: a value of type Llama cannot travel"):
        _ = result.saves["model"]
    with pytest.raises(SaveMissing, match=r"did you mean 'projection'\?$") as caught:
        _ = result.invokes[0].choices[0].saves["projction"]
    assert (caught.value.name, caught.value.reason) == ("projction", "")
    assert result.saves.get("model") is None
    with pytest.raises(SaveMissing, match="nothing as 'rows'"):
        _ = result.shared["rows"]


async def test_a_tracer_s_saves_are_compared_too(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        wrong = Manifest(invoke=0, choice=0, name="x", kind="int", length=1, digest=bytes(16))
        await stage.final(manifest=[wrong])

    async with engine(script), engine(saving, engine="e2", model="other"):
        model = await client.models.get("tiny")
        with model.trace("hello") as tracer:
            x = model.logits.save()
        with anyio.fail_after(PATIENCE):
            async for _ in tracer:
                pass
        with pytest.raises(StateMismatch, match=r"0\.0\.x"):
            _ = tracer.saves

        model = await client.models.get("other")
        with model.trace("hello") as tracer:
            z = model.logits.save()
        await tracer.result()
        with pytest.raises(SaveMissing, match="cannot travel"):
            _ = tracer.saves["model"]


# --- submitting -------------------------------------------------------------------------------------------------------


@intervention
def reads_live(model, tracer, live):
    first = 1
    scale = live.alhpa
    other = tracer.live.alpha


@intervention
def tries_live(model, tracer, live):
    try:
        scale = live.alhpa
    except AttributeError:
        scale = 1.0
    beta = getattr(live, "beta", 2.0)


async def test_a_live_parameter_that_is_not_declared_is_refused_at_its_line(client: Client) -> None:
    with pytest.raises(TraceRejected, match="declares alpha; did you mean 'alpha'") as caught:
        client.trace("tiny", "hello", reads_live, live={"alpha": 1.0})
    assert caught.value.field == "live.alhpa"
    assert caught.value.filename == __file__
    assert caught.value.line == reads_live.first_line + 1
    with pytest.raises(TraceRejected, match=r"live\.alpha.*declares alhpa"):
        client.trace("tiny", prompts=["one", Prompt("two", reads_live)], live={"alhpa": 1.0})
    client.trace("tiny", "hello", reads_live, live={"alhpa": 1.0, "alpha": 1.0})
    client.trace("tiny", "hello", tries_live)


async def test_more_tokens_than_the_context_has_are_refused(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(max_model_len=2048):
        with pytest.raises(TraceRejected, match=r"at most 2048.*got 99999") as caught:
            await client.trace("tiny", "hello", max_tokens=99999).start()
        assert caught.value.field == "sampling.max_tokens"
        async with client.trace("tiny", prompts=["a", Prompt("b", max_tokens=2048)], max_tokens=3) as trace:
            await trace.result()


async def test_a_with_whose_saves_nobody_could_read_is_refused(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        with pytest.raises(BlockError, match=r"write `with model\.trace\(\.\.\.\) as tracer:`") as caught:  # noqa: SIM117
            with model.trace("hello"):
                model.logits.save()
        assert caught.value.filename == __file__
        with model.trace("hello", trace_id="followed"):
            model.logits.save()
        tracer = model.trace("hello")
        with tracer:
            model.logits.save()
        await tracer.start()
        async with client.subscribe("followed"):
            pass


# --- the model at hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["logits", "samples", "tokenizer", "config", "output", "source", "named_modules", "get"]
)
async def test_what_only_a_block_can_read_says_so(client: Client, engine: Callable[..., Any], name: str) -> None:
    async with engine():
        model = await client.models.get("tiny")
        with pytest.raises(AttributeError, match=f"'{name}' exists on the engine, inside a block"):
            getattr(model, name)
        assert not hasattr(model, name)


async def test_a_module_s_words_slices_and_misspelt_children(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        layers = model.model.layers
        assert [layer.path for layer in layers[1:3]] == ["model.layers.1", "model.layers.2"]
        assert [layer.path for layer in layers[-1:]] == [layers[-1].path]
        with pytest.raises(AttributeError, match=r"'model\.layers\.2\.output' exists on the engine"):
            _ = layers[2].output
        with pytest.raises(AttributeError, match=r"client\.edits\(model\)\.install"):
            _ = model.edit
        with pytest.raises(AttributeError, match="AutoTokenizer"):
            _ = model.tokenizer
        with pytest.raises(AttributeError, match=r"no module at 'model\.layrs'; the nearest .* 'model\.layers'"):
            _ = model.model.layrs


async def test_what_only_a_block_s_tracer_has_says_so(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
        tracer = model.trace("hello")
        for name in ("iter", "all", "stop", "cache", "live"):
            with pytest.raises(BlockOnly, match=f"tracer.{name} belongs into a block"):
                getattr(tracer, name)
        assert not hasattr(tracer, "anything_else")
        with pytest.raises(BlockOnly, match="barrier is not served"), model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("one"):
                model.logits.save()


async def test_the_typed_save_is_a_save(client: Client, engine: Callable[..., Any]) -> None:
    @intervention
    def typed(model, tracer, live):
        scores: list[float] = tracewire.save([])

    from tracewire import save

    block = typed.block()
    assert block.modules == {"tracewire": "tracewire"}
    async with engine():
        model = await client.models.get("tiny")
        with model.trace() as tracer:
            rows: list[Any] = tracewire.save([])
            held = save({})
            with tracer.invoke("one"):
                rows.append(save(model.logits))
                held["one"] = 1
        shared = tracer._submission
        assert sorted(unpack(shared.shared)) == ["held", "rows"]
        assert shared.invokes[0].block is not None
        assert shared.invokes[0].block.imports == {"save": ("tracewire", "save")}
        await tracer.result()
