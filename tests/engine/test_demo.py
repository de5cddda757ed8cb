"""The demo proves its claim, and says so to scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "run.py"


def test_the_demo_s_three_consumers_agree_with_each_other_and_with_nnsight(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, str(DEMO), "--json", "--logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["agree"] is True
    assert figures["tokens"] == 64
    service, late, narrow = figures["consumers"]
    assert service["digests"] == late["digests"] == figures["nnsight_collect"]
    assert set(service["digests"]) == {"probability", "projection"}
    assert set(narrow["digests"]) == {"projection"}
    assert narrow["digests"]["projection"] == service["digests"]["projection"]
    assert [consumer["tokens"] for consumer in figures["consumers"]] == [64, 64, 64]
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["pid", "cmdline"])
        if process.info["pid"] not in before and "tracewire" in " ".join(process.info["cmdline"] or [])
    ]
    assert left == []
