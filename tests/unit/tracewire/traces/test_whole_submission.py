"""A submission has its arrays again, wherever they were put when it was sent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import tracewire
from tracewire import Client
from tracewire.traces.large import offload_large_arrays
from tracewire.traces.vectors import ReferredArrays, ReferredLists
from tracewire.traces.whole_submission import whole_submission
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import decode_submission, encode
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack, unpack


@pytest.mark.usefixtures("registered")
async def test_blobs_and_vectors_come_back(client: Client, bus: Bus) -> None:
    large = np.arange(100_000, dtype=np.float32)
    steer = tracewire.Steer("residual(1)", np.arange(8192, dtype=np.float32))
    made = client.trace("tiny", "x", interventions=[steer])._submission
    made.block = Block(name="b", source="pass", variables=pack({"large": large, "small": 1}))
    sent = await offload_large_arrays(made, bus, [])
    referred = ReferredArrays(sent, bus.vectors, [], ReferredLists())
    sent = msgspec.structs.replace(sent, interventions=await referred.store())
    sent = decode_submission(encode(sent))
    assert len(sent.block.variables) < 1000 if sent.block is not None else False
    whole = await whole_submission(sent, made.trace, bus)
    assert whole.block is not None
    assert np.array_equal(unpack(whole.block.variables)["large"], large)
    assert whole.interventions == made.interventions
