"""Which of vLLM's model runners the engines under test use: the first, or as `TRACEWIRE_TEST_RUNNER` says, the second.

On a CPU the second one needs Triton's interpreter, in all processes from their start (`interpreted/sitecustomize.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from tracewire_engine.launch.vllm_versions import unknown_vllm

__all__ = ["RUNNER", "interpreted", "planning_ahead", "runner_options"]

#: The environment variable.
RUNNER = "TRACEWIRE_TEST_RUNNER"


def runner_options() -> tuple[str, ...]:
    """The options of an engine under test."""
    runner = os.environ.get(RUNNER, "")
    chosen = ("--model-runner", runner) if runner else ()
    # As `tests/versions` runs them.
    return (*chosen, "--unknown-vllm") if unknown_vllm() else chosen


def interpreted() -> dict[str, str]:
    """The environment in which vLLM's second runner runs on a CPU."""
    return _changed() | {"TRITON_INTERPRET": "1"}


def planning_ahead() -> dict[str, str]:
    """The environment in which vLLM has asynchronous scheduling on a CPU, if an engine's options say so."""
    return _changed() | {"TRACEWIRE_TEST_AHEAD": "1"}


def _changed() -> dict[str, str]:
    """The environment of processes that import `interpreted/sitecustomize.py`."""
    folder = str(Path(__file__).parent / "interpreted")
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    return {"PYTHONPATH": os.pathsep.join([folder, *rest])}
