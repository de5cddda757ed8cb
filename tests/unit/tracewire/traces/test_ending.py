"""How a trace ends: a result, or an error that says what the engine said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.bus_engine import Stage
from tests.support.clients import watch
from tracewire import Client, InterventionError, StateMismatch, TraceFailed, UnknownModulePath
from tracewire_bus.wire.messages import Failure, Manifest


async def test_a_block_that_an_engine_refuses(client: Client, engine: Callable[..., Any]) -> None:
    failure = Failure(
        type="UnknownModulePath", message="no x; the nearest is y", field="block", filename="f.py", line=7, source="m.x"
    )

    async def script(stage: Stage) -> None:
        await stage.final("rejected", failure)

    async with engine(script), client.trace("tiny", "hello", watch) as trace:
        with pytest.raises(UnknownModulePath, match=r"block: no x; the nearest is y \(f\.py:7\)") as caught:
            await trace.result()
        assert (caught.value.line, caught.value.source) == (7, "m.x")


async def test_a_block_that_raises_is_an_error_after_its_last_output(
    client: Client, engine: Callable[..., Any]
) -> None:
    failure = Failure(
        type="ZeroDivisionError",
        message="division by zero",
        field="block",
        filename="service.py",
        line=12,
        source="    x = 1 / 0",
        traceback='  File "service.py", line 12, in watch\n    x = 1 / 0\n',
    )

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await stage.final("failed", failure)

    async with engine(script), client.trace("tiny", "hello", watch) as trace:
        assert (await anext(trace)).text == "one"
        with pytest.raises(InterventionError, match=r"division by zero\n  at service.py:12\n    x = 1 / 0") as caught:
            await anext(trace)
        error = caught.value
        assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
        assert (error.filename, error.line, error.source) == ("service.py", 12, "x = 1 / 0")
        assert error.remote_traceback is not None
        assert "in watch" in error.remote_traceback
        assert error.trace_id == trace.id
        assert error.result is not None
        assert error.result.saves == {"x": [1]}
        assert (await trace.accepted()).model == "tiny"
        with pytest.raises(InterventionError) as again:
            await trace.result()
        assert again.value.result.text == "one"


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
async def test_a_trace_that_its_engine_could_not_end(client: Client, engine: Callable[..., Any], status: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        error = Failure(type="EngineShutdown", message="it was shut down") if status == "failed" else None
        await stage.final(status, error)

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(TraceFailed, match=status) as caught:
            await trace.result()
        assert not isinstance(caught.value, InterventionError)
        assert caught.value.status == status
        assert caught.value.result.text == "one"
        assert caught.value.type == ("EngineShutdown" if status == "failed" else None)


async def test_a_stopped_trace_is_a_result(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final("stopped", save_errors={"0.0.bad": "an object"})

    async with engine(script), client.trace("tiny", "hello") as trace:
        result = await trace.result()
    assert (result.status, result.text, result.saves) == ("stopped", "", {})
    assert result.save_errors == {"0.0.bad": "an object"}


async def test_a_state_that_differs_from_the_engine_s_is_an_error(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1, "y": 2})
        wrong = Manifest(invoke=0, choice=0, name="x", kind="list", length=1, digest=bytes(16))
        await stage.final(manifest=[wrong])

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(StateMismatch, match=r"0\.0\.x") as caught:
            await trace.result()
        assert "0.0.x" in caught.value.names
