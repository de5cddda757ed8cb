"""Decorated blocks: their variables are bound as a function's arguments are."""

# ruff: noqa: F821

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tracewire
from tests.support.captured import run, variables
from tracewire import Client, intervention
from tracewire_bus.wire.packing import unpack


async def test_the_typed_save_is_a_save(client: Client, engine: Callable[..., Any]) -> None:
    @intervention
    def typed(model, tracer, live):
        scores: list[float] = tracewire.save([])

    from tracewire import save

    block = typed.block()
    assert block.modules == {"tracewire": "tracewire"}
    async with engine():
        model = await client.models.get("tiny")
        with model.trace() as tracer:
            rows: list[Any] = tracewire.save([])
            held = save({})
            with tracer.invoke("one"):
                rows.append(save(model.logits))
                held["one"] = 1
        shared = tracer._submission
        assert sorted(unpack(shared.shared)) == ["held", "rows"]
        assert shared.invokes[0].block is not None
        assert shared.invokes[0].block.imports == {"save": ("tracewire", "save")}
        await tracer.result()


HERE = Path(__file__)


SCALE = 3


LIMITS = {"low": 0.5, "high": [1, 2]}


@intervention
def plain(model, tracer, live):
    """What it is for."""
    first = 1  # mark: plain first
    # A comment stays.
    second = first + 1


def test_bound_variables_defaults_and_rebinding() -> None:
    @intervention
    def watch(model, tracer, live, a, b=SCALE, *, c=LIMITS):
        out = (a, b, c)

    assert run(watch(a=1).block())["out"] == (1, 3, LIMITS)
    once = watch(a=1, b=2)
    twice = once(b=5, c=None)
    assert run(once.block())["out"] == (1, 2, LIMITS)
    assert run(twice.block())["out"] == (1, 5, None)
    assert dict(twice.variables) == {"a": 1, "b": 5, "c": None}
    assert dict(watch.variables) == {}


def test_rest_of_variables_by_name_and_as_a_dict() -> None:
    threshold = "of the closure"

    @intervention
    def watch(model, tracer, live, first=0, **variables):
        out = (direction, threshold, first, sorted(variables), variables["direction"])

    block = watch(direction=1, threshold=2).block()
    assert run(block)["out"] == (1, 2, 0, ["direction", "threshold"], 1)

    @intervention
    def by_name(model, tracer, live, **variables):
        out = direction

    assert variables(by_name(direction=1).block()) == {"direction": 1}


def test_wrong_bindings_are_type_errors() -> None:
    @intervention
    def watch(model, tracer, live, direction=0):
        out = direction

    with pytest.raises(TypeError, match=r"takes no variable 'directoin' \(variables: direction\)"):
        watch(directoin=1)
    with pytest.raises(TypeError, match=r"by name, as in watch\(direction=\.\.\.\)"):
        watch(1)
    with pytest.raises(TypeError, match="the engine binds 'live'"):
        watch(live=1)

    @intervention
    def rest(model, tracer, live, **variables):
        pass

    with pytest.raises(TypeError, match="no variable 'variables'"):
        rest(variables=1)
    with pytest.raises(TypeError, match="not a valid name for a variable"):
        rest(**{"a b": 1})


def test_many_variables() -> None:
    @intervention
    def watch(model, tracer, live, **variables):
        pass

    many = {f"v{number}": number for number in range(300)}
    assert variables(watch(**many).block()) == many


def test_the_same_block_packs_to_the_same_bytes() -> None:
    @intervention
    def watch(model, tracer, live, **variables):
        out = a + b + SCALE

    assert watch(a=1, b=2).block() == watch(b=2, a=1).block()


def test_an_intervention_looks_like_its_function() -> None:
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "What it is for."
    assert plain.name == "plain"
    assert list(inspect.signature(plain).parameters) == ["model", "tracer", "live"]
    assert plain.filename == str(HERE)
    assert plain.source == plain.block().source

    @intervention
    def watch(model, tracer, live, direction, scale=1.5, **variables):
        pass

    assert repr(watch).startswith("<intervention watch(model, tracer, live, direction, scale=1.5, **variables) at ")
    bound = repr(watch(direction=torch.zeros(2, 3), extra="x"))
    assert "direction=torch.Tensor[2, 3], scale=1.5, extra='x'" in bound
