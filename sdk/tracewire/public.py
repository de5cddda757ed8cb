"""Names `tracewire` as the module of public classes and functions, for tracebacks, `help` and type errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, ForwardRef

__all__ = ["publish"]

_OURS = frozenset({"tracewire", "tracewire_bus"})


def publish(values: Iterable[Any]) -> None:
    """Name `tracewire` as the module of these classes and functions.

    Annotations of classes become references to the defining module, since msgspec and `typing.get_type_hints` would
    otherwise look their names up in `tracewire`.
    """
    for value in values:
        if not isinstance(value, type | FunctionType) or value.__module__.partition(".")[0] not in _OURS:
            continue
        if isinstance(value, type):
            own = inspect.get_annotations(value)
            if any(isinstance(one, str) for one in own.values()):
                _keep_annotations(value, {name: _reference(one, value.__module__) for name, one in own.items()})
        value.__module__ = "tracewire"


if sys.version_info >= (3, 14):
    from annotationlib import Format

    def _keep_annotations(value: type, references: dict[str, Any]) -> None:
        # A reader that has namespaces of its own looks references up there, and not in their module.
        del value.__annotations__
        value.__annotate__ = _evaluated_later(references)

    def _evaluated_later(references: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
        """The function that Python calls once for the annotations of a class, in a format of annotationlib."""

        def annotate(format_: int) -> dict[str, Any]:
            return {name: _given(one, format_) for name, one in references.items()}

        return annotate

    def _given(annotation: Any, format_: int) -> Any:
        if not isinstance(annotation, ForwardRef):
            return annotation
        if format_ == Format.STRING:
            return annotation.__forward_arg__
        # A name that only type checkers import stays a reference.
        return annotation.evaluate(format=Format.FORWARDREF)

else:

    def _keep_annotations(value: type, references: dict[str, Any]) -> None:
        value.__annotations__ = references


def _reference(annotation: Any, module: str) -> Any:
    if not isinstance(annotation, str):
        return annotation
    return ForwardRef(annotation, is_argument=False, module=module, is_class=True)
