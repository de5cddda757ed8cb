"""A process that makes something, and is then killed: what it leaves behind is for the next owner to remove."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def left_by_killed(makes: str) -> Path:
    """The path that a program prints. The program is killed right after that.

    Args:
        makes: lines of Python that set `path`.
    """
    program = f"import os, signal\n{makes}\nprint(path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == -9
    return Path(ended.stdout.strip())
