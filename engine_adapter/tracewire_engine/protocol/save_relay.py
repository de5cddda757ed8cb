"""Messages between a worker and its save relay, the process that passes on to the adapters what hosts have saved.

They are messages of a socket that keeps them apart. `RELAYED` records at most are in each.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "RELAYED",
    "Closed",
    "Expected",
    "Lost",
    "Opened",
    "Order",
    "Over",
    "Passed",
    "Refused",
    "Relayed",
    "Settings",
]

#: How many records a message names at most.
RELAYED = 100


class Settings(msgspec.Struct, array_like=True, tag="settings"):
    """To where the relay passes saves on: the link's address, and the number of adapters. The first message.

    A descriptor comes with it, of the `TurnCounts`.
    """

    address: str
    adapters: int = 1


class Opened(msgspec.Struct, array_like=True, tag="opened"):
    """A host. Two descriptors come with it: of the socket from which its saves come, and of the memory beside that."""

    host: int


class Expected(msgspec.Struct, array_like=True, tag="expected"):
    """Records that a host may send from now on, each by its request and its choice.

    `allowed` is how many messages the host might send before it was told of these requests (`TurnCounts`). Each of
    theirs is of another token, so there are no tokens beyond as many as it may send more by then.
    """

    host: int
    records: list[tuple[str, int]]
    allowed: int = 0


class Over(msgspec.Struct, array_like=True, tag="over"):
    """Records of which a host has sent all, each by its request and its choice."""

    host: int
    records: list[tuple[str, int]]


class Lost(msgspec.Struct, array_like=True, tag="lost"):
    """A host has ended. What it has still sent is passed on if it is `trusted`. The answer is `Passed`."""

    host: int
    trusted: bool = True


class Closed(msgspec.Struct, array_like=True, tag="closed"):
    """A host has no trace left, and has sent all. It is forgotten."""

    host: int


#: What the worker tells the relay.
Order: TypeAlias = Settings | Opened | Expected | Over | Lost | Closed


class Relayed(msgspec.Struct, array_like=True):
    """What was passed on of one choice of a request: the index of the last token, and how many steps.

    `ended` says that its block has ended it in one of them.
    """

    request: str
    choice: int
    index: int
    steps: int
    ended: bool


class Passed(msgspec.Struct, array_like=True, tag="passed"):
    """All that was passed on of the host's live requests. Another message has more, unless it is the `last`."""

    host: int
    records: list[Relayed]
    last: bool = True


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """A host has sent what no host sends, and nothing more of it is read."""

    host: int
    why: str
