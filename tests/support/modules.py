"""Modules with the names of a real model."""

from __future__ import annotations

from typing import Any

import pytest

import tracewire_engine  # noqa: F401 (before nnsight)

torch = pytest.importorskip("torch")


def tree(**sizes: int) -> Any:
    """A model with lists of so many layers, by path with `__` for a dot."""
    root = torch.nn.Module()
    for path, size in sizes.items():
        *parents, last = path.split("__")
        module = root
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        module.add_module(last, torch.nn.ModuleList(torch.nn.Identity() for _ in range(size)))
    return root.named_modules()
