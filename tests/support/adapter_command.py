"""The adapter's command as its supervisor runs it, and other modules, in a fork of a process that has imported vLLM.

Importing vLLM takes most of the time of a command that is refused, and of a benchmark in small.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import pytest

__all__ = ["Done", "adapter_command", "import_ahead", "module_command"]

#: What the adapter's command imports before it looks at its settings.
_IMPORTED = ["tracewire_engine.launch.cli", "vllm.engine.arg_utils", "vllm.utils.argparse_utils"]
_IMPORTED.append("tracewire_engine.launch.engine_builder")

#: As the command sets it before it imports vLLM.
_AT_IMPORT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


_forking = multiprocessing.get_context("forkserver")


def import_ahead() -> None:
    """Begin with the imports, and return at once."""
    _forking.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _AT_IMPORT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def adapter_command(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Done:
    """Run the command with these arguments to its end; `folder` takes what it says.

    Raises:
        TimeoutError: it did not end within 120 s, and was killed.
    """
    return _in_a_fork(folder, environment or {}, _adapter, *arguments)


def module_command(folder: Path, module: str, *arguments: str) -> Done:
    """Likewise `python -m module` with these arguments.

    Raises:
        TimeoutError: it did not end within 120 s, and was killed.
    """
    return _in_a_fork(folder, {}, _module, module, *arguments)


def _in_a_fork(folder: Path, environment: Mapping[str, str], what: Callable[..., None], *arguments: str) -> Done:
    import_ahead()
    out, err = folder / "stdout", folder / "stderr"
    child = _forking.Process(target=_run, args=(out, err, {**os.environ, **environment}, what, arguments))
    child.start()
    try:
        child.join(120)
        if child.exitcode is None:
            raise TimeoutError(f"still running:\n{err.read_text()[-4000:]}")
    finally:
        child.kill()
        child.join()
    return Done(child.exitcode, out.read_text(), err.read_text())


def _run(
    out: Path, err: Path, environment: dict[str, str], what: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    for stream, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    what(*arguments)


def _adapter(*arguments: str) -> None:
    from tracewire_engine.launch.cli import _adapter

    sys.exit(_adapter(list(arguments)))


def _module(module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
