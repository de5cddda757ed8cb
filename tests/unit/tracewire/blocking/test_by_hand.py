"""A blocking client's life, what it loads, and traces that are written inline."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tracewire import ConnectError


async def test_inline_blocks(serving: Any) -> None:
    def program(made: Any) -> None:
        with made() as client:
            model = client.models.get("tiny")
            assert isinstance(model, tracewire.blocking.Model)
            direction = np.ones(4, np.float32)
            with model.trace("x", max_tokens=3) as tracer:
                scores = [].save()
                for step in tracer.iter[:]:
                    scores.append(model.logits.sum() + direction.sum())
            assert isinstance(tracer, tracewire.blocking.Tracer)
            assert tracer.result().text == "one two three"
            assert list(tracer.saves) == ["scores"]
            with model.trace(max_tokens=3) as tracer:
                for text in ("a", "b"):
                    with tracer.invoke(text):
                        top = model.logits.argmax().save()
            assert tracer.until_done() == "finished"

    await serving(program)


async def test_arrays_that_are_referred_to_are_loaded(serving: Any) -> None:
    array = np.arange(6, dtype=np.float32)

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": await stage.store(array, "x")})
        await stage.final()

    def program(made: Any) -> None:
        with made() as client:
            (loaded,) = client.load(client.trace("tiny", "x").result().saves)["x"]
            assert loaded.tolist() == array.tolist()

    await serving(program, script)


async def test_a_client_that_is_not_connected_says_how(embedded: str, prefix: str) -> None:
    client = tracewire.blocking.Client(embedded, prefix=prefix)
    for call in (client.models.list, partial(client.trace, "tiny", "x")):
        with pytest.raises(ConnectError, match="not connected yet: enter it with `with client:`"):
            call()
    with pytest.raises(ConnectError, match="cannot connect"):
        await anyio.to_thread.run_sync(tracewire.blocking.connect, "redis://127.0.0.1:1")
