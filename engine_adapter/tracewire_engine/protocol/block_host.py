"""Messages between a worker and the hosts of blocks: processes that each run the blocks of one trace, or of several.

A worker sends a host `Turn`s: what has happened to its traces since the last one, in order. If the worker waits, the
host answers with a `Reply`. Until then it may ask the worker to do something for a block (`Request`), and the worker
answers each with an `Answer`. Over a second socket the host reports the saves of each step (`Reported`), for which
nothing waits.

Tensors lie in memory that both share. A `Shape` says where, and a value that holds tensors is a *skeleton*: a nested
list of small numbers, names and indices of tensors (`link/shared_rows.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from tracewire_bus.wire.messages import Failure

from .known_edits import Edit
from .messages import FinishRecord, StepRecord

__all__ = [
    "LARGE_OF_HOST",
    "MOST_RECORDS",
    "MOST_REPORTED",
    "MOST_SAID",
    "SOURCE",
    "Answer",
    "Arrived",
    "Began",
    "Broken",
    "Chunk",
    "EditsFailed",
    "Ended",
    "Event",
    "Finished",
    "Generated",
    "HostSettings",
    "ModuleOutline",
    "Reached",
    "Ready",
    "Repeated",
    "Reply",
    "Report",
    "Reported",
    "Request",
    "Saved",
    "Shape",
    "Shared",
    "Steered",
    "Turn",
    "Wait",
]


#: The largest `Reply` or `Request`, in bytes: the model waits while a worker reads it.
MOST_SAID: Final = 1 << 20

#: The largest `Saved` or `Report`, in bytes: a step's saves. Large arrays come in pieces.
MOST_REPORTED: Final = 256 << 20

#: With what the server of hosts begins its answer if it could not start a host.
FAILED: Final = "failed: "

#: How many records a `Saved` or a `Reported` may have of each kind.
MOST_RECORDS: Final = 1 << 16

#: How many bytes of one host's large arrays may wait in the worker to be sent to the adapter.
LARGE_OF_HOST: Final = 4 << 30


class Shape(NamedTuple):
    """A tensor in shared memory: its dtype's name, its shape, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class Shared(msgspec.Struct, array_like=True):
    """A value whose tensors lie in shared memory."""

    skeleton: Any = None
    tensors: list[Shape] = []


class Arrived(msgspec.Struct, array_like=True):
    """A request that is new to the worker. `arguments` are those of its `extra_args` for blocks.

    `reserved` are the names under which its declared interventions save. `edits` are what its block writes, if the
    worker does that without the host.
    """

    id: str
    arguments: dict[str, Any]
    reserved: list[str] = []
    edits: list[Edit] = []


class Began(msgspec.Struct, array_like=True, tag="began"):
    """The model begins a step with requests of this host.

    `spans` has, for each request of the host in the step, its id, its number of tokens, and the index of the token
    that the step samples for it. They are in the order of the rows.
    """

    new: list[Arrived]
    spans: list[tuple[str, int, int]]


class Reached(msgspec.Struct, array_like=True, tag="reached"):
    """The model has reached a location: the rows of the host's requests there.

    `passed` are the locations that the model has passed in this step since the last event, as numbers of two bytes in
    the order of `Turn.names`. `by_request` says that each request has one row, as it has in logits and samples.
    """

    location: str
    value: Shared
    passed: bytes = b""
    by_request: bool = False


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """A step of the model has ended. The host reports it."""

    passed: bytes = b""


class Repeated(msgspec.Struct, array_like=True, tag="repeated"):
    """A whole step of the model that is like the last whole step of which the host was told.

    It stands for the same `Began` without new requests and with the next token of each request, the same `Reached`
    with the rows of the step's first value from byte `start` on and all others as far behind it as they were then,
    and the same `Ended`.
    """

    start: int


class Finished(msgspec.Struct, array_like=True, tag="finished"):
    """The scheduler has ended a request.

    `tokens` is how many tokens it has, if the scheduler knows it. `failure` is the error of its declared interventions,
    and `failed_at` the index of the token in whose step it occurred. If it `keeps` what it has saved, no block has
    changed an array after it was saved.
    """

    id: str
    tokens: int | None = None
    failure: Failure | None = None
    failed_at: int | None = None
    keeps: bool = False


class Steered(msgspec.Struct, array_like=True, tag="steered"):
    """Changes of live parameters (`encode_changes`), which take effect with the next step."""

    changes: bytes


class Generated(msgspec.Struct, array_like=True, tag="generated"):
    """The adapter's message about an ended request (`protocol.messages.Generated`), still encoded."""

    message: bytes


class EditsFailed(msgspec.Struct, array_like=True, tag="edits_failed"):
    """The worker could not do what the blocks of these requests write, so they must have failed, too."""

    requests: list[str]


Event: TypeAlias = Began | Reached | Ended | Repeated | Finished | Steered | Generated | EditsFailed


