"""What requests bring alike is decoded, and on the device, once."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Declared, Live, Steer
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests


def test_one_vector_of_many_requests_is_on_the_device_once() -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    vector = np.arange(8, dtype=np.float32)
    found = []
    for scale in (1.0, 2.0):
        (one,) = normalize([Steer("residual(0)", vector, scale=scale)])
        encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)])])
        found += Declaration(f"r{scale}", 0, encoded, LiveRun(""), known).ops
    first, second = found
    assert first.matrix is second.matrix
    assert (first.numbers, second.numbers) == ((1.0,), (2.0,))


def test_what_requests_bring_alike_is_decoded_once_but_for_what_is_live() -> None:
    known = DeclaredRequests(torch.device("cpu")).decoded
    vector = np.arange(8, dtype=np.float32)

    def two(*interventions: Declared) -> list[Declaration]:
        encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)]) for one in normalize(interventions)])
        runs = [LiveRun(f"run{index}") for index in range(2)]
        for index, run in enumerate(runs):
            run.values["scale"] = float(index)
        return [Declaration(f"r{run.name}", 0, encoded, run, known) for run in runs]

    alike, other = two(Steer("residual(0)", vector, scale=3.0))
    assert alike.ops[0] is other.ops[0]
    first, second = two(Steer("residual(0)", vector, scale=Live("scale")))
    assert (first.ops[0].numbers, second.ops[0].numbers) == ((0.0,), (1.0,))
    # One that is renewed leaves the others as they are.
    alike.live.values["scale"] = 7.0
    first.live.values["scale"] = 7.0
    assert not alike.update_live(known.vectors)
    assert first.update_live(known.vectors)
    assert (first.ops[0].numbers, second.ops[0].numbers) == ((7.0,), (1.0,))
