"""Marks of saved objects: each block's own, and held no longer than they can matter."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch
from nnsight.tracing import tracer as nnsight_tracer

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks import save_marks as marks


def test_an_object_that_nobody_else_holds_is_let_go_at_the_end_of_the_step() -> None:
    kept, dropped = torch.zeros(3), torch.ones(3)
    mediator = SimpleNamespace(marked={id(kept): kept, id(dropped): dropped})
    gone = weakref.ref(dropped)
    del dropped
    marks.prune(mediator, {"kept": kept})
    gc.collect()
    assert gone() is None
    assert list(mediator.marked.values()) == [kept] or mediator.marked[id(kept)] is kept
    assert len(mediator.marked) == 1


def test_only_this_block_s_marks_name_its_saves() -> None:
    one, other = SimpleNamespace(lcls={"count": 1, "x": 2}), SimpleNamespace(lcls={"count": 1})
    one.marked = {id(1): 1}
    assert marks.saved(one) == {"count": 1}
    assert marks.saved(other) == {}


def test_release_forgets_all() -> None:
    saved = object()
    marks.install()
    mediator = SimpleNamespace(marked={id(saved): saved})
    nnsight_tracer._saves().add(id(saved))
    marks.release(mediator)
    assert not hasattr(mediator, "marked")
    # Its id may be another object's now, which nobody has saved.
    assert id(saved) not in nnsight_tracer._saves()
    marks.release(mediator)
