"""The names of served models, for shells."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.support.cli import story
from tracewire.cli import model_names
from tracewire.cli.model_names import add_model, served_names


async def test_the_names_are_those_of_the_bus(engine: Callable[..., Any], redis_url: str, prefix: str) -> None:
    async with engine(story):
        assert await served_names(redis_url, prefix) == ["tiny"]
        assert await served_names(redis_url, f"{prefix}-other") == []


async def test_a_bus_that_does_not_answer_has_no_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_names, "_PATIENCE_S", 0.05)
    parser = argparse.ArgumentParser()
    add_model(parser)
    (action,) = (one for one in parser._actions if one.dest == "model")

    async def silent(stream: Any) -> None:
        await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, silent)
        port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
        options = argparse.Namespace(url=f"redis://127.0.0.1:{port}", prefix="tw")
        names = await anyio.to_thread.run_sync(lambda: action.completer("", options))  # type: ignore[attr-defined]
        group.cancel_scope.cancel()
    assert names == []
    assert logging.root.manager.disable == 0
    assert capfd.readouterr() == ("", "")
