"""Sockets between tensor-parallel ranks, beside vLLM's own connections: each rank has one to every other rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import zmq
from vllm.distributed.parallel_state import GroupCoordinator
from zmq.utils import z85

from tracewire_engine.link.addresses import bind, endpoint, is_remote

from .plain_messages import gathered

__all__ = ["RankSockets"]


class RankSockets:
    """This rank's ends. All ranks make theirs at the same time.

    Args:
        group: of the ranks.
        address: of the link to the adapter, which tells whether ranks are on other machines, and has their keys.
        role: of the sockets, which tells them apart from others of the same ranks.
    """

    def __init__(self, group: GroupCoordinator, address: str, role: str) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        #: Receives from all other ranks.
        self.pull: zmq.Socket[bytes] = context.socket(zmq.PULL)
        keys: dict[str, bytes] = {}
        if is_remote(address):
            from vllm.utils.network_utils import get_ip

            given = parse_qs(address.partition("?")[2])
            keys = {name: z85.encode(bytes.fromhex(given[name][0])) for name in ("public", "secret")}
            self.pull.curve_server = True
            self.pull.curve_publickey, self.pull.curve_secretkey = keys["public"], keys["secret"]
            at = f"tcp://[{get_ip()}]:*" if ":" in get_ip() else f"tcp://{get_ip()}:*"
        elif address:
            at = endpoint(address, f"{role}{group.rank}")
        else:
            at = f"ipc://{Path(tempfile.mkdtemp()) / role}"
        for option in (zmq.RCVHWM, zmq.LINGER):
            self.pull.setsockopt(option, 0)
        addresses = gathered(bind(self.pull, at), group)
        #: Sends to each other rank, in their order.
        self.push: list[zmq.Socket[bytes]] = []
        for rank, other in enumerate(addresses):
            if rank == group.rank_in_group:
                continue
            socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
            for option in (zmq.SNDHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            if keys:
                socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
                    keys[name] for name in ("public", "public", "secret")
                )
                socket.setsockopt(zmq.IPV6, int(other.startswith("tcp://[")))
            socket.connect(other)
            self.push.append(socket)

    def close(self) -> None:
        """Close the sockets, of a rank that needs none."""
        for socket in (self.pull, *self.push):
            socket.close(linger=0)
