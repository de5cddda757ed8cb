"""The methods of a client that run many traces. `test_patch_sweep.py` has what they do."""

from __future__ import annotations

import pytest

import tracewire
from tracewire.experiments import Experiments


async def test_a_client_has_them_while_it_is_open(redis_url: str, prefix: str) -> None:
    client = tracewire.Client(redis_url, prefix=prefix)
    assert isinstance(client, Experiments)
    with pytest.raises(tracewire.NotConnected):
        await client.patch_sweep("tiny", "a", "b", metric=5)
