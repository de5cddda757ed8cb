"""Messages between the processes of an engine."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from tracewire_bus.wire.messages import Declared, Failure, Manifest

__all__ = [
    "Applied",
    "Batch",
    "Changes",
    "EditBlock",
    "FinishRecord",
    "Generated",
    "GeneratedChoice",
    "Layout",
    "LayoutEntry",
    "Part",
    "Place",
    "Placed",
    "Read",
    "Report",
    "SharedValues",
    "StepRecord",
]


class Place(NamedTuple):
    """The place of bytes in the ring buffer: `size` bytes from `start` on.

    `end` counts all bytes that were put into the buffer from the beginning, these included.
    """

    start: int
    size: int
    end: int


class StepRecord(msgspec.Struct, array_like=True):
    """The new saves of one choice of one request, in the step that sampled its token `index`.

    `deltas` is an encoded `list[Delta]`. `ended` says that the block ended in this step before its request did:
    `"stop"` for `tracer.stop()`, `"error"` for an exception, whose details follow in the finish record.
    """

    request: str
    choice: int
    index: int
    deltas: msgspec.Raw
    ended: str = ""


class FinishRecord(msgspec.Struct, array_like=True):
    """The end of one choice of one request: the saves since its last step record, and a manifest of all saves.

    `deltas` is an encoded `list[Delta]`. Applied to a fold of all step records, it gives the values that nnsight
    collects. The adapter does not know `request` if it was no trace's. An entry of `manifest` without a digest is a
    list of arrays that equals, byte for byte, the one that was sent; the adapter knows its digest.
    """

    request: str
    choice: int
    deltas: msgspec.Raw
    manifest: list[Manifest] = []
    save_errors: dict[str, str] = {}
    error: Failure | None = None
    stopped: bool = False
    #: How many step records of this choice there are. Those with large arrays travel over another socket.
    steps: int = 0
    #: The errors that standing interventions raised on the request, by the edit's name.
    edit_errors: dict[str, Failure] = {}
    #: How many tokens of the choice count; saves of later steps are not part of it. -1 if all steps count.
    tokens: int = -1
    #: Likely mistakes in the block.
    warnings: list[str] = []
    #: Whether the error may be another trace's doing, with whose blocks this one's shared a process.
    restart: bool = False
    #: Whether a block's host reports this, so that blocks can forge it.
    hosted: bool = False


class SharedValues(msgspec.Struct, array_like=True):
    """The values that all requests of a trace share. Each request brings them to the workers.

    The workers report them like the saves of a request called `name`. `members` has the ids of all requests of the
    trace, with the number of choices of each. `values` has the packed initial values by name.
    """

    name: str
    members: dict[str, int]
    values: bytes


class GeneratedChoice(msgspec.Struct, array_like=True):
    """The whole output of one choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, tuple[float, int | None, str | None]]] | None = None


class Generated(msgspec.Struct, array_like=True):
    """The adapter's message to the workers about an ended request. `choices` is empty if its block needs no output.

    `tokens` has the number of tokens of each choice. Saves of later steps do not count.
    """

    request: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[GeneratedChoice] = []
    tokens: list[int] = []


class Placed(msgspec.Struct, array_like=True):
    """A declared intervention for the workers, with its locations in the model.

    Each site is a location (`"model.model.layers.3.output"`) and whether the residual stream there is meant. `pattern`
    says that the caller gave a pattern, which can match several locations. `heads` is how many attention heads the
    sites have, and their size, if they are of heads.

    `kept` names the values that a `Patch` takes of another prompt of its trace: the name of the run, and the patch's
    place. If the request `gives` them, the patch changes nothing, and its positions are those of the values.
    """

    intervention: Declared
    sites: list[tuple[str, bool]] = []
    pattern: bool = False
    heads: tuple[int, int] = (0, 0)
    kept: tuple[str, int] | None = None
    gives: bool = False


class EditBlock(msgspec.Struct, array_like=True):
    """The block of a standing intervention for the workers. If `fatal`, an exception of it ends the request.

    `permit` is the adapter's permit for the block (`permits.py`).
    """

    name: str
    block: msgspec.Raw
    fatal: bool = False
    permit: bytes = b""


class Part(msgspec.Struct, array_like=True):
    """One array of the items of a read, by its key in them; `""` if it is the whole item.

    `shape` and `size` are those of one row, `offset` is where the first row of all choices begins in a batch's bytes,
    and `stride` is how far it is from row to row. Sizes are in bytes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    offset: int
    stride: int


class Read(msgspec.Struct, array_like=True):
    """Appends an item to a saved name in each step, for each of several choices.

    If the read is `flat`, an item has one row. Else an item has a dimension of rows, which follow each other.
    """

    name: str
    parts: list[Part]
    flat: bool = True


class LayoutEntry(msgspec.Struct, array_like=True):
    """The reads of declared interventions for one choice.

    `index` and the number of a step add up to the index of the token that the step samples. `rows` has, for each set of
    reads that the choice takes part in, the set's place in the layout, the first row and how many rows.
    """

    request: str
    choice: int
    index: int
    rows: list[tuple[int, int, int]]


class Layout(msgspec.Struct, array_like=True):
    """Assigns the bytes of batches to choices and names, as long as consecutive steps have the same requests.

    The reads of a set have the same rows of the same choices.
    """

    id: int
    sets: list[list[Read]]
    entries: list[LayoutEntry]


class Batch(msgspec.Struct, array_like=True):
    """The reads of declared interventions in one step, for all requests, as bytes.

    `layout` is the id of the layout that describes the bytes, and `step` is the step's number. The bytes are in `data`,
    or in the ring buffer at `place`, from which the link's receiver copies them to `data`.
    """

    layout: int
    step: int
    data: memoryview = memoryview(b"")
    place: Place | None = None


class Applied(msgspec.Struct, array_like=True):
    """Reports that the next step is the first with version `version` of a run's live parameters.

    `first` has, for each choice of the run in the workers, the request, the choice and the index of the first token
    that is sampled with these values. `steps` counts the steps that have begun since the adapter read the change, this
    one included.
    """

    run: str
    version: int
    first: list[tuple[str, int, int]] = []
    steps: int = 1


#: By the name of a run: the new version of its live parameters, and the packed values that changed.
Changes: TypeAlias = dict[str, tuple[int, dict[str, msgspec.Raw]]]


class Report(msgspec.Struct, array_like=True):
    """All records of one step. `time` is when the step ended, in seconds since the epoch by the worker's clock."""

    time: float = 0.0
    steps: list[StepRecord] = []
    finishes: list[FinishRecord] = []
    #: A new layout, sent with the first batch that it describes.
    layout: Layout | None = None
    batch: Batch | None = None
    #: The changes of live parameters with which this step and all later ones were computed.
    applied: list[Applied] = []
    #: The path of the worker's ring buffer, sent once.
    ring: str = ""
