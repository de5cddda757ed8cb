"""Events on their way into traces' streams, and the commands that append them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

from tracewire_bus.store.keys import Keys
from tracewire_bus.transport.errors import BusError, is_full, is_transient
from tracewire_bus.transport.loops import Future
from tracewire_bus.transport.scripts import Script, with_text

__all__ = [
    "ENTRY_BYTES",
    "UNFINISHED_S",
    "Append",
    "DeferredCommand",
    "EntryTooLarge",
    "Fenced",
    "Stream",
    "append_commands",
    "effects_command",
    "field_of",
    "is_away",
    "is_fence",
    "is_moving",
    "texted",
]

#: What one entry may hold. Redis closes the connection on a string over 512 MB, and one of 100 MB stalls it.
ENTRY_BYTES: Final = 256 * 1024 * 1024
#: How long a trace that never ends is kept, in seconds, from its first event.
UNFINISHED_S: Final = 7 * 24 * 3600
#: Larger data does not pass through Lua where nothing goes with it, which would copy it twice.
_INLINE_BYTES: Final = 64 * 1024
#: What an event costs here besides its data, in bytes, about.
_OVERHEAD: Final = 500

_AFTER: Final = Script("append_after")
_APPEND: Final = Script("append_event")
_APPEND_FINAL: Final = Script("append_final")


class Fenced(BusError):
    """The stream has this event already, or a later one: of a newer attempt, or the final. Nothing was appended.

    Also: Redis has lost more of the stream than could be appended again.
    """


class EntryTooLarge(BusError, ValueError):
    """More than one entry can hold."""


@dataclass(slots=True, eq=False)
class Append:
    """One event on its way to Redis, and what came of it."""

    stream: Stream
    key: str
    id: str
    attempt: int
    data: bytes
    final: bool
    #: Makes the command of the script that appends it and does what goes with it; without a schema, only the latter.
    with_effects: Callable[[str, bytes, str], tuple[Any, ...]] | None
    #: The fields of its lifecycle entry, packed.
    lifecycle: bytes
    #: The command that settles its queue entry.
    settle: tuple[Any, ...] | None
    #: What it failed with, or None, once it has ended. Cancelled with the caller that waits for it.
    outcome: Future[Exception | None]
    #: Redis may have it: a reply was lost.
    repeated: bool = False
    #: Redis has no memory for it.
    refused: bool = False
    #: Its queue entry is settled after it, which may have to wait.
    settles_late: bool = False
    ended: bool = False

    @property
    def moving(self) -> bool:
        """Whether it waits for its slot to be moved, if it waits apart, and not only for what was before it."""
        return self.with_effects is not None and not self.refused

    @property
    def size(self) -> int:
        """What it takes, in bytes."""
        return len(self.data) + _OVERHEAD

    @property
    def large(self) -> bool:
        """Whether it does not pass through Lua, which would copy it twice, if that can be helped."""
        return self.with_effects is None and len(self.data) > _INLINE_BYTES


class DeferredCommand(NamedTuple):
    """A script's command that goes with an event which Redis has; the append that ends with it, and with what error."""

    command: tuple[Any, ...]
    item: Append | None
    error: Exception | None


class Stream:
    """What the writer knows of a stream that it appends to."""

    __slots__ = (
        *("attempt", "base", "firehose", "given_up", "kept", "lost", "over", "patient", "record", "since"),
        *("stuck", "under_way"),
    )

    def __init__(self, record: str, firehose: str) -> None:
        #: The keys of its trace's record, and of what all are told of it.
        self.record, self.firehose = record, firehose
        #: The last event that Redis acknowledged before those kept; "" if there was none.
        self.base = ""
        #: What it acknowledged last.
        self.kept: deque[Append] = deque()
        #: How many appends have not ended.
        self.under_way = 0
        #: What waits for memory or for the end of a slot's move, in order; and since when for memory.
        self.stuck: deque[Append] = deque()
        self.since = 0.0
        #: Whether memory may take its time.
        self.patient = True
        #: The attempt that appends now, and up to which one it is somebody else's.
        self.attempt = self.lost = 0
        #: Nothing more comes.
        self.over = False
        #: What waited was given up, and whoever numbers the events does not know yet.
        self.given_up = False


def append_commands(batch: list[Append], schema: str) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The commands that append a batch, and the places of the events' own among them."""
    commands: list[tuple[Any, ...]] = []
    places: list[int] = []
    last: dict[str, str] = {}
    for item in batch:
        previous = last.get(item.key, "")
        last[item.key] = item.id
        places.append(len(commands))
        if item.with_effects is not None:
            commands.append(item.with_effects(schema, item.data, previous))
        elif previous:
            commands.append(texted(_AFTER((item.key,), item.id, schema, item.data, previous)))
        else:
            commands.append(("XADD", item.key, item.id, "v", schema, "d", item.data))
        if item.settle is not None:
            # In the same round trip, unless Redis may have no memory yet for the event before.
            item.settles_late = bool(previous)
            if not item.settles_late:
                commands.append(item.settle)
    return commands, places


def effects_command(
    keys: Keys,
    trace: str,
    id_: str,
    attempt: int,
    *,
    final: bool,
    keep_s: int | str,
    version: int | None,
    lifecycle: Sequence[Any],
) -> Callable[[str, bytes, str], tuple[Any, ...]]:
    """What makes the command that appends an event and does what goes with it.

    `keep_s` is for how long to keep the trace from then on, or `""`. `version` is that of the live parameters which the
    event reports. `lifecycle` are the fields of its lifecycle entry.
    """
    tag = keys.tag(trace)
    names = (
        *(keys.events(trace), keys.blobs(trace), keys.record(trace), keys.changes(trace), keys.operations(trace)),
        *(keys.deadlines(tag), keys.snapshot(trace), keys.firehose(tag)),
        *(keys.ended(tag), keys.ended_bytes(tag)),
    )
    script, end, reported = (
        _APPEND_FINAL if final else _APPEND,
        "1" if final else "",
        "" if version is None else version,
    )

    def make(schema: str, data: bytes, previous: str) -> tuple[Any, ...]:
        # The lifecycle entry is published with the event, and not again when only its effects are repeated.
        published = lifecycle if schema else ()
        command = script(names, id_, schema, data, keep_s, end, reported, attempt, trace, previous, *published)
        # With its text: what comes behind it in a pipeline must not overtake it.
        return texted(command)

    return make


def texted(command: tuple[Any, ...]) -> tuple[Any, ...]:
    found = with_text(command)
    assert found is not None
    return found


def is_moving(reply: object) -> TypeGuard[Exception]:
    """Whether a cluster's node said that a slot is being moved."""
    from redis.exceptions import TryAgainError

    return isinstance(reply, TryAgainError)


def is_away(reply: object) -> bool:
    """Whether a server said that it is not itself, other than for lack of memory or of a slot."""
    return isinstance(reply, Exception) and is_transient(reply) and not is_full(reply) and not is_moving(reply)


def is_fence(error: Exception) -> bool:
    text = str(error)
    return text.startswith(("FENCED ", "BEHIND ")) or any(
        one in text for one in ("equal or smaller than", "exhausted the last possible ID")
    )


def field_of(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """A field of an entry as Redis replies it: names and values in turn."""
    for index in range(0, len(fields), 2):
        if fields[index] == name:
            return fields[index + 1]
    return None
