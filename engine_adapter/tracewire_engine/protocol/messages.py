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
    "Report",
    "SharedValues",
    "Slot",
    "StepRecord",
]


class Place(NamedTuple):
    """Where bytes lie: from `start` on, `size` of them. With them, `end` bytes have been put in since the beginning."""

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
    """The end of one choice of one request: what was saved since its last step, and what it holds in all.

    `deltas` is an encoded `list[Delta]` that brings a fold of all step records to what nnsight collects. `request` is
    unknown to the adapter when it was no trace. An entry of `manifest` without a digest is a list of arrays that holds
    what was sent, compared byte for byte: the adapter knows the digest.
    """

    request: str
    choice: int
    deltas: msgspec.Raw
    manifest: list[Manifest] = []
    save_errors: dict[str, str] = {}
    error: Failure | None = None
    stopped: bool = False
    #: How many step records there are of this choice: those with large arrays come by another way than the rest.
    steps: int = 0
    #: The errors that standing interventions raised on the request, by the edit's name.
    edit_errors: dict[str, Failure] = {}
    #: How many tokens it covers: what later steps saved is not in it. -1: all steps.
    tokens: int = -1
    #: Likely mistakes in the block.
    warnings: list[str] = []


class SharedValues(msgspec.Struct, array_like=True):
    """The values that all requests of a trace share, on their way to the workers with each request.

    `name` is that of the request as which it is reported. `members` has the names of all the trace's requests, with the
    number of their choices; `values` the packed first values by name.
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
    """The output of a request, on its way to its block. Without choices there is no output for the block.

    `tokens` has the number of tokens of each choice. Saves of later steps do not count.
    """

    request: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[GeneratedChoice] = []
    tokens: list[int] = []


class Placed(msgspec.Struct, array_like=True):
    """A declared intervention on its way to the workers, with its locations in the model.

    Each site is a location (`"model.model.layers.3.output"`) and whether the residual stream is meant. `pattern` says
    that the caller's words could name several.
    """

    intervention: Declared
    sites: list[tuple[str, bool]] = []
    pattern: bool = False


class EditBlock(msgspec.Struct, array_like=True):
    """The block of a standing intervention on its way to the workers. `fatal`: if it raises, the request ends."""

    name: str
    block: msgspec.Raw
    fatal: bool = False


class Part(msgspec.Struct, array_like=True):
    """Where one array of one item lies in a batch's bytes. `key` is its key in the item, `""` if it is the item."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Slot(msgspec.Struct, array_like=True):
    """The item that one saved name gains in a step."""

    name: str
    parts: list[Part]


class LayoutEntry(msgspec.Struct, array_like=True):
    """The saves of declared interventions for one choice. `index` is that of the token of the layout's first step.

    In the step after it the index is one more, and so on.
    """

    request: str
    choice: int
    index: int
    slots: list[Slot]


class Layout(msgspec.Struct, array_like=True):
    """Whose the bytes of a batch are, for as long as the composition of the steps stays the same."""

    id: int
    entries: list[LayoutEntry]


class Batch(msgspec.Struct, array_like=True):
    """The reads of declared interventions in one step, for all requests: bytes by the layout `layout`, its `step`-th.

    They are in `data`, or in the ring buffer at `place`, from which the link's receiver takes them.
    """

    layout: int
    step: int
    data: memoryview = memoryview(b"")
    place: Place | None = None


class Applied(msgspec.Struct, array_like=True):
    """Live parameters of a run are at this version from the step on that is about to run.

    `first` has, for each of its choices in the workers, the request, the choice and the index of the next token that it
    samples, which is the first with these values. `steps` counts the steps begun since the adapter
    read the change, this one included.
    """

    run: str
    version: int
    first: list[tuple[str, int, int]] = []
    steps: int = 1


#: By run, a version of its live parameters, and the packed values that changed.
Changes: TypeAlias = dict[str, tuple[int, dict[str, msgspec.Raw]]]


class Report(msgspec.Struct, array_like=True):
    """All records of one step. `time` is when it ended, in seconds since the epoch by the worker's clock."""

    time: float = 0.0
    steps: list[StepRecord] = []
    finishes: list[FinishRecord] = []
    #: Sent before the first batch that it describes.
    layout: Layout | None = None
    batch: Batch | None = None
    #: Of what this step's records, and those of all later ones, were made with.
    applied: list[Applied] = []
    #: Where the worker's ring buffer is to be opened, said once.
    ring: str = ""
