"""The identity of a block's code: a hash over all of the block that decides what runs, and the modules that it imports.

The hash covers the source, the helpers, the modules, imports and paths that the block's names stand for, its
parameters, and the values that came along with the code: defaults, and names from around the function. The values that
the caller passed as arguments (`Block.arguments`) are data, and may differ between two blocks of one hash. The names of
the arguments are covered. The place of the source (file and line) is not covered.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from hashlib import sha256
from typing import Final

import msgspec

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import decoder

from .python_source import parse_source

__all__ = ["DEFAULT_IMPORTS", "allows", "code_hash", "described", "imported"]

#: The packages that a block may import, where the operator names no others.
DEFAULT_IMPORTS: Final = frozenset(
    (
        *("__future__", "abc", "array", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses"),
        *("decimal", "einops", "enum", "fractions", "functools", "heapq", "itertools", "jaxtyping", "json", "math"),
        *("ml_dtypes", "nnsight", "numbers", "numpy", "operator", "random", "re", "statistics", "string", "textwrap"),
        *("time", "torch", "tracewire", "types", "typing", "typing_extensions"),
    )
)

_KIND: Final = "tracewire block 1"
_variables = decoder(dict[str, msgspec.Raw], plain=True)
_plain = decoder(plain=True)
_encoder = msgspec.msgpack.Encoder()


def code_hash(block: Block) -> str:
    """The hash of a block's code: 64 hexadecimal digits.

    Raises:
        ValueError: the block's variables cannot be decoded.
    """
    arguments = sorted(set(block.arguments))
    constants = [
        (name, sha256(value).digest())
        for name, value in sorted(_variables(block.variables).items())
        if name not in arguments
    ]
    covered = (
        _KIND,
        *(block.name, block.source, block.parameters, [(one.name, one.source) for one in block.helpers]),
        *(sorted(block.modules.items()), sorted(block.imports.items()), sorted(block.paths.items())),
        *(sorted(block.shared.items()), arguments, constants),
    )
    return sha256(_encoder.encode(covered)).hexdigest()


def described(block: Block) -> str:
    """All that the hash of a block covers, as text that an operator reads, and compares line by line."""
    arguments = sorted(set(block.arguments))
    constants = {name: value for name, value in _variables(block.variables).items() if name not in arguments}
    lines = [f"block {block.name}({', '.join((*block.parameters, *arguments))})", *_indented(block.source)]
    for helper in block.helpers:
        lines += [f"helper {helper.name}", *_indented(helper.source)]
    lines += [f"import {module} as {name}" for name, module in sorted(block.modules.items())]
    lines += [f"from {module} import {what} as {name}" for name, (module, what) in sorted(block.imports.items())]
    lines += [f"module {name} = {path or 'the model'}" for name, path in sorted(block.paths.items())]
    lines += [f"shared {name} = {own}" for name, own in sorted(block.shared.items())]
    lines += [f"constant {name} = {_shown(value)}" for name, value in sorted(constants.items())]
    return "\n".join(lines) + "\n"


def _indented(source: str) -> list[str]:
    return [f"    {line}" for line in source.splitlines()]


def _shown(value: msgspec.Raw) -> str:
    """A plain value as Python writes it; of a long one, or an array, the digest."""
    try:
        plain = _plain(bytes(value))
    except ValueError:
        plain = None
    text = repr(plain)
    if len(text) <= 200 and not isinstance(plain, msgspec.msgpack.Ext):
        return text
    return f"<{len(bytes(value))} bytes, sha256 {sha256(value).hexdigest()}>"


def imported(source: str) -> tuple[str, ...]:
    """The modules that the statements of a source import. A relative import counts as the module `.`.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source cannot be parsed.
    """
    found: dict[str, None] = {}
    for node in ast.walk(parse_source(source)):
        if isinstance(node, ast.Import):
            found.update((one.name, None) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            found["." if node.level else node.module or "."] = None
    return tuple(found)


def allows(module: str, allowed: Collection[str]) -> bool:
    """Whether one of the `allowed` packages is the module, or has it below."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in allowed for count in range(1, len(parts) + 1))
