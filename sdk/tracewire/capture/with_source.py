"""Finds the body of a `with` statement in the source by the frame that enters it, and checks that it can be skipped."""

from __future__ import annotations

import ast
import dis
import linecache
import types
from functools import cached_property

from tracewire.errors import BlockError

from .free_names import FreeNames
from .source import SOURCES_KEPT, FunctionSource, end_of, parse_file

__all__ = ["WithSource", "find_with"]


class WithSource(FunctionSource, frozen=True, eq=False, dict=True):
    """The body of a `with` statement, and its file."""

    node: ast.With

    @cached_property
    def names(self) -> FreeNames:
        """The free names of the body."""
        return FreeNames(self.node.body)

    @cached_property
    def checked(self) -> bool:
        """True once the body was checked for statements that no block can have.

        Raises:
            BlockError: the body has such a statement; the error names the first one's line.
        """
        self.check_block()
        return True

    @property
    def begins(self) -> int:
        """The line of the first event when the body runs: its first statement, or that one's first decorator."""
        first = self.node.body[0]
        decorators: list[ast.expr] = getattr(first, "decorator_list", [])
        return min([first.lineno, *(one.lineno for one in decorators)])

    @property
    def is_empty(self) -> bool:
        """Whether the body has only `pass` and constants."""
        return all(
            isinstance(one, ast.Pass) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            for one in self.node.body
        )


#: The `with` statements found so far, by code object and bytecode offset.
_entered: dict[tuple[types.CodeType, int], WithSource] = {}


def find_with(frame: types.FrameType, name: str) -> WithSource:
    """The source of the `with` statement that `frame` is entering. `name` is the entered expression, for errors.

    Raises:
        BlockError: no `with` statement is being entered, or its source cannot be read, or its body cannot be skipped.
    """
    code, line = frame.f_code, frame.f_lineno
    known = _entered.get((code, frame.f_lasti))
    if known is not None:
        return known
    filename = code.co_filename
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, frame.f_globals)
    if not lines:
        raise BlockError(
            f"the source around {name} cannot be read, and a block travels as source: "
            "write it in a file or in a notebook's cell",
            filename=filename,
            line=line,
        )
    try:
        file = parse_file(filename, "".join(lines))
    except SyntaxError as error:
        raise BlockError(
            "the file has changed since it was imported; import it again", filename=filename, line=line
        ) from error
    place = list(code.co_positions())[frame.f_lasti // 2]
    found = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.With):
            parts: list[ast.With | ast.expr] = [node, *_contexts(node)]
            spans = [_spans(part) for part in parts]
            # With `-X no_debug_ranges`, Python keeps no columns: then the line decides.
            if place in spans if place[2] is not None else line in [span[0] for span in spans]:
                found.append(node)
    if not found:
        raise BlockError(
            f"{name} is not entered by a with statement here (or the file has changed since it was imported): "
            f"write `with {name} as tracer:`, and the block below it",
            filename=filename,
            line=line,
        )
    source = WithSource(
        name=code.co_name if code.co_name.isidentifier() else "block", filename=filename, node=found[0], file=file
    )
    _check_with(source, _item(frame, found[0], place), name)
    while len(_entered) >= SOURCES_KEPT:
        del _entered[next(iter(_entered))]
    _entered[code, frame.f_lasti] = source
    return source


def _check_with(source: WithSource, item: int, name: str) -> None:
    node = source.node
    if item != len(node.items) - 1:
        raise source.error(f"{name} must be the last item of its with statement: later items would be entered here")
    if source.is_empty:
        return
    if source.begins <= (end_of(node.items[-1].optional_vars or node.items[-1].context_expr)[0]):
        raise source.error("the block must start on a line of its own, below the with", source.begins)
    if isinstance(node.body[0], ast.Try | ast.TryStar):
        # No handler of Python's covers the line of the `try` itself.
        raise source.error(
            "a block cannot begin with try: put another statement before it, or the try around the with", source.begins
        )


def _contexts(node: ast.With) -> list[ast.expr]:
    return [item.context_expr for item in node.items]


def _spans(node: ast.With | ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _item(frame: types.FrameType, node: ast.With, place: tuple[int | None, ...]) -> int:
    """The index of the item of a `with` statement that is being entered."""
    contexts = _contexts(node)
    if len(contexts) == 1:
        return 0
    for index, context in enumerate(contexts):
        if _spans(context) == place:
            return index
    # Before Python 3.12, all items have the position of the statement, in order.
    entered = [
        one.offset
        for one in dis.get_instructions(frame.f_code)
        if one.opname == "BEFORE_WITH" and one.positions == place
    ]
    return entered.index(frame.f_lasti) % len(contexts) if frame.f_lasti in entered else len(contexts) - 1
