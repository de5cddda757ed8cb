"""The demo proves its claim, and says so to scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT

DEMO = ROOT / "examples" / "demo" / "run.py"


@pytest.mark.usefixtures("starts_engine")
def test_the_demo_s_three_consumers_agree_with_each_other_and_with_nnsight(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, str(DEMO), "--json", "--logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "DEMO_TEST": mark})
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["agree"] is True
    assert figures["problems"] == []
    assert figures["tokens"] == 64
    service, late, narrow = figures["consumers"]
    assert service["digests"] == late["digests"] == figures["nnsight_collect"]
    assert set(service["digests"]) == {"probability", "projection"}
    assert set(narrow["digests"]) == {"projection"}
    assert narrow["digests"]["projection"] == service["digests"]["projection"]
    assert [consumer["tokens"] for consumer in figures["consumers"]] == [64, 64, 64]
    assert all(0 < consumer["outputs"] <= 64 for consumer in figures["consumers"])
    assert len({consumer["token_digest"] for consumer in figures["consumers"]}) == 1
    assert figures["values"] == 128
    assert figures["values_per_second"] > figures["tokens_per_second"] > 0
    # What a person reads counts the same.
    for consumer in figures["consumers"]:
        shown = f"  {consumer['name']:8} 64 tokens in {consumer['outputs']:2} outputs "
        assert shown in done.stderr
    assert "all agree: True" in done.stderr
    # Whatever it started has this in its environment. A zombie has none, and a process may end while it is looked at.
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline", "environ"]) if marked(process, mark)]
    assert left == []


def marked(process: psutil.Process, mark: str) -> bool:
    """Whether a process was started by the demo."""
    return (process.info["environ"] or {}).get("DEMO_TEST") == mark
