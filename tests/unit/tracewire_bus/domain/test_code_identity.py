"""The hash of a block's code changes with all that decides what runs, and with nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_bus.domain.code_identity import DEFAULT_IMPORTS, allows, code_hash, described, imported
from tracewire_bus.wire.messages import Block, Helper
from tracewire_bus.wire.packing import pack

BLOCK = Block(
    name="watch",
    source="x = f(direction, 2)",
    variables=pack({"direction": 1.0, "strength": 8.0}),
    helpers=[Helper(name="f", source="def f(a, b=1):\n    return a")],
    modules={"np": "numpy"},
    imports={"Tensor": ("torch", "Tensor")},
    paths={"mlp": "model.layers.0.mlp"},
    shared={"seen": "seen"},
    arguments=["direction"],
)


def with_(**fields: Any) -> Block:
    return msgspec.structs.replace(BLOCK, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "other"},
        {"source": "x = f(direction, 3)"},
        {"parameters": ("m", "tracer", "live")},
        {"helpers": [Helper(name="f", source="def f(a, b=2):\n    return a")]},
        {"helpers": []},
        {"modules": {"np": "os"}},
        {"imports": {"Tensor": ("torch", "load")}},
        {"paths": {"mlp": "model.layers.1.mlp"}},
        {"shared": {"seen": "other"}},
        {"variables": pack({"direction": 1.0, "strength": 9.0})},
        {"variables": pack({"direction": 1.0, "strength": 8.0, "more": 0})},
        {"arguments": []},
        {"arguments": ["direction", "strength"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_all_that_decides_what_runs_changes_it(fields: dict[str, Any]) -> None:
    changed = with_(**fields)
    assert code_hash(changed) != code_hash(BLOCK)
    assert described(changed) != described(BLOCK)


@pytest.mark.parametrize(
    "fields",
    [
        {"variables": pack({"direction": "another", "strength": 8.0})},
        {"variables": pack({"strength": 8.0, "direction": 2.0})},
        {"filename": "elsewhere.py", "first_line": 7},
    ],
    ids=["an argument's value", "the order", "the place"],
)
def test_nothing_else_does(fields: dict[str, Any]) -> None:
    assert code_hash(with_(**fields)) == code_hash(BLOCK)


def test_variables_that_are_none_are_an_error() -> None:
    with pytest.raises(ValueError, match="Expected"):
        code_hash(with_(variables=b"\x90"))


def test_long_constants_are_shown_by_digest() -> None:
    text = described(with_(variables=pack({"table": list(range(1000)), "name": "a"})))
    assert "constant name = 'a'" in text
    assert "constant table = <" in text
    assert "sha256" in text


def test_imports_are_found_wherever_they_stand() -> None:
    source = (
        "import os.path, sys\ndef f():\n    from torch.nn import Linear\n    from . import x\n    from .a import y\n"
    )
    assert imported(source) == ("os.path", "sys", "torch.nn", ".")


def test_a_package_allows_what_is_below_it() -> None:
    assert allows("torch.nn.functional", DEFAULT_IMPORTS)
    assert allows("a.b.c", {"a.b"})
    for refused in ("os", "torchx", "subprocess", ".", "", "importlib"):
        assert not allows(refused, DEFAULT_IMPORTS)
    assert not allows("a", {"a.b"})
