"""Blocks are compiled once for each text, and bound to each request's own values."""

from __future__ import annotations

from types import CodeType
from typing import Any

import msgspec
import pytest
import torch

from tracewire_bus.wire.messages import Block, Helper
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.permits import CheckedPermits, NoPermit, Permits
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.live_params import LiveRun


class Bound:
    """In place of a mediator: what it would run."""

    def __init__(self, code: CodeType, scope: dict[str, Any], variables: dict[str, Any]) -> None:
        self.code, self.scope, self.variables = code, scope, variables

    def run(self) -> dict[str, Any]:
        """The scope once the block has run, without nnsight."""
        scope = {**self.scope, **self.variables}
        exec(self.code, scope)
        return scope


def _cache(size: int = 256) -> Any:
    return BlockCache(None, torch.device("cpu"), size=size, kind=Bound)  # type: ignore[arg-type]


def _encoded(source: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(Block(name="watch", source=source, **fields))


def test_a_text_is_compiled_once_and_each_request_has_its_own_values() -> None:
    cache = _cache()
    one = cache.mediator(_encoded("out = x * 2", variables=pack({"x": 3})), LiveRun("a"))
    two = cache.mediator(_encoded("out = x * 2", variables=pack({"x": 5})), LiveRun("b"))
    assert one.code is two.code
    assert (one.run()["out"], two.run()["out"]) == (6, 10)
    assert (one.live.name, two.live.name) == ("a", "b")


def test_the_least_recently_used_is_compiled_anew() -> None:
    cache = _cache(size=2)
    first = cache.mediator(_encoded("out = 1"), LiveRun(""))
    cache.mediator(_encoded("out = 2"), LiveRun(""))
    assert cache.mediator(_encoded("out = 1"), LiveRun("")).code is first.code
    cache.mediator(_encoded("out = 3"), LiveRun(""))
    assert cache.mediator(_encoded("out = 1"), LiveRun("")).code is first.code
    second = cache.mediator(_encoded("out = 2"), LiveRun(""))
    cache.mediator(_encoded("out = 4"), LiveRun(""))
    assert cache.mediator(_encoded("out = 2"), LiveRun("")).code is second.code
    assert cache.mediator(_encoded("out = 1"), LiveRun("")).code is not first.code


def test_modules_imports_helpers_and_shared_values_are_bound_by_name() -> None:
    block = _encoded(
        "out = (m.pi, floor(2.5), doubled(n), ours)",
        modules={"m": "math"},
        imports={"floor": ("math", "floor")},
        helpers=[Helper(name="doubled", source="def doubled(x):\n    return x * n\n")],
        variables=pack({"n": 4}),
        shared={"ours": "theirs"},
    )
    found = _cache().mediator(block, LiveRun(""), {"theirs": "shared"}).run()["out"]
    assert found == (pytest.approx(3.14159, abs=1e-4), 2, 16, "shared")


def test_a_module_that_there_is_not_is_the_request_s_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _cache().mediator(_encoded("pass", modules={"m": "no_such_module"}), LiveRun(""))


def test_a_block_without_the_adapter_s_permit_does_not_run() -> None:
    permits = Permits(b"k" * 32)
    cache = BlockCache(None, torch.device("cpu"), kind=Bound, permits=permits, imports=["math"])  # type: ignore[arg-type]
    block = _encoded("import math\nout = math.floor(2.5)")
    with pytest.raises(NoPermit):
        cache.mediator(block, LiveRun(""))
    with pytest.raises(NoPermit):
        cache.mediator(_encoded("out = 1"), LiveRun(""), permit=permits.of(block, limited=False))
    assert cache.mediator(block, LiveRun(""), permit=permits.of(block, limited=True)).run()["out"] == 2


@pytest.mark.parametrize("fields", [{"modules": {"m": "os"}}, {"imports": {"m": ("os", "path")}}])
@pytest.mark.parametrize("checks", [Permits(b"k" * 32), CheckedPermits()], ids=["worker", "host"])
def test_a_permit_that_is_limited_limits_imports(checks: Permits, fields: dict[str, Any]) -> None:
    permits = Permits(b"k" * 32)
    cache = BlockCache(None, torch.device("cpu"), kind=Bound, permits=checks, imports=["math"])  # type: ignore[arg-type]
    block = _encoded("m", **fields)
    cache.mediator(block, LiveRun(""), permit=permits.of(block, limited=False)).run()
    with pytest.raises(ImportError, match="'os'"):
        cache.mediator(block, LiveRun(""), permit=permits.of(block, limited=True))
    # nnsight executes the code in the variables, without the scope.
    hidden = _encoded("__import__('os')")
    taken = cache.mediator(hidden, LiveRun(""), permit=permits.of(hidden, limited=True))
    with pytest.raises(ImportError, match="'os'"):
        exec(taken.code, taken.variables)
    with pytest.raises(ImportError, match="'os'"):
        cache.mediator(hidden, LiveRun(""), permit=permits.of(hidden, limited=True)).run()
