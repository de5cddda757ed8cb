"""Which stage holds what, and what stands in for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.models.utils import PPMissingLayer

from tracewire_engine.worker.parallel.topology import StandIn, Topology, described


class Layer(torch.nn.Module):
    """A layer with a part."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.mlp = torch.nn.Linear(4, 4)


def stage(own: range, count: int = 4) -> torch.nn.Module:
    """One stage's part of a decoder of `count` layers."""
    root = torch.nn.Module()
    root.model = torch.nn.Module()
    root.model.embed_tokens = torch.nn.Embedding(8, 4) if own.start == 0 else PPMissingLayer()
    root.model.layers = torch.nn.ModuleList([Layer() if n in own else PPMissingLayer() for n in range(count)])
    root.model.norm = torch.nn.LayerNorm(4) if own.stop == count else PPMissingLayer()
    if own.stop == count:
        root.lm_head = torch.nn.Linear(4, 8)
    return root


@pytest.fixture
def stages() -> tuple[list[torch.nn.Module], list[Topology]]:
    """Two stages, each completed."""
    models = [stage(range(2)), stage(range(2, 4))]
    trees = [described(model) for model in models]
    topologies = [Topology(index, trees) for index in range(2)]
    for model, topology in zip(models, topologies, strict=True):
        topology.complete(model)
    return models, topologies


@pytest.mark.parametrize(
    ("location", "owner"),
    [
        ("model.model.embed_tokens.output", 0),
        ("model.model.layers.1.output", 0),
        ("model.model.layers.2.input", 1),
        ("model.model.layers.2.skip", 1),
        ("model.model.layers.1.mlp()", 0),
        ("model.model.layers.3.mlp.output", 1),
        ("model.model.norm.output", 1),
        ("model.model.input", 0),
        ("model.model.output", 1),
        ("model.input", 0),
        ("model.output", 1),
        ("model.logits", 1),
        ("model.samples", 1),
        ("tracewire.live", None),
        ("result", None),
    ],
)
def test_each_location_is_on_one_stage(stages: Any, location: str, owner: int | None) -> None:
    _, topologies = stages
    assert [topology.owner(location) for topology in topologies] == [owner, owner]


def test_what_a_stage_comes_by_though_it_is_anothers(stages: Any) -> None:
    _, (first, last) = stages
    assert {"model.model.output", "model.output"} <= first.elsewhere
    assert {"model.model.input", "model.input"} <= last.elsewhere
    assert not any("layers.0" in location or "layers.3" in location for location in first.elsewhere | last.elsewhere)


def test_stand_ins_have_names_and_plain_attributes(stages: Any) -> None:
    (first, last), _ = stages
    for model, other in ((first, "3"), (last, "0")):
        assert isinstance(model.get_submodule(f"model.layers.{other}"), StandIn)
        assert model.get_submodule(f"model.layers.{other}").width == 4
        assert model.get_submodule(f"model.layers.{other}.mlp").in_features == 4
        assert not list(model.get_submodule(f"model.layers.{other}").parameters())
    assert isinstance(first.lm_head, StandIn)
    assert isinstance(first.get_submodule("model.layers.1"), Layer)
    with pytest.raises(AttributeError):
        _ = first.lm_head.weight


def test_a_module_that_two_paths_name_has_one_stand_in() -> None:
    models = [stage(range(2)), stage(range(2, 4))]
    models[1].get_submodule("model.layers.3").mlp = models[1].get_submodule("model.layers.2").mlp
    trees = [described(model) for model in models]
    Topology(0, trees).complete(models[0])
    layers = models[0].get_submodule("model.layers")
    assert layers.get_submodule("3.mlp") is layers.get_submodule("2.mlp")