class Turn(msgspec.Struct, array_like=True):
    """Events, for one host.

    `names` are names of locations that the host has not been told before. `mark` counts the bytes that the worker has
    shared so far. A step whose rows take more memory than the worker and the host share has several turns. `turns` is
    how many turns were joined in this one. `large_allowed` is how many bytes of large arrays the host may have sent, in
    all, when the next turn comes. If `limited`, the blocks have no more time than if the worker waited.
    """

    events: list[Event]
    waits: bool = False
    names: list[str] = []
    mark: int = 0
    turns: int = 1
    large_allowed: int = LARGE_OF_HOST
    limited: bool = False


#: A host's account of the time that it took, in microseconds.
Used: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]


class Wait(NamedTuple):
    """A location that a block waits for, and how often the model passes it before it does what the block asks."""

    location: str
    after: Annotated[int, Meta(ge=0, le=1 << 32)]


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """A host's answer to a turn for which the worker waits.

    `waits` are the locations at which the model must wait for the host, and `observed` those of which the host wants
    the rows. `begins` says that the model must also wait when the next step begins. `edited` has the tensors that
    blocks have changed in place, by their index in the value that was reached, and `replaced` the new value if a block
    has assigned one. `used_us` is the processor time that the turn took, in microseconds; 0 if it says nothing of other
    steps, since a block was new.
    """

    waits: list[Wait] = []
    observed: list[str] = []
    begins: bool = False
    edited: list[tuple[int, Shape]] = []
    replaced: Shared | None = None
    used_us: Used = 0


#: The attribute by which a host asks for the operations inside a module's forward (`Request`).
SOURCE = "source"


class Request(msgspec.Struct, array_like=True, tag="request"):
    """A block's request to the worker: call a module on a value, or read an attribute of a module.

    `path` is the module's, such as `model.lm_head`. `attribute` is empty for a call, whose `value` is `(args, kwargs)`.
    With `SOURCE` the worker serves the operations inside the module from now on, and answers with their names, their
    lines, and the text of the module's forward.
    Without a path, `attribute` is the name of the file of a large variable, whose bytes are asked for.
    """

    path: str
    attribute: str = ""
    value: Shared | None = None


class Answer(msgspec.Struct, array_like=True):
    """The worker's answer to a `Request`: a value, or an error by the name of its builtin class and its message."""

    value: Shared | None = None
    error: tuple[str, str] | None = None


class Saved(msgspec.Struct, array_like=True):
    """What a host's blocks have saved in the steps of a turn. It goes to the save relay (`save_relay.py`).

    The records of a request that has large arrays are in `Reported`, behind the arrays.
    """

    steps: Annotated[list[StepRecord], Meta(max_length=MOST_RECORDS)]


class Reported(msgspec.Struct, array_like=True, tag="reported"):
    """A host's report to the worker: the ends of requests, and the new saves of those that have large arrays.

    It follows each turn of which there is something to report. What the turn's blocks have saved otherwise was sent
    before (`Saved`). `turns` says how many turns the host has taken, and `mark` is that of the last of them. If there
    is nothing else to report, and no reply has said so, the host says that after several turns, or soon after the last
    one. `used_us` is that of `Reply`, as a mean of the steps since the last such report.
    """

    steps: Annotated[list[StepRecord], Meta(max_length=MOST_RECORDS)] = []
    finishes: Annotated[list[FinishRecord], Meta(max_length=MOST_RECORDS)] = []
    turns: int = 0
    mark: int = 0
    used_us: Used = 0


class Chunk(msgspec.Struct, array_like=True, tag="chunk"):
    """A piece of a large array, as in `BlobChunk`. Behind the last one comes the report that refers to the array."""

    request: str
    blob: str
    number: int
    data: bytes


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A host is confined, and waits for turns. `missing` is what this machine's kernel could not do of that."""

    missing: list[str] = []


class Broken(msgspec.Struct, array_like=True, tag="broken"):
    """A host ends because of an error that is no block's."""

    message: str


Report: TypeAlias = Reported | Chunk | Ready | Broken


class ModuleOutline(msgspec.Struct, array_like=True):
    """A module of the model as a host sees it: its path below the root, the name of its class, and its kind.

    `kind` is `"list"` or `""` for any other module. `extra` is what its `repr` shows. A module that the model has at an
    earlier path too is the one at that path, `same`.
    """

    path: str
    name: str
    kind: str = ""
    extra: str = ""
    same: str | None = None


class HostSettings(msgspec.Struct):
    """What a host knows of its engine. The server of hosts is given it once.

    `block_timeout` is how long a block may take in a step, in seconds (0: any time), and `step_timeout` how long in a
    turn for which the model waits. `layers` and `sums` are those of `TracedModel`.
    `readable` are the folders that a host may read, and `imports` the modules that limited blocks may import.
    """

    modules: list[ModuleOutline]
    layers: str = ""
    sums: bool = True
    taps: list[str] = []
    encoders: list[str] = []
    vocabulary: int = 0
    threads: int = 1
    block_timeout: float = 10.0
    step_timeout: float = 4.0
    blob_threshold: int = 0
    memory: int = 4 << 30
    readable: list[str] = []
    imports: list[str] = []
