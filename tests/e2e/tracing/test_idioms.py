"""What nnsight's users write around a block, each idiom by itself on the real engine. docs/nnsight.md lists them."""

# mypy: ignore-errors

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch
from torch import nn

import tracewire
from tests.e2e.tracing import test_habits as habits
from tests.e2e.tracing.test_habits import DEBUG, GREEDY, PROMPT, Config, Sae, Site, Span
from tests.support import ROOT
from tracewire import Model

Idiom = Callable[[Model], Awaitable[None]]
IDIOMS: dict[str, Idiom] = {}


def idiom(case: Idiom) -> Idiom:
    """Note what shows the idiom that the function's docstring names."""
    assert case.__doc__ not in IDIOMS
    IDIOMS[case.__doc__] = case
    return case


async def saves_of(tracer) -> dict:
    return await tracewire.load((await tracer.result()).saves)


@idiom
async def _own_network(model):
    """a network of your own, such as an SAE"""
    sae = Sae(model.info.hidden_size, 16)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        stream = tracewire.save(model.residual(2).output.float())
        features = tracewire.save(sae.encode(stream))
    saves = await saves_of(tracer)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(np.array(saves["features"])), sae.encode(torch.from_numpy(np.array(saves["stream"])))
        )


@idiom
async def _installed_network(model):
    """a network of an installed package's classes, such as a linear probe"""
    probe = nn.Linear(model.info.hidden_size, 2)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        stream = tracewire.save(model.residual(2).output.float())
        scores = tracewire.save(probe(stream))
    saves = await saves_of(tracer)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(np.array(saves["scores"])), probe(torch.from_numpy(np.array(saves["stream"])))
        )


@idiom
async def _dataclass(model):
    """a dataclass, with its methods"""
    config = Config(2, Site.MLP, scale=3.0)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        scaled = tracewire.save([config.layer, config.scaled(2.0)])
    assert (await saves_of(tracer))["scaled"] == [2, 6.0]


@idiom
async def _enum(model):
    """an enum"""
    site = Site.ATTENTION
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        same = tracewire.save([site is Site.ATTENTION, site.value, Site("mlp").name])
    assert (await saves_of(tracer))["same"] == [True, "self_attn", "MLP"]


@idiom
async def _namedtuple(model):
    """a namedtuple"""
    span = Span(1, 3)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        bounds = tracewire.save([span.start, span._replace(start=0).start, len(span)])
    assert (await saves_of(tracer))["bounds"] == [1, 0, 2]


@idiom
async def _partial(model):
    """`functools.partial`"""
    total = functools.partial(torch.sum, dim=0)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        sums = tracewire.save(total(torch.ones(3, 2)))
    assert (await saves_of(tracer))["sums"].tolist() == [3, 3]


@idiom
async def _set(model):
    """a set"""
    chosen = {1, 3}
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        found = tracewire.save([layer for layer in range(4) if layer in chosen])
    assert (await saves_of(tracer))["found"] == [1, 3]


@idiom
async def _range(model):
    """a range"""
    layers = range(0, 4, 2)
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        norms = tracewire.save({})
        for layer in layers:
            norms[layer] = float(model.residual(layer).output.float().norm())
    assert list((await saves_of(tracer))["norms"]) == [0, 2]


@idiom
async def _device(model):
    """`torch.device`"""
    device = torch.device("cpu")
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        moved = tracewire.save(str(model.residual(1).output.to(device).device))
    assert (await saves_of(tracer))["moved"] == "cpu"


@idiom
async def _size(model):
    """`torch.Size`"""
    shape = torch.zeros(2, 3).shape
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        zeros = tracewire.save(torch.zeros(shape))
        count = tracewire.save(shape.numel())
    saves = await saves_of(tracer)
    assert (saves["zeros"].shape, saves["count"]) == ((2, 3), 6)


@idiom
async def _tuple_keys(model):
    """a dict whose keys are tuples"""
    weights = {(0, "head"): 1.5}
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        weight = tracewire.save(weights[0, "head"])
    assert (await saves_of(tracer))["weight"] == 1.5


