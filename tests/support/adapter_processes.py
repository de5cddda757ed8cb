"""Processes that stand for adapters beside the first one. A module of its own, since each process imports it."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

__all__ = ["asks_to_drain", "dies", "serves"]

#: The exit status of `serves`, by what it was told.
STATUS = {b"stop": 10, b"drain": 11, b"lost": 12}


def serves(pipe: Connection) -> None:
    """Serve until it is told to end."""
    pipe.send_bytes(b"serving")
    os._exit(STATUS[pipe.recv_bytes()])


def asks_to_drain(pipe: Connection) -> None:
    """Serve, and ask the others to drain."""
    pipe.send_bytes(b"serving")
    pipe.send_bytes(b"draining")
    os._exit(0 if pipe.recv_bytes() == b"drain" else 1)


def dies(pipe: Connection) -> None:
    """End before it serves."""
    os._exit(3)
