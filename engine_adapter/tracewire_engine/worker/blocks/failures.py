"""Turns exceptions of blocks into failures that name the user's own line, and frees the objects in their tracebacks.

A block can define exception classes whose attributes and methods lie. So this module reads an exception's `__dict__`,
`__traceback__`, `__cause__` and `__context__` by the descriptors of the builtin classes.
"""

from __future__ import annotations

import builtins
import traceback
import types
from collections.abc import Iterable
from typing import Any

from nnsight.intervention.interleaver import EarlyStopException

from tracewire_bus.wire.messages import Failure

from . import save_marks as marks
from . import time_limit as watchdog
from .compiled_source import CompiledSource

__all__ = ["attributes", "failure_of", "is_stop", "release_frames"]

#: The descriptor of an exception's own attributes, which its class cannot override.
attributes: Any = BaseException.__dict__["__dict__"]

_trace: Any = BaseException.__dict__["__traceback__"]

_cause: Any = BaseException.__dict__["__cause__"]

_context: Any = BaseException.__dict__["__context__"]

_mro: Any = type.__dict__["__mro__"]

_members: Any = BaseExceptionGroup.__dict__["exceptions"]


def release_frames(errors: Iterable[BaseException | None]) -> None:
    """Clear the frames in the tracebacks of exceptions, of their causes and contexts, and of the members of groups."""
    waiting, seen = list(errors), set[int]()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        for trace in (_trace.__get__(error), dict.pop(attributes.__get__(error), "__intervention_tb__", None)):
            # A block can set an attribute of this name to any object.
            if type(trace) is types.TracebackType:
                traceback.clear_frames(trace)
        waiting += (_cause.__get__(error), _context.__get__(error))
        if issubclass(type(error), BaseExceptionGroup):
            waiting += _members.__get__(error)
        for attribute in (_trace, _cause, _context):
            attribute.__set__(error, None)


def failure_of(exception: BaseException, compiled: CompiledSource | None, *, hint: str = "") -> Failure:
    """Describe an exception of a block by the user's own line: the deepest frame of the traceback in the user's code.

    Args:
        exception: raised by the block, or while the block was built.
        compiled: the block's compiled source, or `None` if it could not be compiled.
        hint: is appended to the message.
    """
    kind = marks.class_name(type(exception))
    try:
        with watchdog.turn(building=True):
            message = _printable(str(exception), 10_000)
    except Exception as error:
        message = f"(its message could not be read: {type(error).__name__})"
    message += hint
    if issubclass(type(exception), SyntaxError) and compiled is None:
        at = getattr(exception, "lineno", None)
        return Failure(type=kind, message=message, field="block", line=at, builtin="SyntaxError")
    try:
        with watchdog.turn(building=True):
            frames = list(_frames(exception))
    except Exception:  # the block made the traceback itself
        frames = []
    filename: str | None = None
    line: int | None = None
    source: str | None = None
    lines: list[str] = []
    files = compiled.files if compiled is not None else {}
    for frame in frames:
        if frame.filename in files:
            filename, function = files[frame.filename]
            line, source = frame.lineno, frame.line
            name = function if frame.name == "<module>" else frame.name
            lines.append(f'  File "{filename}", line {line}, in {name}\n    {source}\n')
    return Failure(
        type=kind,
        message=message,
        field="block",
        filename=filename,
        line=line,
        source=source,
        traceback="".join(lines) or None,
        builtin=_builtin(exception),
    )


def _builtin(exception: BaseException) -> str | None:
    """The name of the nearest builtin class that an exception is an instance of."""
    for cls in _mro.__get__(type(exception)):
        name = marks.class_name(cls)
        if getattr(builtins, name, None) is cls:
            return name
    return None


def _frames(exception: BaseException) -> Iterable[traceback.FrameSummary]:
    """The frames of an exception's traceback; of a `BlockExit`, those of the exception that caused it."""
    cause = exception.__cause__ if isinstance(exception, watchdog.BlockExit) and exception.__cause__ else exception
    trace = dict.get(attributes.__get__(cause), "__intervention_tb__")
    return traceback.extract_tb(trace if type(trace) is types.TracebackType else _trace.__get__(cause))


def _printable(text: str, most: int) -> str:
    """The first `most` characters of a text, with lone surrogates escaped so that it can be encoded as UTF-8."""
    return str.__getitem__(text, slice(most)).encode("utf-8", "backslashreplace").decode()


def is_stop(exception: BaseException | None) -> bool:
    """Whether a block ended by `tracer.stop()`."""
    return isinstance(exception, EarlyStopException)
