"""Many traces, half of them cancelled: the others do not notice, and nothing is left in the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_cancelling_200_of_400_leaves_nothing_behind_and_the_others_alone() -> None:
    script = Path(__file__).with_name("inside.py")
    root = script.parents[2]
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["finals"] == [1]
    # Some may have finished before they heard of it.
    assert 150 <= figures["cancelled"] <= 200
    assert figures["finished"] == 200
    assert figures["differ"] == []
    assert figures["prefixes"] == 200
    assert figures["tracked"] == 0
    assert figures["kv_free"] is True
