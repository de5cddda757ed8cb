"""Public names are those of the package: tracebacks, `help` and type errors name `tracewire`, not the module within."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any, ForwardRef

__all__ = ["publish"]

_OURS = frozenset({"tracewire", "tracewire_bus"})


def publish(values: Iterable[Any]) -> None:
    """Name `tracewire` as the module of these classes and functions. Their annotations keep the module to look names
    up in, which msgspec and `typing.get_type_hints` would otherwise do in `tracewire`.
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
