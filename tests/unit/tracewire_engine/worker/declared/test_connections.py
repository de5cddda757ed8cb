"""Groups and what they depend on: a condition is on the probe of its own request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from tests.support.declared_plans import HIDDEN
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Hold, Probe, Steer, When
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

V = np.ones(HIDDEN, np.float32)


def declare(declared: DeclaredRequests, name: str, *given: Any, layers: tuple[int, ...] = ()) -> Declaration:
    placed = [
        Placed(one, [(f"layer.{layer}.output", True)]) for one, layer in zip(normalize(given), layers, strict=True)
    ]
    made = Declaration(name, 0, msgspec.msgpack.encode(placed), LiveRun(name), declared.decoded)
    declared.add(name, made)
    return made


def step(declared: DeclaredRequests, names: list[str], first: int) -> None:
    states = {name: SimpleNamespace(num_computed_tokens=first, num_prompt_tokens=1) for name in names}
    declared.begin(names, dict.fromkeys(names, 1), len(names), states)


def test_only_what_depends_on_something_is_connected() -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    declare(declared, "plain", Probe("p", "", V), Steer("", V), layers=(0, 1))
    step(declared, ["plain"], 0)
    assert declared.plan is not None
    assert not declared.plan.conditional
    assert declared.plan.windows is None
    when = When(probe="p", above=0.0)
    declare(declared, "other", Probe("p", "", V), Steer("", V, when=when), layers=(0, 1))
    step(declared, ["plain", "other"], 1)
    assert declared.plan.conditional
    probes, steers = (declared.hooks[f"layer.{layer}.output"].groups for layer in (0, 1))
    # The probes run together; the steering with a condition does not run with the one without.
    assert [len(group.members) for group in probes] == [2]
    assert probes[0].watch is not None
    assert sorted(group.condition is not None for group in steers) == [False, True]


def test_a_request_depends_on_its_own_probe() -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    for name, sign in (("one", 1.0), ("two", -1.0)):
        when = When(probe="p", above=0.0)
        declare(declared, name, Probe("p", "", V * sign), Steer("", V, when=when), layers=(0, 1))
    step(declared, ["one", "two"], 0)
    values = torch.ones(2, HIDDEN)
    declared.hooks["layer.0.output"].run(values)
    declared.hooks["layer.1.output"].run(values)
    assert values[:, 0].tolist() == [2.0, 1.0]


def test_on_pipeline_stages_what_depends_on_a_probe_is_on_its_stage() -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    declared.here = lambda location: location == "layer.0.output"
    hold = Hold("s", "", V, "p", 0.0, -1.0, 1.0, gain=0.5)
    apart = declare(declared, "apart", Probe("p", "", V), hold, layers=(0, 1))
    assert apart.failure is not None
    assert "'p' is on another pipeline stage" in apart.failure.message
    assert declare(declared, "together", Probe("p", "", V), hold, layers=(1, 1)).failure is None
