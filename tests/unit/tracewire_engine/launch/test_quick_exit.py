"""A process that leaves does what is registered for its end, and frees nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A process, and in it one that `multiprocessing` starts; each has something to say at its end.
_PROGRAM = """
import atexit, multiprocessing, sys
from tracewire_engine.launch.quick_exit import leave, leave_when_done

class Freed:
    def __del__(self):
        print("freed", flush=True)

def child(ending):
    global kept
    kept = Freed()
    kept.itself = kept
    atexit.register(print, "child's end")
    leave_when_done()
    if ending == "raises":
        raise KeyError("what went wrong")
    if ending != "returns":
        sys.exit(int(ending))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=sys.argv[1:2])
    process.start()
    process.join()
    print("ended with", process.exitcode, flush=True)
    kept = Freed()
    kept.itself = kept
    atexit.register(print, "end", end="")
    leave_when_done()  # without effect
    leave(7)
"""


@pytest.mark.parametrize("ending", ["returns", "0"])
def test_what_is_registered_is_called_and_nothing_is_freed(ending: str, tmp_path) -> None:
    done = _run(ending, tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "child's end\nended with 0\nend"


@pytest.mark.parametrize(("ending", "status"), [("raises", 1), ("3", 3)])
def test_a_process_that_fails_ends_as_usual(ending: str, status: int, tmp_path) -> None:
    done = _run(ending, tmp_path)
    assert done.returncode == 7
    assert ("what went wrong" in done.stderr) == (ending == "raises")
    assert done.stdout == f"child's end\nfreed\nended with {status}\nend"


def _run(ending: str, folder) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    return subprocess.run([sys.executable, program, ending], capture_output=True, text=True, check=False, timeout=60)
