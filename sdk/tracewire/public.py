"""Names `tracewire` as the module of public classes and functions, for tracebacks, `help` and type errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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
                value.__annotations__ = {name: _reference(one, value.__module__) for name, one in own.items()}
        value.__module__ = "tracewire"


def _reference(annotation: Any, module: str) -> Any:
    if not isinstance(annotation, str):
        return annotation
    return ForwardRef(annotation, is_argument=False, module=module, is_class=True)
