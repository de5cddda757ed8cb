"""The source text of a block, compiled."""

from __future__ import annotations
import __future__

import ast
import linecache
import types

from tracewire_bus.wire.messages import Block

__all__ = ["LABELS", "CompiledSource"]

#: The file names of the code of all blocks that are compiled in this process.
LABELS: set[str] = set()

#: Annotations in a block are not evaluated, so that the names in them need not travel.
_FLAGS = __future__.annotations.compiler_flag


class CompiledSource:
    """One source text, compiled: the block's code, its helpers' code, and the file names that tracebacks carry."""

    def __init__(self, block: Block, key: str) -> None:
        self.files: dict[str, tuple[str, str]] = {}
        self.source, self.first_line = block.source, block.first_line
        self._loops: list[ast.For] | None = None
        self.code = self._compile(block.source, block.filename, block.first_line, block.name, key)
        self.helpers = [
            self._compile(helper.source, helper.filename, helper.first_line, helper.name, f"{key}.{helper.name}")
            for helper in block.helpers
        ]

    def _compile(self, source: str, filename: str, first_line: int, name: str, key: str) -> types.CodeType:
        padded = "\n" * (first_line - 1) + source
        label = f"<{name} {key}>"
        code: types.CodeType = compile(padded, label, "exec", flags=_FLAGS, dont_inherit=True)
        # Without a modification time, so that linecache keeps it; nnsight reads it for nested `with` blocks.
        linecache.cache[label] = (len(padded), None, padded.splitlines(keepends=True), label)
        self.files[label] = (filename, name)
        LABELS.add(label)
        return code

    def loop(self, line: int) -> str | None:
        """Find the innermost `for` over `range()` around a line of the block that indexes nothing with its numbers.

        The author of such a loop may have meant it to go through the steps of the generation.

        Returns:
            The loop's first line as `filename:line`, or `None` if there is no such loop.
        """
        if self._loops is None:
            tree = compile("\n" * (self.first_line - 1) + self.source, "<block>", "exec", ast.PyCF_ONLY_AST)
            self._loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _counts_steps(node)]
        around = [loop for loop in self._loops if loop.body[0].lineno <= line <= (loop.end_lineno or 0)]
        if not around:
            return None
        filename = next(iter(self.files.values()))[0]
        return f"{filename}:{max(loop.lineno for loop in around)}"

    def forget(self) -> None:
        """Drop the source text from `linecache`."""
        for label in self.files:
            linecache.cache.pop(label, None)
        LABELS.difference_update(self.files)


def _counts_steps(loop: ast.For) -> bool:
    """Whether a loop is over `range()`, and its body indexes nothing with its numbers."""
    called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    if not isinstance(called, ast.Name) or called.id != "range":
        return False
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return not any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node.slice))
        for statement in loop.body
        for node in ast.walk(statement)
    )
