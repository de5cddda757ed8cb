"""Events that a writer is appending, and the commands that append them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

import msgspec

from tracewire_bus.domain.identity import Signer
from tracewire_bus.store.keys import Keys
from tracewire_bus.transport.errors import BusError, is_full, is_transient
from tracewire_bus.transport.loops import Future
from tracewire_bus.transport.scripts import Script, with_text
from tracewire_bus.wire.pieces import Pieces

__all__ = [
    "ENTRY_BYTES",
    "OVERHEAD",
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
    "sign_finals",
    "texted",
]

#: Most bytes of one entry. Redis closes the connection on a string over 512 MB, and one of 100 MB stalls it.
ENTRY_BYTES: Final = 256 * 1024 * 1024
#: How long Redis keeps a trace that never ends, in seconds from its first event.
UNFINISHED_S: Final = 7 * 24 * 3600
#: Larger data, in bytes, does not pass through Lua, which would copy it twice, unless the event has effects.
_INLINE_BYTES: Final = 64 * 1024
#: About the memory of an `Append` besides its data, in bytes.
OVERHEAD: Final = 500

_AFTER: Final = Script("append_after")
_APPEND: Final = Script("append_event")
_APPEND_FINAL: Final = Script("append_final")


class Fenced(BusError):
    """The stream has this event or a later one, of a newer attempt or the final, so the event was not appended.

    Also raised if Redis has lost more of the stream than the writer can append again.
    """


class EntryTooLarge(BusError, ValueError):
    """The event is larger than one entry may be."""


class Append(msgspec.Struct, eq=False):
    """One event that a writer is appending, and its outcome."""

    stream: Stream
    key: str
    id: str
    attempt: int
    data: bytes | Pieces
    final: bool
    #: Makes the command that appends the event and applies its effects, from schema, data and the previous event's id.
    #: Without a schema, the command only applies the effects. None for an event without effects.
    with_effects: Callable[[str, bytes | Pieces, str], tuple[Any, ...]] | None
    #: The packed fields of its lifecycle entry; empty if it has none.
    lifecycle: bytes
    #: The command that settles its queue entry, if it settles one.
    settle: tuple[Any, ...] | None
    #: The error that it failed with, or None, once it has ended. Cancelled with the caller that waits for it.
    outcome: Future[Exception | None]
    #: The memory that it takes, in bytes.
    size: int
    #: Whether Redis may have it already, since a reply was lost.
    repeated: bool = False
    #: Whether Redis refused it for lack of memory.
    refused: bool = False
    #: Whether its queue entry is settled by a command of its own, after the batch.
    settles_late: bool = False
    ended: bool = False
    #: Whether it is a final with its signature in it.
    signed: bool = False
    #: When Redis acknowledged it, by the event loop's clock.
    kept_at: float = 0.0

    @property
    def moving(self) -> bool:
        """Of a waiting append: whether it waits until a cluster has moved its slot."""
        return self.with_effects is not None and not self.refused

    @property
    def large(self) -> bool:
        """Whether the event is too large to pass through a Lua script, which would copy it twice."""
        return self.with_effects is None and len(self.data) > _INLINE_BYTES


class DeferredCommand(NamedTuple):
    """A command that belongs to an appended event and waits until a cluster has moved its slot.

    Attributes:
        command: the command.
        item: the append that ends after the command, if there is one.
        error: the error that the append ends with, or None.
    """

    command: tuple[Any, ...]
    item: Append | None
    error: Exception | None


class Stream:
    """A writer's state of one stream."""

    __slots__ = (
        *("attempt", "base", "firehose", "given_up", "kept", "lost", "over", "patient", "record", "since"),
        *("stuck", "trace", "under_way"),
    )

    def __init__(self, trace: str, record: str, firehose: str) -> None:
        self.trace = trace
        #: The keys of the trace's record and of its stream of lifecycle events.
        self.record, self.firehose = record, firehose
        #: Id of the last acknowledged event before those in `kept`; "" if there is none.
        self.base = ""
        #: The acknowledged events that may have to be appended again.
        self.kept: deque[Append] = deque()
        #: Number of appends that have not ended.
        self.under_way = 0
        #: Appends that wait for memory or for a slot's move, in order; and since when they wait for memory.
        self.stuck: deque[Append] = deque()
        self.since = 0.0
        #: Whether appends wait for memory at all.
        self.patient = True
        #: The attempt that appends now, and the last attempt that is fenced.
        self.attempt = self.lost = 0
        #: Whether no more events come.
        self.over = False
        #: Whether waiting appends were given up, and `Writer.resume` was not called since.
        self.given_up = False


def sign_finals(batch: list[Append], signer: Signer | None, prefix: str) -> None:
    """Sign the finals of a batch that are not signed yet, if there is a signer: one signature covers several."""
    finals = [] if signer is None else [item for item in batch if item.final and not item.signed]
    if finals and signer is not None:
        made = signer.sign_finals(prefix, [(item.stream.trace, bytes(item.data)) for item in finals])
        for item, data in zip(finals, made, strict=True):
            item.data, item.signed = data, True


def append_commands(batch: list[Append], schema: str) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The commands that append a batch, and for each append the index of its command among them."""
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
            # In the same round trip, unless Redis may refuse an earlier event of the stream in this batch.
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
) -> Callable[[str, bytes | Pieces, str], tuple[Any, ...]]:
    """A function that makes the command for an event with effects: see `Append.with_effects`.

    `keep_s` is how long Redis keeps the trace after this event, in seconds, or `""` to leave its expiry alone.
    `version` is the version of the live parameters that the event reports. `lifecycle` are the fields of its lifecycle
    entry.
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

    def make(schema: str, data: bytes | Pieces, previous: str) -> tuple[Any, ...]:
        # The lifecycle entry is published with the event, and not again when only its effects are repeated.
        published = lifecycle if schema else ()
        command = script(names, id_, schema, data, keep_s, end, reported, attempt, trace, previous, *published)
        # With the script's text: a retry after NOSCRIPT would run behind later commands of the pipeline.
        return texted(command)

    return make


def texted(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The command of a script with the script's text in place of its digest."""
    found = with_text(command)
    assert found is not None
    return found


def is_moving(reply: object) -> TypeGuard[Exception]:
    """Whether a cluster's node replied that a slot is being moved."""
    from redis.exceptions import TryAgainError

    return isinstance(reply, TryAgainError)


def is_away(reply: object) -> bool:
    """Whether a server replied that it is not ready, for another reason than memory or a moving slot."""
    return isinstance(reply, Exception) and is_transient(reply) and not is_full(reply) and not is_moving(reply)


def is_fence(error: Exception) -> bool:
    """Whether Redis or a script refused an event since the stream has it or a later one."""
    text = str(error)
    return text.startswith(("FENCED ", "BEHIND ")) or any(
        one in text for one in ("equal or smaller than", "exhausted the last possible ID")
    )


def field_of(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """The value of a field of an entry, which Redis replies as names and values in turn; None if it is missing."""
    for index in range(0, len(fields), 2):
        if fields[index] == name:
            return fields[index + 1]
    return None
