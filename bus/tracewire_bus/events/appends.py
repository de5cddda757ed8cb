"""Events that a writer is about to append to traces' streams, and the Redis commands that append them."""

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
    """Redis refused the event, because the stream has it already, or has a later one: of a newer attempt, or the final.

    The writer raises it, too, where Redis has lost more of the stream than the writer can append again.
    """


class EntryTooLarge(BusError, ValueError):
    """The event takes more bytes than one entry of a stream can hold (`ENTRY_BYTES`)."""


@dataclass(slots=True, eq=False)
class Append:
    """One event that is to be appended, and the outcome of the attempt."""

    stream: Stream
    key: str
    id: str
    attempt: int
    data: bytes
    final: bool
    #: Makes the command of a script that appends the event together with its side effects (records, expiry, lifecycle).
    #: Called without a schema, it makes a command for the side effects only. `None`: the event has none.
    with_effects: Callable[[str, bytes, str], tuple[Any, ...]] | None
    #: The fields of its lifecycle entry, packed.
    lifecycle: bytes
    #: The command that settles its queue entry.
    settle: tuple[Any, ...] | None
    #: Done when the append has ended: with its error, or with None. A caller that is cancelled cancels it.
    outcome: Future[Exception | None]
    #: Whether Redis may have the event already, because a reply was lost.
    repeated: bool = False
    #: Whether Redis has refused it for lack of memory.
    refused: bool = False
    #: Whether its queue entry is settled by a later command, not in the same round trip.
    settles_late: bool = False
    ended: bool = False

    @property
    def moving(self) -> bool:
        """Whether the append waits for a cluster to finish moving its slot."""
        return self.with_effects is not None and not self.refused

    @property
    def size(self) -> int:
        """The memory that it takes here, in bytes, about."""
        return len(self.data) + _OVERHEAD

    @property
    def large(self) -> bool:
        """Whether its data is too large to pass through a Lua script, which would copy it twice."""
        return self.with_effects is None and len(self.data) > _INLINE_BYTES


class DeferredCommand(NamedTuple):
    """A command with the side effects of an event that Redis already has.

    `item` is the append that ends when the command was carried out, and `error` what it ends with.
    """

    command: tuple[Any, ...]
    item: Append | None
    error: Exception | None


class Stream:
    """The writer's state of one stream that it appends to."""

    __slots__ = (
        *("attempt", "base", "firehose", "given_up", "kept", "lost", "over", "patient", "record", "since"),
        *("stuck", "under_way"),
    )

    def __init__(self, record: str, firehose: str) -> None:
        #: The keys of the trace's record and of the lifecycle stream.
        self.record, self.firehose = record, firehose
        #: The id of the last acknowledged event before those in `kept`; `""` if there is none.
        self.base = ""
        #: The latest acknowledged appends, which the writer can repeat if a server loses them.
        self.kept: deque[Append] = deque()
        #: How many appends have not ended.
        self.under_way = 0
        #: Appends that wait for memory or for the end of a slot's move, in order; and since when, by the loop's clock.
        self.stuck: deque[Append] = deque()
        self.since = 0.0
        #: Whether appends may wait for memory for as long as the writer's patience lasts.
        self.patient = True
        #: The attempt that appends now, and the last attempt whose events Redis has lost or another writer has
        #: replaced.
        self.attempt = self.lost = 0
        #: Whether the final was appended.
        self.over = False
        #: Whether waiting appends were given up since the numbering of events was last corrected.
        self.given_up = False


def append_commands(batch: list[Append], schema: str) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The commands that append a batch, and the index of each event's own command among them."""
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
    """A function that makes the command which appends an event together with its side effects.

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
    """Whether a reply says that a server cannot serve now, for another reason than memory or a slot that moves."""
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
