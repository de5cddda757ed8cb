"""The units of `deploy/systemd/`: systemd reads them, and their times fit their commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
#: What systemd itself brings.
TARGETS = ("basic", "multi-user", "network-online", "shutdown", "sysinit")


def verified(root: Path, units: list[Path]) -> str:
    """What systemd has to say of these units on a host where their commands are installed."""
    for folder in ("etc/systemd/system", "usr/lib/systemd/system"):
        (root / folder).mkdir(parents=True)
    for name in TARGETS:
        (root / "usr/lib/systemd/system" / f"{name}.target").write_text("[Unit]\nDescription=Of systemd\n")
    for unit in units:
        shutil.copy(unit, root / "etc/systemd/system")
        for command in re.findall(r"^ExecStart=(\S+)", unit.read_text(), re.MULTILINE):
            there = root / command.lstrip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text("#!/bin/sh\n")
            there.chmod(0o755)
    names = [unit.name.replace("@.", "@demo.") for unit in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={root}", *names], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr or ("" if done.returncode == 0 else f"exit status {done.returncode}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_them(tmp_path: Path) -> None:
    assert len(UNITS) == 3
    assert verified(tmp_path / "ours", UNITS) == ""
    wrong = tmp_path / "wrong.service"
    wrong.write_text(UNITS[0].read_text().replace("Restart=on-failure", "Restart=sometimes"))
    assert "sometimes" in verified(tmp_path / "other", [wrong])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_drains_has_the_time_to(unit: Path) -> None:
    text = unit.read_text()
    (within,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    drains = re.findall(r"--drain (\d+)", text)
    assert all(int(drain) + 10 <= int(within) for drain in drains)
    assert drains or unit.name == "tracewire-redis.service"
