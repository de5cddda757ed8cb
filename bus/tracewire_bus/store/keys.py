"""Names of everything that the bus keeps in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

__all__ = ["TAGS", "Keys"]

#: How many hash tags traces share, and so on how many slots of a cluster they lie.
TAGS = 64


@dataclass(frozen=True)
class Keys:
    """The key names under one prefix.

    All keys of a trace share one hash tag, and so do all of a model's queue: scripts over either work on Redis Cluster.
    """

    prefix: str = "tw"

    def __post_init__(self) -> None:
        if "{" in self.prefix or "}" in self.prefix:
            raise ValueError(f"a prefix has no braces, which mark the slots of a cluster; got {self.prefix!r}")

    def queue(self, model: str, part: str) -> str:
        """One of the keys of a model's queue:

        - `entries`, hash: of each entry, by its trace, all but its data; `data`, hash: its data.
        - `taken`, hash: who holds it, of each entry that is taken or withdrawn with its lease.
        - `turns`, sorted set: the clients with waiting entries, by when their turn is.
        - `client:<client>`, sorted set: a client's waiting entries, by priority.
        - `leases`, set: the leases of waiting entries; `lease:<lease>`, set: the waiting entries of one.
        - `state`, hash: counters, and how fast entries are taken.
        - `bell`, list: what engines without work block on.
        - `suspects`, sorted set: waiting entries with one try left, in the order they came.
        - `holders`, set: the engines that have taken entries.
        - `engine:<engine>`, string: whose takes count as this engine's.
        - `caretaker:<role>`, string: who of many looks at all that is taken, for now.
        """
        return f"{self.prefix}:{{{model}}}:queue:{part}"

    def submitted(self, model: str, trace: str) -> str:
        """Says that a trace was submitted, beside its queue."""
        return f"{self.prefix}:{{{model}}}:submitted:{trace}"

    def edits(self, model: str, part: str) -> str:
        """One of the keys of a model's standing interventions:

        - `entries`, hash: each encoded, by name; `about`, hash: place, version and time of each; `disabled`, hash: why,
          of those that are.
        - `state`, hash: counters; `changes`, stream: an entry for each change of them.
        """
        return f"{self.prefix}:{{{model}}}:edits:{part}"

    def edit_saves(self, model: str, edit: str) -> str:
        """Stream of what one edit left on requests that are no traces: see `edits.py`."""
        return f"{self.prefix}:{{{model}}}:edit-saves:{edit}"

    def edit_sizes(self, model: str) -> str:
        """Hash of how many bytes each of these streams holds."""
        return f"{self.prefix}:{{{model}}}:edit-sizes"

    def tag(self, trace: str) -> str:
        """The hash tag of a trace."""
        return f"t{crc32(trace.encode('utf-8', 'surrogatepass')) % TAGS}"

    @property
    def tags(self) -> list[str]:
        """All hash tags of traces."""
        return [f"t{number}" for number in range(TAGS)]

    def events(self, trace: str) -> str:
        """Stream of a trace's events."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:events:{trace}"

    def record(self, trace: str) -> str:
        """Hash of what the bus knows of a trace from its submission on: see `trace_records.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:trace:{trace}"

    def snapshot(self, trace: str) -> str:
        """Hash of the last snapshot of a trace's folded state: see `snapshots.py`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:snapshot:{trace}"

    def changes(self, trace: str) -> str:
        """Changes of a trace's live parameters that no event tells of yet, by version."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:changes:{trace}"

    def operations(self, trace: str) -> str:
        """The last changes of a trace's live parameters by the id that their controller gave each."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:operations:{trace}"

    def deadlines(self, tag: str) -> str:
        """Traces of one hash tag by their deadline, in milliseconds since the epoch."""
        return f"{self.prefix}:{{{tag}}}:deadlines"

    def control(self, tag: str, engine: str) -> str:
        """Stream of what an engine is to do for its traces of one hash tag."""
        return f"{self.prefix}:{{{tag}}}:control:{engine}"

    def blobs(self, trace: str) -> str:
        """Hash of a trace's blobs: every chunk of each, under `<blob>:<number>`."""
        return f"{self.prefix}:{{{self.tag(trace)}}}:blobs:{trace}"

    def firehose(self, tag: str) -> str:
        """Stream of what becomes of the traces of one hash tag: see `lifecycle.py`."""
        return f"{self.prefix}:{{{tag}}}:firehose"

    def ended(self, tag: str) -> str:
        """Finished traces of one hash tag by when their time is over: see `finished.py`."""
        return f"{self.prefix}:{{{tag}}}:ended"

    def ended_bytes(self, tag: str) -> str:
        """Hash of what each finished trace of one hash tag takes, in bytes, and under `""` of what all take."""
        return f"{self.prefix}:{{{tag}}}:ended-bytes"

    def ended_turn(self) -> str:
        """There while somebody has just looked after finished traces."""
        return f"{self.prefix}:{{{self.tags[0]}}}:ended-turn"

    def watch_groups(self) -> str:
        """Hash of the groups that readers of the firehose share entries in, by name: when each was made."""
        return f"{self.prefix}:watch-groups"

    def lease(self, lease: str) -> str:
        """There as long as a client lives."""
        return f"{self.prefix}:lease:{lease}"

    def engines(self) -> str:
        """Set of the ids of engines that have registered; some may be gone."""
        return f"{self.prefix}:engines"

    def engine(self, engine: str) -> str:
        """What one engine serves, as long as it lives."""
        return f"{self.prefix}:engine:{engine}"

    def heartbeat(self, engine: str) -> str:
        """What one engine serves, but for its model's tree, as of its last heartbeat."""
        return f"{self.prefix}:engine:{engine}:now"

    def dead(self) -> str:
        """Stream of queue entries that could not be answered."""
        return f"{self.prefix}:dead"

    def dead_mark(self, model: str, trace: str) -> str:
        """Says that a trace's entry has become a dead letter. In the slot of the letters."""
        return f"{{{self.dead()}}}:{model}:{trace}"
