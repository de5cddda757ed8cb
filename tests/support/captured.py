"""Blocks as they were captured: run as an engine would, and looked into."""

# mypy: ignore-errors

from __future__ import annotations
import __future__

import functools
import importlib
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

from tracewire import intervention
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack


@intervention
def block(model, tracer, live):
    saved = [].save()


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*values: Any) -> Any:
        return function(*values)

    return wrapper


def block_of(tracer):
    return tracer._submission.block


def blocks_of(tracer):
    return [invoke.block for invoke in tracer._submission.invokes]


def run(block: Block, model: Any = None, tracer: Any = None, live: Any = None) -> dict[str, Any]:
    """The block as an engine runs it: its statements at the top level of one scope. Returns what the scope holds."""
    flags = __future__.annotations.compiler_flag

    def compiled(source: str, first_line: int, filename: str) -> types.CodeType:
        return compile("\n" * (first_line - 1) + source, filename, "exec", flags=flags, dont_inherit=True)

    scope: dict[str, Any] = {"__name__": f"block.{block.name}"}
    for name, module in block.modules.items():
        scope[name] = importlib.import_module(module)
    for name, (module, path) in block.imports.items():
        scope[name] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    scope.update(zip(block.parameters, (model, tracer, live), strict=True))
    scope.update(unpack(block.variables))
    shared = dict(scope)
    for helper in block.helpers:
        exec(compiled(helper.source, helper.first_line, helper.filename), shared)
    for helper in block.helpers:
        scope[helper.name] = shared[helper.name]
    exec(compiled(block.source, block.first_line, block.filename), scope)
    return scope


def variables(block: Block) -> dict[str, Any]:
    values = unpack(block.variables)
    assert isinstance(values, dict)
    return values


def written(folder: Path, source: str, name: str = "written") -> types.ModuleType:
    """A module of the user's own, made of `source`."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
