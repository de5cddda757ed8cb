"""The options of the command reach the adapter of each process, and those that cannot be are refused."""

from __future__ import annotations

import argparse
import sys
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.bus_engine import engine_info
from tests.support.served import submission
from tests.support.spans import collector
from tracewire_bus.bus import Taken
from tracewire_bus.domain.limit_table import Limits
from tracewire_engine.adapter.bulk_writer import BulkSettings
from tracewire_engine.adapter.settings import Settings
from tracewire_engine.launch.adapter_process import adapter_settings, check_bulk, exporter_of, spans_of
from tracewire_engine.launch.options import add_options


def parsed(*arguments: str) -> argparse.Namespace:
    """Our own options, as the command has them."""
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group("tracewire"), {})
    found = parser.parse_args(["MODEL", "--url", "unix:///nowhere", *arguments])
    found.permit_key = b"k" * 32
    return found


def settings(options: argparse.Namespace, number: int = 0, count: int = 1) -> Settings:
    return adapter_settings(options, number, count, None)


def test_adapters_share_what_the_engine_may_hold(tmp_path: Path) -> None:
    options = parsed("--buffer-bytes", "90", "--bulk", str(tmp_path), "--bulk-bytes", "60", "--bulk-listen", "h:7000")
    found = [settings(options, number, 3) for number in range(3)]
    assert [one.adapter for one in found] == [0, 1, 2]
    assert [one.buffer_bytes for one in found] == [30, 30, 30]
    bulk = [one.bulk for one in found if one.bulk is not None]
    assert [one.most for one in bulk] == [20, 20, 20]
    assert [one.listen for one in bulk] == ["h:7000", "h:7001", "h:7002"]


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
    given, usual = settings(parsed(option, str(value))), settings(parsed())
    names = {one.name for one in fields(given)} - {"code"}
    changed = {name for name in names if getattr(given, name) != getattr(usual, name)}
    assert changed == {field}
    assert getattr(given, field) == value


def test_a_limit_reaches_the_adapter() -> None:
    assert settings(parsed("--limit", "choices=3", "--limit", "paused-s=7")).limits == Limits(choices=3, paused_s=7)


def test_bulk_goes_where_the_options_say(tmp_path: Path) -> None:
    assert settings(parsed()).bulk is None
    given = ("--bulk", str(tmp_path), "--bulk-threshold", "5", "--bulk-bytes", "6", "--bulk-listen", "h:0")
    more = ("--bulk-advertise", "name", "--bulk-archive", "s3://b")
    assert settings(parsed(*given, *more)).bulk == BulkSettings(tmp_path, 5, 6, "h:0", "name", "s3://b")


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
        check_bulk(parsed(*(argument.replace("FOLDER", str(tmp_path)) for argument in arguments)))


def test_bulk_that_can_be_kept_leaves_nothing_behind(tmp_path: Path) -> None:
    check_bulk(parsed("--bulk", str(tmp_path / "new"), "--bulk-listen", "0.0.0.0:1", "--bulk-advertise", "h"))
    assert list((tmp_path / "new").iterdir()) == []


async def test_the_spans_of_an_engine_are_exported_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as held:
        given = parsed()
        given.exporter = exporter_of(given)
        assert spans_of(given, engine_info(), held) is None
    with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        async with AsyncExitStack() as held:
            given = parsed("--tracing")
            given.exporter = exporter_of(given)
            # As vLLM does while the model loads, for its own spans.
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/nowhere")
            spans = spans_of(given, engine_info(), held)
            assert spans is not None
            spans.begin(Taken("t", {}, 0.0), submission("t"), 1, "e").end()
    assert collected.named("text_completion tiny").service == "tracewire-engine"


def test_tracing_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tracewire_bus.span_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"--tracing needs opentelemetry\S+: pip install 'tracewire\[tracing\]'"):
        exporter_of(parsed("--tracing"))
