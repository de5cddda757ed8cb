"""Ctrl-C while the command is still being imported ends it without a traceback."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

#: Runs the command, and a signal comes when the module is imported that makes commands.
_INTERRUPTED = """
import signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "tracewire.cli.top":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from tracewire.cli.entry import main
sys.exit(main())
"""


def test_ctrl_c_while_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["tracewire", "tracewire.cli"])
def test_the_package_runs_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tracewire {version('tracewire')}\n"
