"""The fuzzing of decoders and of the live intake finds nothing, and would find something."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.security import fuzz


def test_decoders_bear_mutated_messages() -> None:
    said: list[str] = []
    found = fuzz.fuzz_decoders(20_000, 20261124, said.append)
    assert not found.crashes, said
    assert not found.stalls, said


def test_the_corpus_is_read_by_each_decoder_as_it_is() -> None:
    """Messages that expand, nest or collide, and a pickle."""
    seeds = fuzz.corpus()
    assert len(seeds) > 100
    for data in seeds:
        for name, decode in fuzz.DECODERS.items():
            try:
                decode(data)
            except (*fuzz._DECLARED,):
                pass
            except Exception as error:  # a decoder raises what it declares
                pytest.fail(f"{name}: {error!r} for {data[:60]!r}")


def test_a_crash_and_a_stall_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(data: bytes) -> None:
        raise KeyError(len(data))

    def stall(data: bytes) -> None:
        until = time.thread_time() + 2 * fuzz.STALL_S
        while time.thread_time() < until:
            pass

    for decode in (crash, stall):
        monkeypatch.setattr(fuzz, "DECODERS", {"one": decode})
        found = fuzz.fuzz_decoders(3, 1)
        assert (found.crashes["one"], found.stalls["one"]) == ((3, 0) if decode is crash else (0, 3))


def test_growth_is_found_where_messages_leave_something(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []

    def measured(keep: Callable[[bytes], None]) -> float:
        monkeypatch.setattr(fuzz, "DECODERS", {"submission": keep})
        return fuzz.fuzz_decoders(20_000, 5).growth_mib

    # The largest messages need megabytes, which no decoder keeps.
    assert measured(lambda data: None) < fuzz.GROWTH_MIB / 4
    # 16,000 messages that leave 600 bytes each.
    assert measured(lambda data: kept.append(bytes(600))) >= fuzz.GROWTH_MIB
    kept.clear()
    # Objects of Python alone.
    assert measured(lambda data: kept.append([data[:1], len(data) + 0.5, [], []])) >= fuzz.GROWTH_MIB  # type: ignore[arg-type]


def test_the_command_prints_one_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--messages", "400", "--live", "100", "--json", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    assert result["messages"] == 400
    assert {name: result[name] for name in ("crashes", "stalls")} == {"crashes": 0, "stalls": 0}
    assert 0 <= result["growth_mib"] < fuzz.GROWTH_MIB
    assert "seed 3" in err


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_a_million_messages(capsys: pytest.CaptureFixture[str]) -> None:
    said = fuzz.main(["--messages", "1100000", "--live", "100000", "--json"])
    assert said == 0, capsys.readouterr()
