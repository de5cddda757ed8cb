"""Names of all keys that the bus keeps in Redis."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

import msgspec

__all__ = ["TAGS", "Keys"]

#: Number of hash tags of traces. On a cluster each tag is one slot, so traces are spread over this many slots.
TAGS = 64


@lru_cache(maxsize=4096)
def _tag(trace: str) -> str:
    return f"t{crc32(trace.encode('utf-8', 'surrogatepass')) % TAGS}"


class Keys(msgspec.Struct, frozen=True):
    """The key names under one prefix.

    All keys of a trace share one hash tag, and all keys of a model's queue share another. A script on Redis Cluster may
    use keys of one hash tag only.

    Raises:
        ValueError: `prefix` has braces.
    """

    prefix: str = "tw"

    def __post_init__(self) -> None:
        if "{" in self.prefix or "}" in self.prefix:
            raise ValueError(
                f"a prefix must not have braces: on a cluster, braces mark the slot of a key; got {self.prefix!r}"
            )

    def queue(self, model: str, part: str) -> str:
        """A key of a model's queue. `part` is one of:

        - `entries`: hash from trace id to the queue entry without its data. `data`: hash from trace id to its data.
        - `taken`: hash from trace id to the holder of the entry: an engine, or a mark for entries that were withdrawn
          with their lease or given up.
        - `turns`: sorted set of the clients with waiting entries, in the order of their turns.
        - `client:<client>`: sorted set of a client's waiting entries, by priority.
        - `leases`: set of the leases of waiting entries. `lease:<lease>`: set of the waiting entries of one lease.
        - `state`: hash of counters, of the rate at which engines take entries, and of the engines' limits on the queue.
        - `bell`: list that engines without work block on.
        - `suspects`: sorted set of the waiting entries with one attempt left, in the order of submission.
        - `holders`: set of the engines that have taken entries.
        - `engine:<engine>`: string, the token under which this engine takes entries. Redis ignores takes with another.
        - `caretaker:<role>`: string, the process that has this role at present (`Queue.acquire_role`).
        """
        return f"{self.prefix}:{{{model}}}:queue:{part}"

    def submitted(self, model: str, trace: str) -> str:
        """Mark of a trace that was submitted to this model, in the slot of the model's queue."""
        return f"{self.prefix}:{{{model}}}:submitted:{trace}"

    def edits(self, model: str, part: str) -> str:
        """A key of a model's standing interventions. `part` is one of:

        - `entries`: hash from an edit's name to the encoded edit.
        - `about`: hash from an edit's name to its place, version, time and schema.
        - `disabled`: hash from the name of a disabled edit to the reason.
        - `removed`: hash from the name of a removed edit to its version and the signature of the removal.
        - `state`: hash of counters.
        - `changes`: stream with an entry for each change.
        """
        return f"{self.prefix}:{{{model}}}:edits:{part}"

    def edit_saves(self, model: str, edit: str) -> str:
        """Stream of the saves of one edit on requests that are not traces: see `edits.py`."""
        return f"{self.prefix}:{{{model}}}:edit-saves:{edit}"

    def edit_sizes(self, model: str) -> str:
        """Hash from an edit's name to the size of its stream of saves, in bytes."""
        return f"{self.prefix}:{{{model}}}:edit-sizes"

    def tag(self, trace: str) -> str:
        """The hash tag of a trace."""
        return _tag(trace)

    @property
    def tags(self) -> list[str]:
        """All hash tags of traces."""
        return [f"t{number}" for number in range(TAGS)]

    def events(self, trace: str) -> str:
        """Stream of a trace's events."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:events:{trace}"

    def record(self, trace: str) -> str:
        """Hash with a trace's record: see `trace_records.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:trace:{trace}"

    def snapshot(self, trace: str) -> str:
        """Hash of the last snapshot of a trace's folded state: see `snapshots.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:snapshot:{trace}"

    def changes(self, trace: str) -> str:
        """Hash of the changes of a trace's live parameters that no event has reported yet, by version."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:changes:{trace}"

    def operations(self, trace: str) -> str:
        """The latest operations on a trace (steering, pausing, cancelling), by the id that the caller gave each."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:operations:{trace}"

    def nonce(self, trace: str, key: str, nonce: bytes) -> str:
        """String with the attempt that has taken a signed submission, and its word: see `adapter/nonces.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:nonce:{key}:{nonce.hex()}"

    def guarded(self, trace: str) -> str:
        """Hash of what guards have decided about a trace: see `guard_marks.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:guarded:{trace}"

    @property
    def audit(self) -> str:
        """Stream of the audit trail: see `audit.py`."""
        return f"{self.prefix}:audit"

    def audit_code(self, hash: str) -> str:
        """String with the source of the code of a hash, which the audit trail names."""
        return f"{self.prefix}:audit-code:{hash}"

    def deadlines(self, tag: str) -> str:
        """Sorted set of the traces of one hash tag, by deadline in milliseconds since the epoch."""
        return f"{self.prefix}:{{{tag}}}:deadlines"

    def control(self, tag: str, engine: str) -> str:
        """Stream of the orders to an engine for its traces of one hash tag: see `control.py`."""
        return f"{self.prefix}:{{{tag}}}:control:{engine}"

    def operate(self, engine: str) -> str:
        """Stream of the orders to an engine as a whole, in the slot of the first hash tag: see `control.py`."""
        return f"{self.prefix}:{{{self.tags[0]}}}:operate:{engine}"

    def blobs(self, trace: str) -> str:
        """Hash of the chunks of a trace's blobs. The field of a chunk is `<blob>:<number>`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:blobs:{trace}"

    def vector(self, name: str) -> str:
        """Hash of the chunks of an array that declared interventions of many traces refer to: see `vectors.py`."""
        return f"{self.prefix}:vector:{name}"

    def library(self, part: str, space: str) -> str:
        """A key of a space of the library: a tenant's, or the shared one (`""`). `part` is one of:

        - `last`: hash from a name to the last version that it was given. `newest`: to the newest that is there.
        - `entries`: hash from `NAME@VERSION` to the encoded entry.
        - `about`: hash from `NAME@VERSION` to its time, its upload, its form, and its removal: see `library.py`.
        """
        return f"{self.prefix}:{{library}}:library:{part}:{space}:"

    def library_arrays(self, space: str, upload: str) -> str:
        """Hash of the chunks of the arrays of one version in the library, by `<array>:<number>`."""
        return f"{self.library('arrays', space)}{upload}"

    def bulk_store(self, store: str) -> str:
        """Hash that says where a bulk store is: see `bulk/stores.py`."""
        return f"{self.prefix}:bulk-store:{store}"

    def firehose(self, tag: str) -> str:
        """Stream of the lifecycle events of all traces of one hash tag: see `lifecycle.py`."""
        return f"{self.prefix}:{{{tag}}}:firehose"

    def ended(self, tag: str) -> str:
        """Sorted set of the finished traces of one hash tag, by the time at which they expire: see `finished.py`."""
        return f"{self.prefix}:{{{tag}}}:ended"

    def ended_bytes(self, tag: str) -> str:
        """Hash from a finished trace of one hash tag to its size in bytes; the field `""` has the sum."""
        return f"{self.prefix}:{{{tag}}}:ended-bytes"

    def ended_turn(self) -> str:
        """Exists for a while after an adapter has checked the bounds of finished traces (`Finished.acquire_turn`)."""
        return f"{self.prefix}:{{{self.tags[0]}}}:ended-turn"

    def watch_groups(self) -> str:
        """Hash from the name of each group of readers of lifecycle events to the token of the reader that made it."""
        return f"{self.prefix}:watch-groups"

    def lease(self, lease: str) -> str:
        """Exists as long as the client of this lease renews it."""
        return f"{self.prefix}:lease:{lease}"

    def engines(self) -> str:
        """Set of the ids of registered engines. It may have engines that no longer run."""
        return f"{self.prefix}:engines"

    def engine(self, engine: str) -> str:
        """The encoded `EngineInfo` of an engine; expires unless the engine renews it."""
        return f"{self.prefix}:engine:{engine}"

    def heartbeat(self, engine: str) -> str:
        """The encoded `EngineInfo` of an engine's last heartbeat, without the module tree of its model."""
        return f"{self.prefix}:engine:{engine}:now"

    def dead(self) -> str:
        """Stream of the dead letters: see `dead_letters.py`."""
        return f"{self.prefix}:dead"

    def dead_mark(self, model: str, trace: str) -> str:
        """Mark of a trace whose queue entry has become a dead letter, in the slot of the stream of dead letters."""
        return f"{{{self.dead()}}}:{model}:{trace}"
