"""Which objects a block has saved, told apart from every other block's.

nnsight marks a saved object by its `id` in one set for all blocks of a worker's thread, and empties the set only when
no request is in flight. On an engine that is never idle two things go wrong with that: an id left behind by a freed
object comes to name some later one, and a small integer, being one object for everybody, counts as saved in every
block once it was saved in one. Here every mark belongs to the block that made it and holds the object, so that its id
stays taken until the block ends. A marked object that nothing else holds any more can never be bound to a name, and
is let go at the end of the step.
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

# References to a marked object that nobody else holds: the dict's, and getrefcount's own argument.
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
    """Put our marks in place of nnsight's, in this process."""
    nnsight_tracer.mark = _mark


def remount() -> None:
    """Put nnsight's `save` back on every object: importing nnsight anew has replaced it."""
    from nnsight._c import mount

    mount(_save, "save")


def saved(mediator: Any) -> dict[str, Any]:
    """The values that this block has saved and still binds to a name, by name."""
    marked: dict[int, Any] = mediator.__dict__.get("marked") or {}
    found = {name: value for name, value in mediator.lcls.items() if id(value) in marked and type(name) is str}
    if len(found) < len(marked):
        # Perhaps because it has been bound to something else than a name, as a key of `globals()`.
        for name, value in mediator.lcls.items():
            if type(name) is not str and id(value) in marked:
                found[f"<{class_name(type(name))}>"] = NO_NAME
    return found


class NoName:
    """Stands for what is saved under something that is no name: it cannot travel."""


NO_NAME = NoName()


def class_name(cls: type) -> str:
    """The name of a class, whatever its metaclass answers."""
    name: str = _class_name.__get__(cls)
    return name.encode("utf-8", "backslashreplace").decode()[:200]


_class_name: Any = type.__dict__["__name__"]


def prune(mediator: Any, held: Mapping[str, Any]) -> None:
    """Forget what this block marked and nothing holds any more. Called between steps, when every block is parked.

    `held` is what it binds to names, as `saved` has it.
    """
    marked: dict[int, Any] | None = mediator.__dict__.get("marked")
    if not marked or (len(marked) == 1 and held):
        return
    gone = [key for key in marked if sys.getrefcount(marked[key]) <= _OURS]
    if gone:
        nnsight_tracer._saves().difference_update(gone)
        let_go = [marked.pop(key) for key in gone]
        try:
            # Its finalizer may run code of the block.
            with watchdog.turn(building=True):
                let_go.clear()
        except Exception as exception:
            logger.debug("what a block held no more did not go: %s", type(exception).__name__)


def release(mediator: Any) -> None:
    """Forget all that this block marked: it has ended."""
    marked: dict[int, Any] | None = mediator.__dict__.pop("marked", None)
    if marked:
        nnsight_tracer._saves().difference_update(marked)
