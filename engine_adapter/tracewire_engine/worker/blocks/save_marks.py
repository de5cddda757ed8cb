"""Records which objects each block has saved, apart from every other block's.

nnsight marks a saved object by its `id` in one set for all blocks of a worker's thread, and empties the set only when
no request is in flight. On an engine that is never idle this fails in two ways. The id of a freed object can come to
name a later one. And a small integer, which is one object in the whole process, counts as saved in every block once
one block has saved it. Here every mark belongs to the block that made it and holds the object, so the id stays taken
until the block ends. If only its mark still holds an object, the block cannot bind the object to a name, and the
worker drops the mark at the end of the step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from greenlet import getcurrent
from nnsight.tracing import tracer as nnsight_tracer

from . import time_limit as watchdog

__all__ = ["NoName", "class_name", "install", "prune", "release", "saved"]

logger = logging.getLogger("vllm.tracewire")

# How many references an object has that only its mark holds: the dict's, and the argument of getrefcount.
_OURS = 2


def _mark(value: Any) -> Any:
    nnsight_tracer._saves().add(id(value))
    reference = getattr(getcurrent(), "mediator", None)
    mediator = reference() if reference is not None else None
    if mediator is not None:
        mediator.__dict__.setdefault("marked", {})[id(value)] = value
    return value


_save = nnsight_tracer.save


def install() -> None:
    """Replace nnsight's marks by this module's, in this process."""
    nnsight_tracer.mark = _mark


def remount() -> None:
    """Put the `save` of this process's nnsight back on every object, after a second import of nnsight replaced it."""
    from nnsight._c import mount

    mount(_save, "save")


def saved(mediator: Any) -> dict[str, Any]:
    """The values that this block has saved and still binds to a name, by name."""
    marked: dict[int, Any] = mediator.__dict__.get("marked") or {}
    found = {name: value for name, value in mediator.lcls.items() if id(value) in marked and type(name) is str}
    if len(found) < len(marked):
        # The block may have bound it under a key that is no name, for example in `globals()`.
        for name, value in mediator.lcls.items():
            if type(name) is not str and id(value) in marked:
                found[f"<{class_name(type(name))}>"] = NO_NAME
    return found


class NoName:
    """Stands for a value saved under a key that is not a string. It cannot travel, so the save fails."""


NO_NAME = NoName()


def class_name(cls: type) -> str:
    """The name of a class, at most 200 characters. The metaclass, which may be a block's, is not asked."""
    name: str = _class_name.__get__(cls)
    return name.encode("utf-8", "backslashreplace").decode()[:200]


_class_name: Any = type.__dict__["__name__"]


def prune(mediator: Any, held: Mapping[str, Any]) -> None:
    """Drop the marks of objects that nothing else holds. Called between steps, when every block is parked.

    Args:
        mediator: of the block.
        held: the block's saves by name, as `saved` returns them.
    """
    marked: dict[int, Any] | None = mediator.__dict__.get("marked")
    if not marked or (len(marked) == 1 and held):
        return
    gone = [key for key in marked if sys.getrefcount(marked[key]) <= _OURS]
    if gone:
        nnsight_tracer._saves().difference_update(gone)
        let_go = [marked.pop(key) for key in gone]
        try:
            # An object's finalizer may be the block's code.
            with watchdog.turn(building=True):
                let_go.clear()
        except Exception as exception:
            logger.debug("freeing objects that a block no longer holds failed: %s", type(exception).__name__)


def release(mediator: Any) -> None:
    """Drop all marks of a block that has ended."""
    marked: dict[int, Any] | None = mediator.__dict__.pop("marked", None)
    if marked:
        nnsight_tracer._saves().difference_update(marked)
