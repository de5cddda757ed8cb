"""Finds out whether a block reads `tracer.result`. The adapter sends the workers a request's output only then."""

from __future__ import annotations

import ast
from functools import lru_cache

from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.wire.messages import Block

__all__ = ["asks_result"]


def asks_result(block: Block | None) -> bool:
    """Whether a block reads `tracer.result`, or may read it."""
    if block is None:
        return False
    return _reads_result((block.source, *(helper.source for helper in block.helpers)), block.parameters[1])


@lru_cache(maxsize=64)
def _reads_result(sources: tuple[str, ...], tracer: str) -> bool:
    """Whether `result` is an attribute of the tracer there, or of anything, if the tracer goes by other names, too."""
    try:
        nodes = [node for source in sources for node in ast.walk(parse_source(source))]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # The compiler reports the error.
        return True
    of_tracer = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == tracer
    ]
    if any(node.attr == "result" for node in of_tracer):
        return True
    plain = {node.value for node in of_tracer if not node.attr.startswith("__")}
    renamed = any(
        (isinstance(node, ast.Name) and node.id == tracer and node not in plain)
        or (isinstance(node, ast.Constant) and node.value == tracer)
        for node in nodes
    )
    named = any(
        (isinstance(node, ast.Attribute) and node.attr == "result")
        or (isinstance(node, ast.Constant) and node.value == "result")
        for node in nodes
    )
    return renamed and named
