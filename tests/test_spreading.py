"""How several processes share the tests: an engine's files go to one of them, and the longest group goes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.spreading import check, group, sort

#: A test's body that ends its process, once.
DIES = "os.path.exists('died') or (open('died', 'w').close(), os._exit(1))"


class _Item:
    """A test of a file, with what it asks for."""

    def __init__(self, path: str, *asked: str, full: bool = False) -> None:
        self.path = ROOT / path
        self.fixturenames = asked
        self._full = full

    def get_closest_marker(self, name: str) -> object:
        assert name == "full"
        return self if self._full else None


def test_the_files_of_an_engine_are_one_group_and_any_other_is_its_own() -> None:
    of_shared = {group(f"tests/e2e/{one}.py") for one in ("tracing/test_traces", "parallel/test_kinds")}
    assert of_shared == {group("tests/test_benchmarks.py")} == {"engine"}
    assert group("tests/e2e/steering/test_many.py") == group("tests/e2e/tracing/test_nnsight_reference.py") == "inside"
    assert group("tests/test_docs.py") == "tests/test_docs.py"


def test_who_asks_for_the_shared_engine_outside_of_its_group_hears_of_it() -> None:
    items: list[Any] = [_Item("tests/e2e/tracing/test_traces.py", "starting"), _Item("tests/test_docs.py", "site")]
    check(items)
    items.append(_Item("tests/e2e/cli/test_up.py", "starts_engine", "starting"))
    with pytest.raises(pytest.UsageError, match=r"^tests/e2e/cli/test_up\.py asks for the shared engine: name it"):
        check(items)


def test_the_shared_engine_comes_first_and_then_who_starts_another() -> None:
    quick, rare = _Item("tests/test_docs.py"), _Item("tests/e2e/models/test_lora.py", "starts_engine", full=True)
    own, beside = _Item("tests/e2e/cli/test_up.py", "starts_engine"), _Item("tests/e2e/cli/test_up.py")
    shared = _Item("tests/e2e/tracing/test_traces.py", "starts_engine", "starting")
    items: list[Any] = [quick, rare, beside, own, shared]
    sort(items)
    assert items == [shared, beside, own, quick, rare]


#: Files of tests of which one process dies: in the last test of its last file, or with more files to run.
DYING = {
    "the last test": {"test_a": ["pass", "pass", DIES], "test_b": ["pass"]},
    "before others": {"test_a": ["pass", DIES], "test_b": ["pass"], "test_c": ["pass"], "test_d": ["pass", "pass"]},
}


@pytest.mark.parametrize("files", DYING.values(), ids=list(DYING))
def test_a_session_ends_if_a_process_dies(files: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.spreading import Spreading\n\n\n"
        "def pytest_xdist_make_scheduler(config, log):\n    return Spreading(config, log)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    count = 0
    for name, bodies in files.items():
        tests = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies)]
        (tmp_path / f"{name}.py").write_text("import os\n\n\n" + "\n\n".join(tests))
        count += len(bodies)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # xdist runs the test again for which the process has died.
    assert f"1 failed, {count} passed" in done.stdout, done.stdout + done.stderr
