"""The command says that it serves when the registry has it, and refuses another model under the same name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine
from tests.support.redis.proxy import proxy
from tracewire_bus.bus import Bus
from tracewire_bus.store.engine_registry import EngineRegistry
from tracewire_bus.wire.messages import ModuleInfo
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.launch import adapter_process, cli
from tracewire_engine.launch.adapter_group import AdapterGroup
from tracewire_engine.launch.cli import _sockets_below, _stranger
from tracewire_engine.launch.options import add_options
from tracewire_engine.link.step_link import LinkReceiver

PATIENCE = 60


class Whole(PlayedEngine):
    """With what the command asks of vLLM's engine besides."""

    async def untapped_graphs(self) -> list[str]:
        return []


def parsed(*arguments: str) -> argparse.Namespace:
    """Our own options, as the command has them."""
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group("tracewire"), {})
    return parser.parse_args(["MODEL", *arguments])


def test_vllms_sockets_are_in_the_engines_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    _sockets_below(tmp_path / ("x" * 100))
    assert "VLLM_RPC_BASE_PATH" not in os.environ
    with LinkReceiver() as link:
        _sockets_below(link.folder)
        assert Path(get_open_zmq_ipc_path().removeprefix("ipc://")).parent == link.folder
        _sockets_below(tmp_path)
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(link.folder)


async def test_it_says_ready_when_the_registry_has_it_and_not_before(
    bus: Bus,
    embedded: str,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Redis was away at the moment at which the model had loaded, besides."""
    info = engine_info()
    entered = Bus.__aenter__
    said: list[str] = []
    adapters: list[Adapter] = []
    register = EngineRegistry.register

    async def opened(self: Bus) -> Bus:
        if not said:
            said.append("opened")
            # As after a patience that is over: nothing answers there.
            way.away = True
            self._patience_s = 0.1
            try:
                return await entered(self)
            finally:
                way.away = False
        self._patience_s = 20.0
        return await entered(self)

    async def registered(self: EngineRegistry, *arguments: Any) -> None:
        said.append(capsys.readouterr().out)
        await register(self, *arguments)
        said.append("registered")

    class Kept(Adapter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            adapters.append(self)

    monkeypatch.setattr(adapter_process, "_REDIS_S", 0.0)
    monkeypatch.setattr(Bus, "__aenter__", opened)
    monkeypatch.setattr(EngineRegistry, "register", registered)
    monkeypatch.setattr("tracewire_engine.adapter.service.Adapter", Kept)
    monkeypatch.setattr("tracewire_engine.adapter.vllm_engine.VllmEngine", lambda *arguments: Whole())
    async with proxy(embedded, tmp_path) as way, anyio.create_task_group() as group:
        options = parsed(
            "--url", way.url, "--prefix", prefix, "--first-answer", "0", "--drain", "0", "--retention", "60"
        )
        options.listener = options.chats = None
        options.blocks, options.blocks_reason = "inline", "the default"
        options.adapters = 1
        ended: list[int] = []

        async def run() -> None:
            ended.append(await cli._run(None, None, None, info, options, AdapterGroup(lambda *_: None)))

        group.start_soon(run)
        printed = ""
        with anyio.fail_after(PATIENCE):
            while "ready" not in printed:
                await anyio.lowlevel.checkpoint()
                printed = capsys.readouterr().out
        assert printed == f"ready {info.engine}\n"
        assert said[:3] == ["opened", "", "registered"]
        assert await bus.registry.alive(info.engine)
        adapters[0].stop()
    assert ended == [0]


async def test_an_engine_of_another_model_under_the_same_name_is_refused(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    ours = engine_info("tiny", "ours", hidden_size=16)
    assert await _stranger(bus, ours) == ""
    there = engine_info("tiny", "there")
    await bus.registry.register(there)
    said = await _stranger(bus, ours)
    assert "engine there serves another model as 'tiny'" in said
    assert "hidden_size 16, not 8" in said
    assert await _stranger(bus, engine_info("other", "ours", hidden_size=16)) == ""
    # One that differs in less is told of.
    assert await _stranger(bus, engine_info("tiny", "ours", dtype="float32", modules=[ModuleInfo("", "M")])) == ""
    assert "differs in: dtype, module tree" in caplog.text
    # The adapters of an engine are no strangers to each other.
    caplog.clear()
    await bus.registry.register(engine_info("tiny", "ours.1", dtype="float32"))
    await bus.registry.register(msgspec.structs.replace(there, state="draining"))
    assert await _stranger(bus, engine_info("tiny", "ours", dtype="bfloat16")) == ""
    assert "differs in" not in caplog.text
    # One that leaves does not count.
    await bus.registry.register(msgspec.structs.replace(there, state="draining"))
    assert await _stranger(bus, ours) == ""


def test_a_wrong_value_of_one_of_vllm_s_options_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli._parsed(["demo", "--url", "redis://localhost", "--max-model-len", "x"], {})
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("tracewire engine: error: argument --max-model-len: ")
    assert error.endswith(" (see tracewire engine --help-vllm)\n")
    assert error.count("\n") == 1
