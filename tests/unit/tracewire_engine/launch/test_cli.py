"""The command says that it serves when the registry has it, and refuses another model under the same name."""

from __future__ import annotations

import argparse
import sys
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine
from tests.support.redis.proxy import proxy
from tests.support.served import submission
from tests.support.spans import collector
from tracewire_bus.bus import Bus, Taken
from tracewire_bus.domain.limit_table import Limits
from tracewire_bus.store.engine_registry import EngineRegistry
from tracewire_bus.wire.messages import ModuleInfo
from tracewire_engine.adapter.bulk_writer import BulkSettings
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.launch import cli
from tracewire_engine.launch.cli import _check_bulk, _exporter, _settings, _spans, _stranger
from tracewire_engine.launch.options import add_options

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

    monkeypatch.setattr(cli, "_REDIS_S", 0.0)
    monkeypatch.setattr(Bus, "__aenter__", opened)
    monkeypatch.setattr(EngineRegistry, "register", registered)
    monkeypatch.setattr("tracewire_engine.adapter.service.Adapter", Kept)
    monkeypatch.setattr("tracewire_engine.adapter.vllm_engine.VllmEngine", lambda *arguments: Whole())
    async with proxy(embedded, tmp_path) as way, anyio.create_task_group() as group:
        options = parsed(
            "--url", way.url, "--prefix", prefix, "--first-answer", "0", "--drain", "0", "--retention", "60"
        )
        options.listener = options.chats = None
        ended: list[int] = []

        async def run() -> None:
            ended.append(await cli._run(None, None, None, info, options))

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
    # One that leaves does not count.
    await bus.registry.register(msgspec.structs.replace(there, state="draining"))
    assert await _stranger(bus, ours) == ""


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--drain", 3.5, "drain_s"),
        ("--blob-threshold", 7, "blob_threshold"),
        ("--retain-events", 7, "retain_events"),
        ("--retain-bytes", 7, "retain_bytes"),
        ("--retain-traces", 7, "retain_traces"),
        ("--retain-total-bytes", 7, "retain_total_bytes"),
        ("--buffer-bytes", 7, "buffer_bytes"),
        ("--memory-patience", 3.5, "memory_patience_s"),
        ("--engine-patience", 30.5, "engine_patience_s"),
    ],
)
def test_an_option_reaches_the_adapter(option: str, value: float, field: str) -> None:
    given, usual = _settings(parsed(option, str(value))), _settings(parsed())
    changed = {one.name for one in fields(given) if getattr(given, one.name) != getattr(usual, one.name)}
    assert changed == {field}
    assert getattr(given, field) == value


def test_a_limit_reaches_the_adapter() -> None:
    assert _settings(parsed("--limit", "choices=3", "--limit", "paused-s=7")).limits == Limits(choices=3, paused_s=7)


def test_bulk_goes_where_the_options_say(tmp_path: Path) -> None:
    assert _settings(parsed()).bulk is None
    given = ("--bulk", str(tmp_path), "--bulk-threshold", "5", "--bulk-bytes", "6", "--bulk-listen", "h:0")
    more = ("--bulk-advertise", "name", "--bulk-archive", "s3://b")
    assert _settings(parsed(*given, *more)).bulk == BulkSettings(tmp_path, 5, 6, "h:0", "name", "s3://b")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bulk-listen", "h:1"], "--bulk-listen, --bulk-advertise and --bulk-archive need --bulk"),
        (["--bulk-archive", "s3://b"], "--bulk-listen, --bulk-advertise and --bulk-archive need --bulk"),
        (
            ["--bulk", "FOLDER", "--bulk-archive", "nowhere://b"],
            "--bulk-archive: no segments can be moved there: .*nowhere",
        ),
        (["--bulk", "FOLDER", "--bulk-advertise", "h"], "--bulk-advertise needs --bulk-listen"),
        (["--bulk", "FOLDER", "--bulk-listen", "0.0.0.0:1"], "--bulk-listen 0.0.0.0:1 needs --bulk-advertise"),
        (["--bulk", "/dev/null/x"], "--bulk: no bulk store can be made in /dev/null/x: Not a directory"),
    ],
)
def test_bulk_that_cannot_be_kept_is_refused_before_the_model_loads(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        _check_bulk(parsed(*(argument.replace("FOLDER", str(tmp_path)) for argument in arguments)))


def test_bulk_that_can_be_kept_leaves_nothing_behind(tmp_path: Path) -> None:
    _check_bulk(parsed("--bulk", str(tmp_path / "new"), "--bulk-listen", "0.0.0.0:1", "--bulk-advertise", "h"))
    assert list((tmp_path / "new").iterdir()) == []


async def test_the_spans_of_an_engine_are_exported_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as held:
        given = parsed()
        given.exporter = _exporter(given)
        assert _spans(given, engine_info(), held) is None
    with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        async with AsyncExitStack() as held:
            given = parsed("--tracing")
            given.exporter = _exporter(given)
            # As vLLM does while the model loads, for its own spans.
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/nowhere")
            spans = _spans(given, engine_info(), held)
            assert spans is not None
            spans.begin(Taken("t", {}, 0.0), submission("t"), 1, "e").end()
    assert collected.named("text_completion tiny").service == "tracewire-engine"


def test_tracing_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tracewire_bus.span_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"--tracing needs opentelemetry\S+: pip install 'tracewire\[tracing\]'"):
        _exporter(parsed("--tracing"))
