"""No test that cannot fail: for each mutant in the catalogue there is one that notices it, and the runner of mutants
tells one that is noticed from one that is not, or that does not run at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runs import ROOT, Mutant, anchor_problem, missing_test, run_all, run_mutants

#: A few that are noticed soon.
CHEAP = ("a-delta-is-folded-twice", "a-trace-is-queued-twice", "the-checker-misses-what-a-consumer-never-got")

#: A quick test, and the file whose mutants it is to notice.
_TEST = "tests/unit/tracewire_bus/store/test_keys.py::test_keys_of_a_trace_share_a_tag_and_so_do_those_of_a_queue"
_CLASS = "class Keys(msgspec.Struct, frozen=True):"
_KEYS = "bus/tracewire_bus/store/keys.py"


def _of_keys(name: str, old: str, new: str, *, test: str = _TEST) -> Mutant:
    return Mutant(name, _KEYS, old, new, (test,))


def test_every_mutant_can_be_made_of_the_code_as_it_is() -> None:
    problems = [problem for mutant in MUTANTS for problem in (anchor_problem(mutant), missing_test(mutant)) if problem]
    assert problems == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_few_mutants_die() -> None:
    chosen = [mutant for mutant in MUTANTS if mutant.name in CHEAP]
    assert len(chosen) == len(CHEAP)
    found, problems = run_all(chosen)
    assert problems == []
    assert all(outcome.killers for outcome in found.values())


def test_only_a_test_that_fails_as_tests_do_counts() -> None:
    """A mutant that is noticed, one that nobody notices, and three of which nothing can be told."""
    found = run_mutants(
        [
            _of_keys("noticed", "{{{self.tag(trace)}}}:events:", "{self.tag(trace)}:events:"),
            _of_keys("unnoticed", "Names of all keys that", "The names of all keys that"),
            _of_keys("not imported", "from zlib import crc32", "from zlib import crc33 as crc32"),
            _of_keys("undefined", 'return f"t{crc32(', 'return f"t{crc34('),
            _of_keys("not compiled", _CLASS, "class Keys"),
        ]
    )
    assert found["noticed"].killers == [_TEST]
    assert "SURVIVES" in found["unnoticed"].problem
    for name in ("not imported", "undefined", "not compiled"):
        assert not found[name].killers
        assert name in found[name].problem


@pytest.mark.parametrize(
    ("old", "test", "said"),
    [
        ("no such text", _TEST, "occurs 0 times"),
        ("return", _TEST, "times in bus/tracewire_bus/store/keys.py, not once"),
        (_CLASS, "tests/unit/tracewire_bus/store/test_keys.py::test_that_there_is_not", "there is no test"),
        (_CLASS, "tests/bus/test_that_there_is_not.py::test_names", "there is no test"),
    ],
)
def test_a_mutant_that_has_rotted_is_told(old: str, test: str, said: str) -> None:
    (outcome,) = run_mutants([_of_keys("rotten", old, "class Keys():", test=test)]).values()
    assert said in outcome.problem
    assert not outcome.killers


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
@pytest.mark.timeout(3600)
def test_every_mutant_dies() -> None:
    command = [sys.executable, "-m", "tests.mutants", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-8000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["killed"] == figures["mutants"] == len(MUTANTS) >= 40
    assert all(figures["by"].values())
