"""What a Ray worker finds out of its machine before it builds anything. The actors themselves need a cluster."""

from __future__ import annotations

import pytest
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

from tracewire_engine.core.ray_executor import _card_of, _tell_nodes_apart


def test_the_network_interface_of_an_address() -> None:
    assert _card_of("127.0.0.1") == "lo"
    assert _card_of("203.0.113.7") is None


def test_ranks_of_two_nodes_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = staticmethod(lambda communicator: f"group-{communicator}")
    names = []
    for node in ("a" * 40, "b" * 40):
        monkeypatch.setattr(_CPUSHMDistributed, "make_group_name", theirs)
        _tell_nodes_apart(node)
        names.append(_CPUSHMDistributed.make_group_name("tp"))
    assert names == [f"group-tp-{'a' * 12}", f"group-tp-{'b' * 12}"]
