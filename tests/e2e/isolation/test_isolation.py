"""Hostile and careless blocks beside innocent traces on a real engine, and the parts of the table that need none."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tracewire_bus.wire.messages import Failure

from . import fuzz, page, table
from .batch import Batch, Seen
from .engine import offers_modes
from .generated import generate
from .kinds import Kind, marked_line, once, unique
from .table import KINDS, mode_options, summary
from .trial import PAUSE_S, Verdict, excess, trial, unmet

#: A few kinds that inline mode contains: of values, time, the process and its state.
FEW = [
    *("samples-too-large-in-place", "nan-once", "catch-all-with-body"),
    *("default-device", "modules-cleared", "fork-returns"),
]

#: How many blocks the short run of the fuzz has.
BLOCKS = 48


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.timeout(900)
async def test_what_inline_mode_contains_harms_nobody(tmp_path: Path) -> None:
    async with trial(tmp_path, *mode_options("inline")) as running:
        for name in FEW:
            verdict = await running.judge(KINDS[name])
            found = (verdict.harmed, verdict.restarted, verdict.hung, verdict.left, verdict.unmet, verdict.stole)
            assert found == ([], False, False, [], "", False), verdict
        found = await fuzz.run_fuzz(running, "inline", BLOCKS, seed=1)
        assert (found["harmed"], found["restarted"]) == ([], 0)
        assert found["hostile"] > 0
        assert "all KV blocks are free" in running.engine.stop()


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["inline", "host"])
def test_every_kind(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if mode == "host" and not offers_modes():
        pytest.skip("this engine has no option --blocks")
    names = [kind.name for kind in KINDS.values() if mode == "host" or kind.inline]
    status = table.main(["--mode", mode, "--json", "--only", ",".join(names), "--log", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["harmed"], found["restarted"], found["hung"]) == ([], [], []), found
    if mode == "host":
        assert (status, found["stalled"], found["read"], found["unmet"]) == (0, [], [], []), found


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
@pytest.mark.timeout(7200)
def test_two_thousand_generated_blocks() -> None:
    assert fuzz.main(["--mode", "host" if offers_modes() else "inline", "--blocks", "2000"]) == 0


def test_an_engine_without_the_option_has_no_host_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "offers_modes", lambda: False)
    assert table.main([]) == 2
    assert "no option --blocks" in capsys.readouterr().err
    assert mode_options("inline") == ()
    monkeypatch.setattr(table, "offers_modes", lambda: True)
    assert mode_options("host")[:2] == ("--blocks", "host")
    assert int(mode_options("host")[3]) < PAUSE_S * 1000


def test_the_kinds_are_python_and_many() -> None:
    assert len(KINDS) >= 146
    for kind in KINDS.values():
        ast.parse(kind.source)
        assert kind.meets == "error" or marked_line(kind.source) is None, kind.name
    with pytest.raises(ValueError, match="two kinds"):
        unique([KINDS["stop"], KINDS["stop"]])
    assert marked_line(once("a = 1\nb = 2 #!", before="c = 0")) == 7


@pytest.mark.parametrize(
    ("meets", "status", "failure", "expected"),
    [
        ("error", "failed", Failure(type="ValueError", message="", line=6), ""),
        ("error", "failed", Failure(type="ValueError", message="", line=5), "its error names line 5, not 6"),
        ("error", "failed", Failure(type="TypeError", message="", line=6), "its error is a TypeError"),
        ("error", "failed", Failure(type="EngineLost", message=""), "its error is the loss of the engine"),
        ("error", "finished", None, "it has no error, and ended as finished"),
        ("error", None, None, "it did not end"),
        ("finishes", "failed", Failure(type="ValueError", message=""), "it ended as failed"),
        ("finishes", "stopped", None, ""),
        ("ends", "failed", Failure(type="EngineLost", message=""), ""),
    ],
)
def test_an_offender_s_end_is_compared_with_its_kind(
    meets: str, status: str, failure: Failure | None, expected: str
) -> None:
    kind = Kind("odd", once("a = 1\nraise ValueError #!"), meets, "ValueError")  # type: ignore[arg-type]
    seen = Seen()
    seen.fold.status, seen.fold.error = status, failure  # type: ignore[assignment]
    assert unmet(kind, seen) == expected


def test_a_busy_machine_makes_the_control_late_too_and_a_kind_that_stalls_only_itself() -> None:
    assert excess([1.4, 0.2, 0.9, 1.1, 0.3], [0.8, 1.2, 0.2, 0.3, 1.0]) <= PAUSE_S
    assert excess([0.9, 0.5, 1.4, 0.8, 0.1], [0.2, 0.3, 0.1, 1.2, 0.2]) > PAUSE_S
    assert excess([0.1], [0.4]) == 0


def test_an_innocent_trace_is_late_if_its_own_block_took_too_long() -> None:
    calm, late, wrong = Seen(), Seen(), Seen()
    late.fold.error = Failure(type="BlockTimeout", message="")
    wrong.fold.error = Failure(type="ValueError", message="")
    assert Batch({"calm": calm, "late": late, "wrong": wrong}, None, True, 1.0).late == ["late"]


def test_the_summary_names_each_kind_where_it_belongs() -> None:
    verdicts = [
        Verdict("calm"),
        Verdict("slow", pause_s=0.3),
        Verdict("bad", harmed=["plain"], pause_s=9.0),
        Verdict("killer", restarted=True),
        Verdict("thief", stole=True),
    ]
    found = summary([one.as_dict() for one in verdicts])
    assert found["kinds"] == 5
    assert (found["harmed"], found["restarted"], found["stalled"]) == (["bad"], ["killer"], ["slow"])
    assert found["read"] == ["thief"]
    assert [one.outcome for one in verdicts] == ["contained", "stalled", "harmed", "restarted", "read"]


def test_a_seed_is_one_block_and_a_tenth_is_hostile() -> None:
    kinds = fuzz.eligible("inline")
    drawn = [generate(seed, kinds) for seed in range(1000)]
    assert drawn == [generate(seed, kinds) for seed in range(1000)]
    for one in drawn:
        ast.parse(one.source)
    assert 60 < sum(bool(one.kind) for one in drawn) < 140
    assert len({one.source for one in drawn}) > 800
    assert {kind.name for kind in kinds} < {kind.name for kind in fuzz.eligible("host")}


def test_the_page_has_each_kind_in_the_row_of_its_outcome() -> None:
    verdicts = [
        Verdict("calm"),
        Verdict("also-calm"),
        Verdict("messy", left=["cwd"]),
        Verdict("killer", restarted=True),
    ]
    lines = page.rows([one.as_dict() for one in verdicts])
    assert [line.count("`") // 2 for line in lines[2:]] == [2, 1, 1]
    assert "| 2 | `calm`, `also-calm` |" in lines[2]
    assert "`messy` (cwd)" in lines[3]
    text = page.written("a\n<!-- inline -->\nold\n<!-- end of inline -->\nz", "inline", ["new"])
    assert text == "a\n<!-- inline -->\n\nnew\n\n<!-- end of inline -->\nz"
    with pytest.raises(ValueError, match="no <!-- host -->"):
        page.written(text, "host", [])
