"""Breaks a copy of the project in one place and sees whether the tests that should notice do.

Each mutant has a folder of its own, a copy of the tree with one text replaced, and one run of pytest there, whose
processes import that copy. The tree itself is never changed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.verdict import VARIABLE

__all__ = ["ROOT", "Mutant", "Outcome", "anchor_problem", "missing_test", "run_all", "run_mutants"]

ROOT = Path(__file__).resolve().parents[2]
#: What a run needs of the tree.
COPIED = ("bus", "engine_adapter", "sdk", "tests", "examples", "benchmarks", "deploy", "docs", "locks")
FILES = ("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md")
#: An error of these types says that the mutated code does not run at all: it proves nothing about the test.
BROKEN = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "UnboundLocalError"}
#: How long one test may take, and one run, in seconds; with an engine.
TEST_S, RUN_S, ENGINE_TEST_S, ENGINE_RUN_S = 60, 240, 240, 420
#: How long a test may take whose mutant hangs, in seconds.
HANGING_S = 15


@dataclass(frozen=True)
class Mutant:
    """One line at a seam, broken.

    Attributes:
        name: what is broken, as words joined by dashes.
        path: the file, from the project's root.
        old: the exact text that is replaced; it must occur exactly once.
        new: what stands there instead.
        tests: pytest's names of the tests of which at least one must fail.
        engine: whether these tests start an engine.
        hangs: whether a test may fail by taking too long.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    engine: bool = False
    hangs: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of one run: the tests that failed as tests do, and what else is to be said of it."""

    killers: list[str] = field(default_factory=list)
    problem: str = ""


def anchor_problem(mutant: Mutant, root: Path = ROOT) -> str:
    """Why a mutant cannot be made of the tree as it is; `""` if it can."""
    path = root / mutant.path
    if not path.is_file():
        return f"{mutant.name}: there is no {mutant.path}"
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        return f"{mutant.name}: the text to replace occurs {count} times in {mutant.path}, not once: {mutant.old!r}"
    if path.suffix == ".py":
        try:
            compile(text.replace(mutant.old, mutant.new), mutant.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"{mutant.name}: {mutant.path} does not compile any more: {error}"
    return ""


def missing_test(mutant: Mutant, root: Path = ROOT) -> str:
    """Why a mutant's tests are none; `""` if they are there."""
    for test in mutant.tests:
        name, _, function = test.partition("::")
        function = function.partition("[")[0]
        if not (root / name).is_file() or f"def {function}(" not in (root / name).read_text():
            return f"{mutant.name}: there is no test {test}"
    return "" if mutant.tests else f"{mutant.name}: it names no test"


@contextmanager
def copied(mutant: Mutant | None = None) -> Iterator[Path]:
    """A copy of the tree, mutated."""
    with tempfile.TemporaryDirectory(prefix="tw-mutant-") as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name)
        for name in FILES:
            shutil.copy2(ROOT / name, root / name)
        if mutant is not None:
            path = root / mutant.path
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
            # A compiled file is told from an older one by its source's size and its time to the second.
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
        yield root


def run_tests(root: Path, tests: Sequence[str], *, test_s: int, run_s: int) -> tuple[int | None, list[dict], str]:
    """Run tests in a copy: pytest's status (None: it had to be killed), what failed, and the end of what it said."""
    verdict = root.parent / "verdict"
    verdict.write_text("")
    packages = (root / name for name in ("bus", "engine_adapter", "sdk"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages)), VARIABLE: str(verdict)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.verdict", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", f"--timeout={test_s}", *tests]
    said = root.parent / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: int | None
        try:
            status = process.wait(run_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # Also what a killed run has left behind.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    failures = [json.loads(line) for line in verdict.read_text().splitlines()]
    return status, failures, said.read_text(errors="replace")[-3000:]


def run_one(mutant: Mutant) -> Outcome:
    """Run a mutant's tests on it."""
    if problem := anchor_problem(mutant) or missing_test(mutant):
        return Outcome(problem=problem)
    test_s, run_s = (ENGINE_TEST_S, ENGINE_RUN_S) if mutant.engine else (TEST_S, RUN_S)
    with copied(mutant) as root:
        status, failures, said = run_tests(
            root, mutant.tests, test_s=HANGING_S if mutant.hangs and not mutant.engine else test_s, run_s=run_s
        )
    if any(failure["when"] == "collect" for failure in failures):
        return Outcome(problem=f"{mutant.name}: its tests cannot be collected:\n{said}")
    killers, others = [], []
    for failure in failures:
        broken = BROKEN & set(failure["kinds"]) or "Error compiling script" in failure["message"]
        late = failure["message"].startswith("Timeout (>")
        if failure["when"] == "call" and not broken and (mutant.hangs or not late):
            killers.append(failure["test"])
        else:
            others.append(f"{failure['test']} ({failure['when']}): {', '.join(failure['kinds'])}: {failure['message']}")
    if killers:
        return Outcome(sorted(set(killers)))
    if status is None:
        return Outcome(problem=f"{mutant.name}: its tests did not end in {run_s} s:\n{said}")
    if status != 0 or others:
        return Outcome(problem=f"{mutant.name}: no test failed as one does (status {status}): {others or said}")
    return Outcome(problem=f"{mutant.name} SURVIVES {', '.join(mutant.tests)}")


def run_unmutated(tests: Sequence[str], *, engine: bool) -> str:
    """What is wrong with these tests on the tree as it is; `""` if they pass."""
    with copied() as root:
        status, failures, said = run_tests(root, tests, test_s=ENGINE_TEST_S if engine else TEST_S, run_s=900)
    if status == 0:
        return ""
    return f"tests fail without any mutation (status {status}): {[one['test'] for one in failures] or said}"


def run_mutants(
    mutants: Sequence[Mutant], *, jobs: int = 2, said: Callable[[str], None] = lambda _: None
) -> dict[str, Outcome]:
    """Run each mutant's tests on it: those without an engine `jobs` at a time, those with one by themselves."""

    def run(mutant: Mutant) -> Outcome:
        try:
            outcome = run_one(mutant)
        except Exception as error:
            outcome = Outcome(problem=f"{mutant.name}: {error!r}")
        said(f"{mutant.name}: {', '.join(outcome.killers) or outcome.problem}")
        return outcome

    quick = [mutant for mutant in mutants if not mutant.engine]
    slow = [mutant for mutant in mutants if mutant.engine]
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip((mutant.name for mutant in quick), pool.map(run, quick), strict=True))
    return found | {mutant.name: run(mutant) for mutant in slow}


def run_all(
    mutants: Sequence[Mutant], *, jobs: int = 2, said: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Outcome], list[str]]:
    """What came of each mutant, and what is wrong: survivors, rotten mutants, tests that fail without any."""
    quick = list(dict.fromkeys(test for mutant in mutants if not mutant.engine for test in mutant.tests))
    slow = list(dict.fromkeys(test for mutant in mutants if mutant.engine for test in mutant.tests))
    parts = [quick[start::jobs] for start in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        problems = list(pool.map(lambda part: run_unmutated(part, engine=False) if part else "", parts))
    if slow:
        problems.append(run_unmutated(slow, engine=True))
    said("\n".join(filter(None, problems)) or f"{len(quick) + len(slow)} tests pass without any mutation")
    found = run_mutants(mutants, jobs=jobs, said=said)
    return found, [problem for problem in (*problems, *(one.problem for one in found.values())) if problem]
