"""`tracewire approve` shows a block, or a diff to what was approved before, and approves just that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tracewire.cli.blocks import load_block
from tracewire.cli.main import main
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.domain.code_identity import code_hash

SOURCE = """
import tracewire

SCALE = 2.0

def scaled(x):
    return x * SCALE

@tracewire.intervention
def watch(model, tracer, live, direction, strength=8.0):
    x = scaled(direction) + strength
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "probes.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def approved(tmp_path: Path) -> Path:
    return tmp_path / "approved.json"


def test_what_a_caller_submits_is_what_was_approved(
    file: Path, approved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["approve", str(file), "--to", str(approved), "--yes"]) == 0
    said = capsys.readouterr()
    assert "block watch(model, tracer, live, direction)" in said.err
    assert "    x = scaled(direction) + strength" in said.err
    assert "constant SCALE = 2.0" in said.err
    (code,) = Approvals(approved).hashes()
    assert said.out.strip() == code
    watch = load_block(str(file))
    assert code_hash(watch(direction=np.ones(3)).block()) == code
    # A caller who passes what has a default sends another block: its value was not approved.
    assert code_hash(watch(direction=1.0, strength=9.0).block()) != code


def test_a_default_may_be_an_argument(file: Path, approved: Path) -> None:
    assert main(["approve", f"{file}::watch", "--to", str(approved), "--yes", "--argument", "strength"]) == 0
    watch = load_block(str(file))
    assert code_hash(watch(direction=1.0, strength=9.0).block()) in Approvals(approved).hashes()


@pytest.mark.parametrize(
    ("was", "now"),
    [("x * SCALE", "x * SCALE * 2"), ("strength=8.0", "strength=800.0"), ("SCALE = 2.0", "SCALE = 3.0")],
    ids=["a helper", "a default", "a name around it"],
)
def test_a_change_is_shown_as_a_diff_and_needs_approval(
    was: str, now: str, file: Path, approved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["approve", str(file), "--to", str(approved), "--yes"])
    capsys.readouterr()
    file.write_text(SOURCE.replace(was, now))
    # Nobody is there to ask.
    assert main(["approve", str(file), "--to", str(approved)]) == 2
    said = capsys.readouterr().err
    assert "\n-" in said
    assert "\n+" in said
    assert "expected --yes, or a terminal" in said
    assert len(Approvals(approved).hashes()) == 1


def test_a_change_within_a_second_is_seen(file: Path, approved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert main(["approve", str(file), "--to", str(approved), "--yes"]) == 0
    before = file.stat()
    file.write_text(SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    watch = load_block(str(file))
    assert code_hash(watch(direction=1.0).block()) not in Approvals(approved).hashes()


def test_an_approval_can_be_taken_back(file: Path, approved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["approve", str(file), "--to", str(approved), "--yes"])
    assert main(["approve", str(file), "--to", str(approved)]) == 0
    assert "approved already" in capsys.readouterr().err
    assert main(["approve", str(file), "--to", str(approved), "--revoke", "--json"]) == 0
    said = capsys.readouterr()
    assert "is not approved any more" in said.err
    assert json.loads(said.out)["approved"] is False
    assert main(["approve", str(file), "--to", str(approved), "--revoke"]) == 0
    assert "was not approved" in capsys.readouterr().err


def test_what_cannot_be_is_refused(file: Path, approved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve", f"{file}::none", "--to", str(approved), "--yes"]) == 2
    assert "no intervention 'none'" in capsys.readouterr().err
    assert main(["approve", str(file), "--to", str(approved), "--yes", "--argument", "nothing"]) == 2
    assert "takes no variable 'nothing'" in capsys.readouterr().err
    approved.write_text("{")
    assert main(["approve", str(file), "--to", str(approved), "--yes"]) == 1
    assert "approved.json" in capsys.readouterr().err