async def _same_norms(model, tracer):
    norms = (await saves_of(tracer))["norms"]
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as plain:
        expected = tracewire.save([float(model.model.layers[i].mlp.output.float().norm()) for i in (1, 2)])
    assert norms == (await saves_of(plain))["expected"]


@idiom
async def _list_of_modules(model):
    """a list of the model's modules"""
    listed = [model.model.layers[1], model.model.layers[2]]
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        norms = tracewire.save([float(layer.mlp.output.float().norm()) for layer in listed])
    await _same_norms(model, tracer)


@idiom
async def _dict_of_modules(model):
    """a dict of the model's modules"""
    named = {"early": model.model.layers[1].mlp, "late": model.model.layers[2].mlp}
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        norms = tracewire.save([float(module.output.float().norm()) for module in named.values()])
    await _same_norms(model, tracer)


@idiom
async def _slice_of_layers(model):
    """a slice of the model's layers"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        norms = tracewire.save([float(layer.mlp.output.float().norm()) for layer in model.model.layers[1:3]])
    await _same_norms(model, tracer)


@idiom
async def _dead_branch(model):
    """a name that only a dead branch uses"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        if DEBUG:
            no_such_logger.info("never")  # noqa: F821
        one = tracewire.save(1)
    assert (await saves_of(tracer))["one"] == 1


class _Experiment:
    def __init__(self, model):
        self.model = model
        self.layer = 1

    async def run(self):
        with self.model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            layer = tracewire.save(self.layer)
            norm = tracewire.save(float(self.model.residual(self.layer).output.float().norm()))
        return await saves_of(tracer)


@idiom
async def _self(model):
    """`self.layer`, in a method"""
    saves = await _Experiment(model).run()
    assert saves["layer"] == 1
    assert saves["norm"] > 0


@idiom
async def _tokenizer(model):
    """`model.tokenizer`, in a block and outside"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        ids = tracewire.save([int(token) for token in model.tokenizer.encode("def parse(text):")])
    assert model.tokenizer.encode(PROMPT) == (await saves_of(tracer))["ids"]


@idiom
async def _config(model):
    """`model.config`, in a block and outside"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        width = tracewire.save(model.config.hidden_size)
    assert model.config.hidden_size == (await saves_of(tracer))["width"]


@idiom
async def _value_error(model):
    """`except ValueError` around a trace whose block raised one"""
    caught = None
    try:
        with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            raise ValueError("mine")
        await tracer.result()
    except ValueError as error:
        caught = error
    assert isinstance(caught, tracewire.InterventionError)
    assert caught.source == 'raise ValueError("mine")'


@idiom
async def _saved_tuple_keys(model):
    """saving a dict whose keys are tuples"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        probs = tracewire.save({})
        probs[0, "head"] = 0.5
    assert (await saves_of(tracer))["probs"] == {(0, "head"): 0.5}


@idiom
async def _saved_sets(model):
    """saving a set or a frozenset"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        one = tracewire.save({1, 2})
        two = tracewire.save(frozenset({"a"}))
    saves = await saves_of(tracer)
    assert (saves["one"], saves["two"]) == ({1, 2}, frozenset({"a"}))


@idiom
async def _saved_dtype(model):
    """saving a `torch.dtype`"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        kind = tracewire.save(model.residual(1).output.dtype)
    assert "float" in str((await saves_of(tracer))["kind"])


@idiom
async def _own_module(model):
    """a module of your own, used by its name"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        norm = tracewire.save(habits.norm_of(torch.ones(4), scale=2.0))
    assert (await saves_of(tracer))["norm"] == 4.0


@idiom
async def _source(model):
    """`print(model.model.layers[0].mlp.source)`, in a block and outside"""
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        text = tracewire.save(str(model.model.layers[0].mlp.source))
    text = (await saves_of(tracer))["text"]
    assert "down_proj" in text
    assert str(model.model.layers[0].mlp.source) == text


@pytest.mark.parametrize("name", IDIOMS)
async def test_an_idiom_of_nnsight_s_users(model: Model, name: str) -> None:
    await IDIOMS[name](model)


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "nnsight.md").read_text()
    section = page.partition("### Idioms")[2].partition("\n#")[0]
    assert re.findall(r"^\d+\. (.*)$", section, re.MULTILINE) == list(IDIOMS)
