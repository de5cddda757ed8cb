"""The supervisor, of programs that stand in for an adapter: what it passes on, and when it starts one again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

RUN = """
import sys
from tracewire_engine.launch import supervisor
supervisor._FIRST_S = 0.01
sys.exit(supervisor.supervise(sys.argv[2:], None if sys.argv[1] == "None" else int(sys.argv[1]), GRACE_S))
"""


#: Counts its starts in a file, and is served by what the test says of the n-th.
ADAPTER = """
import os, pathlib, signal, sys, time
count = pathlib.Path(sys.argv[1])
number = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (number + 1))
if {serves}:
    print(f"ready engine-{{number}}", flush=True)
{then}
"""


def supervised(
    tmp_path: Path, then: str, restarts: str = "None", serves: str = "True", grace_s: str = "60.0"
) -> subprocess.Popen[str]:
    """A supervisor of an adapter that does this once it serves."""
    adapter = tmp_path / "adapter.py"
    adapter.write_text(ADAPTER.format(then=then, serves=serves))
    return subprocess.Popen(
        [
            *(sys.executable, "-c", RUN.replace("GRACE_S", grace_s), restarts),
            *(sys.executable, str(adapter), str(tmp_path / "count")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def starts(tmp_path: Path) -> int:
    """How often the adapter was started."""
    return len((tmp_path / "count").read_text())


@pytest.mark.parametrize(("status", "often"), [(0, 1), (2, 1)])
def test_what_ends_for_good_is_not_started_again(tmp_path: Path, status: int, often: int) -> None:
    with supervised(tmp_path, f"sys.exit({status})") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert said == "ready engine-0\n"
    assert starts(tmp_path) == often


def test_what_dies_is_started_again_and_serves_anew(tmp_path: Path) -> None:
    with supervised(tmp_path, "os.kill(os.getpid(), 9) if number < 2 else time.sleep(1000)") as process:
        assert process.stdout is not None
        for number in range(3):
            assert process.stdout.readline() == f"ready engine-{number}\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    # It has no handler of its own here: ended by the signal that was handed on.
    assert process.returncode == 128 + signal.SIGTERM
    assert starts(tmp_path) == 3


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)", "sys.exit(1)", "sys.exit(0)"])
def test_what_was_asked_to_drain_is_not_started_again_however_it_ends(tmp_path: Path, then: str) -> None:
    with supervised(tmp_path, f"print('draining engine-0', flush=True); {then}") as process:
        said, _ = process.communicate(timeout=60)
    assert said == "ready engine-0\ndraining engine-0\n"
    assert starts(tmp_path) == 1


def test_no_more_often_than_it_was_told(tmp_path: Path) -> None:
    with supervised(tmp_path, "sys.exit(1)", "1") as process:
        process.communicate(timeout=60)
    assert process.returncode == 1
    assert starts(tmp_path) == 2


def test_one_that_never_comes_to_serve_is_given_up(tmp_path: Path) -> None:
    with supervised(tmp_path, "sys.exit(7)", serves="number == 0") as process:
        process.communicate(timeout=200)
    assert process.returncode == 7
    assert starts(tmp_path) == 6


def test_what_an_adapter_leaves_behind_is_ended_before_the_next_one_starts(tmp_path: Path) -> None:
    then = """
import subprocess
if number == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    pathlib.Path(sys.argv[1]).with_name("child").write_text(str(child.pid))
    os.kill(os.getpid(), 9)
child = int(pathlib.Path(sys.argv[1]).with_name("child").read_text())
sys.exit(2 if not os.path.exists(f"/proc/{child}") else 1)
"""
    with supervised(tmp_path, then, "1") as process:
        process.communicate(timeout=60)
    assert process.returncode == 2
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_what_an_adapter_prints_is_passed_on_as_it_is_and_to_its_end(tmp_path: Path) -> None:
    """Also where it is no text, and where nobody reads any more: an adapter that cannot print would stand still."""
    then = """
sys.stdout.buffer.write(b"\\xff\\xfe\\n")
for _ in range(1000):
    sys.stdout.buffer.write(b"x" * 1000 + b"\\n")
sys.stdout.flush()
"""
    with supervised(tmp_path, then) as process:
        assert process.stdout is not None
        assert process.stdout.buffer.readline() == b"ready engine-0\n"
        assert process.stdout.buffer.readline() == b"\xff\xfe\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("hangs", ["signal.pause()", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_an_adapter_that_does_not_leave_is_killed_with_all_below_it(tmp_path: Path, hangs: str) -> None:
    """It ignores the signal, or does not even see it; however often it is told."""
    then = f"""
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal; signal.signal(15, 1); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print("child", child.pid, flush=True)
while True:
    {hangs}
"""
    with supervised(tmp_path, then, grace_s="0.5") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready engine-0\n"
        child = int(process.stdout.readline().split()[1])
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert starts(tmp_path) == 1
    assert not psutil.pid_exists(child)


def test_an_orphan_that_ends_is_reaped_while_the_adapter_runs(tmp_path: Path) -> None:
    """A supervisor is its adapter's init: in a container it may be everybody's."""
    then = """
import subprocess
for _ in range(3):
    orphan = int(subprocess.check_output(["sh", "-c", "sleep 0.05 >/dev/null & echo $!"]))
    while os.path.exists(f"/proc/{{orphan}}"):
        time.sleep(0.01)
"""
    with supervised(tmp_path, then.replace("{{", "{").replace("}}", "}")) as process:
        assert process.wait(timeout=60) == 0


def test_signals_that_come_all_at_once(tmp_path: Path) -> None:
    """While it waits to start an adapter again, and while it hands another one on."""
    run = RUN.replace("_FIRST_S = 0.01", "_FIRST_S = 1000").replace("GRACE_S", "60.0")
    (tmp_path / "adapter.py").write_text(ADAPTER.format(then="sys.exit(1)", serves="True"))
    process = subprocess.Popen(
        [sys.executable, "-c", run, "None", sys.executable, str(tmp_path / "adapter.py"), str(tmp_path / "count")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert "the adapter exited with status 1" in process.stderr.readline()
        for _ in range(200):
            for number in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
        assert process.wait(timeout=60) in (0, -signal.SIGINT, -signal.SIGTERM)


def test_what_was_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    """vLLM's ranks share memory, which Python's resource tracker removes. It is not killed before it has done so."""
    # So many that the tracker takes longer than the supervisor.
    then = """
from multiprocessing import shared_memory
held = [shared_memory.SharedMemory(create=True, size=1) for _ in range(200)]
print(*[one.name for one in held], flush=True)
os.kill(os.getpid(), 9)
"""
    with supervised(tmp_path, then, restarts="0") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    names = said.splitlines()[1].split()
    assert len(names) == 200
    left = [shared for name in names if (shared := Path("/dev/shm") / name).exists()]
    for shared in left:
        shared.unlink()
    assert not left
