"""What nnsight's users have around their blocks, taken along to the engine: many habits in one trace each."""

# mypy: ignore-errors

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tracewire
from tracewire import Client, Model, intervention

PROMPT = "def parse(text):"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
DEBUG = False


class Site(enum.Enum):
    MLP = "mlp"
    ATTENTION = "self_attn"


class Span(NamedTuple):
    start: int
    stop: int


@dataclass
class Config:
    layer: int
    site: Site
    scale: float = 2.0

    def scaled(self, x):
        return self.scale * x


class Sae(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, features)
        self.decoder = nn.Linear(features, width, bias=False)
        self.dropout = nn.Dropout(0.5)

    def encode(self, x):
        return torch.relu(self.encoder(x))

    def forward(self, x):
        return self.decoder(self.dropout(self.encode(x)))


def norm_of(x, *, scale):
    return float(x.float().norm()) * scale


class Experiment:
    """An object that cannot travel, of which the block reads attributes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layer = 2
        self.config = Config(2, Site.MLP)
        self.lock = __import__("threading").Lock()

    async def run(self):
        with self.model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            own = tracewire.save(float(self.model.model.layers[self.layer].mlp.output.float().norm()))
            scaled = tracewire.save(self.config.scaled(1.5))
        await tracer.result()
        return tracer.saves


async def test_values_of_all_kinds(model: Model) -> None:
    layers = model.model.layers
    middle, named, listed = layers[1:3], {"first": layers[0], Site.MLP: layers[2].mlp}, [layers[0], layers[1]]
    config, span, steps = Config(2, Site.MLP), Span(1, 3), range(1, 3)
    device, shape = torch.device("cpu"), torch.Size([2, 1])
    norm, weights, skip = functools.partial(norm_of, scale=2.0), {(0, "head"): 1.5}, {2, 3}
    pooled = {"mean": torch.mean, "norm": nn.functional.normalize}
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        norms: dict[tuple[int, str], float] = tracewire.save({})
        if DEBUG:
            undefined_logger.info("the engine never has this")  # noqa: F821
        first = norm(listed[0].mlp.output)
        same = tracewire.save(first == norm(named["first"].mlp.output))
        for at, layer in enumerate(middle):
            if at + span.start not in skip:
                norms[at, config.site.value] = norm(layer.mlp.output)
        chosen = tracewire.save(norm(getattr(layers[config.layer], config.site.value).output))
        by_enum = tracewire.save(config.site is Site.MLP and Site("mlp") in named)
        placed = tracewire.save(torch.zeros(shape, device=device) + config.scaled(weights[0, "head"]))
        mean = tracewire.save(float(pooled["mean"](torch.ones(3)) + pooled["norm"](torch.ones(1), dim=0)[0]))
        numbers = tracewire.save([*steps, span.stop, *sorted(config.__dict__)])
    saves = (await tracer.result()).saves
    assert saves["same"] is True
    assert list(saves["norms"]) == [(0, "mlp")]
    assert saves["by_enum"] is True
    assert saves["placed"].tolist() == [[3.0], [3.0]]
    assert saves["mean"] == 2.0
    assert saves["numbers"] == [1, 2, 3, "layer", "scale", "site"]
    assert saves["chosen"] > 0

    own = await Experiment(model).run()
    assert own["own"] == pytest.approx(saves["chosen"] / 2)
    assert own["scaled"] == 3.0


async def test_a_network_hangs_in_the_model_s_tree(model: Model) -> None:
    """As adapters do in nnsight's documentation."""
    torch.manual_seed(0)
    sae = Sae(model.info.hidden_size, 16)
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        layer = model.model.layers[2]
        layer.mlp.sae = sae
        kept = tracewire.save([])
        for _ in tracer.iter[:]:
            hidden = layer.mlp.output.float()
            seen = layer.mlp.sae(hidden, hook=True)
            kept.append([seen.clone(), sae(hidden), layer.mlp.sae.encoder(hidden).shape[-1], layer.mlp.sae.path])
    result = await tracer.result()
    kept = await tracewire.load(result.saves["kept"])
    assert len(kept) == 3
    for seen, called, width, path in kept:
        np.testing.assert_array_equal(seen, called)
        assert (width, path) == (16, "model.model.layers.2.mlp.sae")


async def test_a_network_of_one_s_own_runs_where_the_model_is(client: Client, model: Model) -> None:
    """In both forms; its weights are large arrays, which travel beside the submission."""
    torch.manual_seed(0)
    sae = Sae(model.info.hidden_size, 1024).to(torch.bfloat16)
    probe = nn.Sequential(nn.Linear(model.info.hidden_size, 2), nn.Softmax(dim=-1))
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        stream = tracewire.save(model.residual(2).output.clone())
        features = tracewire.save(sae.encode(stream))
        probed = tracewire.save(probe(stream.float()))
        model.residual(2).output = sae(stream)
        training = tracewire.save([module.training for module in (sae, *sae.modules(), *probe.modules())])
        placed = tracewire.save(sae.encoder.weight.device == stream.device)
    result = await tracer.result()
    saves = await tracewire.load(result.saves)
    stream = torch.from_numpy(np.array(saves["stream"]))
    assert not any(saves["training"])
    assert saves["placed"] is True
    sae.eval()
    with torch.no_grad():
        theirs = torch.from_numpy(np.array(saves["features"]))
        torch.testing.assert_close(theirs, sae.encode(stream.bfloat16()).float(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(torch.from_numpy(np.array(saves["probed"])), probe(stream))

    @intervention
    def steer(model, tracer, live, sae, site):
        model.residual(2).output = sae(model.residual(2).output)
        assert site.value == "mlp"
        scores = tracewire.save(float(sae.encode(model.residual(3).output).float().sum()))

    async with client.trace(model, PROMPT, steer(sae=sae, site=Site.MLP), max_tokens=2, **GREEDY) as trace:
        again = await trace.result()
    assert again.token_ids == result.token_ids


async def test_an_error_in_a_class_of_one_s_own_has_its_own_line(model: Model) -> None:
    class Wrong:
        def encode(self, x):
            raise ValueError("not like this")

    wrong = Wrong()
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        wrong.encode(model.residual(1).output)
    with pytest.raises(ValueError, match="not like this") as caught:
        await tracer.result()
    assert caught.value.filename == __file__
    assert caught.value.source == 'raise ValueError("not like this")'
