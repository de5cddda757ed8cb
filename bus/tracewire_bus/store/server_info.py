"""The version of Redis, its settings that matter to a bus, and its clock."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

__all__ = ["ServerInfo", "ask_server"]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The Redis of a bus; of a cluster, the node that answered.

    Attributes:
        version: its version, such as `7.0.15`.
        mode: `standalone`, `sentinel` or `cluster`.
        memory_limit: the most memory that it uses for data, in bytes; 0 without a limit.
        memory_used: the memory that it uses, in bytes.
        eviction_policy: what it does when its memory is full; anything but `noeviction` loses data.
        appendonly: whether it keeps a log on the disk, so that it comes back with its data.
        clients: how many connections it has.
        round_trip_s: how long the answer took, in seconds.
        clock_offset_s: how far its clock is ahead of the caller's, in seconds, give or take half of `round_trip_s`.
    """

    version: str
    mode: str
    memory_limit: int
    memory_used: int
    eviction_policy: str
    appendonly: bool
    clients: int
    round_trip_s: float
    clock_offset_s: float


async def ask_server(command: Callable[..., Awaitable[Any]]) -> ServerInfo:
    """Ask Redis about itself. `command` sends it a command in a round trip of its own.

    Raises:
        BusError: Redis refuses one of the commands `INFO` and `TIME`.
        BusUnavailable: Redis does not answer.
    """
    sections = ("server", "clients", "memory", "persistence")
    # One after the other: Redis 6.2 takes one section a command.
    values: dict[str, str] = {}
    for section in sections:
        values |= _parsed(await command("INFO", section))
    sent, began = time.time(), time.perf_counter()
    seconds, micros = await command("TIME")
    took = time.perf_counter() - began
    return ServerInfo(
        version=values.get("redis_version", ""),
        mode=values.get("redis_mode", ""),
        memory_limit=int(values.get("maxmemory", 0)),
        memory_used=int(values.get("used_memory", 0)),
        eviction_policy=values.get("maxmemory_policy", ""),
        appendonly=values.get("aof_enabled") == "1",
        clients=int(values.get("connected_clients", 0)),
        round_trip_s=took,
        clock_offset_s=int(seconds) + int(micros) / 1e6 - (sent + took / 2),
    )


def _parsed(raw: Any) -> dict[str, str]:
    lines = (line.partition(":") for line in bytes(raw).decode("utf-8", "replace").splitlines())
    return {name: value for name, _, value in lines}
