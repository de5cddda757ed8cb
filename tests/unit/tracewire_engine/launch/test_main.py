"""The adapter's program, as other processes load it."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

import anyio
from anyio import to_process


def test_a_process_of_the_adapter_loads_its_program_without_running_it(monkeypatch) -> None:
    """The adapter checks long sources in a process of its own, which first loads the adapter's main module."""
    spec = find_spec("tracewire_engine.launch.__main__")
    assert spec is not None
    assert spec.origin is not None
    loaded = runpy.run_path(spec.origin, run_name="__mp_main__")
    assert "main" not in loaded
    monkeypatch.setattr(sys.modules["__main__"], "__file__", spec.origin, raising=False)

    async def length() -> int:
        return await to_process.run_sync(len, "four")

    assert anyio.run(length) == 4
