"""Every message of the bus, on one page.

A message is a msgspec struct in msgpack. Two things stand beside it as plain fields of the stream entry, so that an
entry which cannot be decoded can still be answered: the trace id and the schema version (`SCHEMA`). Unknown fields are
ignored and unknown kinds are skipped by readers, so that two versions can share a bus; a newer *major* version is
refused.

Most messages are maps by field name. What travels with every token (events, and the deltas in them) is an array
instead: its tag, then its fields in the order below. A field that is added there goes to the end, where older readers
ignore it; none is ever moved or removed, and nothing is added to a base of several.

Values (variables of a block, saved values) are not structs but trees: see [`tracewire_bus.wire.packing`][]. Wherever a
field below is typed `bytes` and said to be *packed*, it holds such a tree as
`pack` made it. Nothing here is ever unpickled.

Invokes, choices and token indices count from 0. Times are seconds since the epoch unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from .ids import FINAL_ID

__all__ = [
    "MAX_MEDIA_BYTES",
    "NO_MEDIA",
    "SCHEMA",
    "SHARED_INVOKE",
    "Ablate",
    "Accepted",
    "Append",
    "Block",
    "Change",
    "Clamp",
    "Declared",
    "DeclaredIntervention",
    "DecodedOutput",
    "DecodedShared",
    "Delete",
    "Delta",
    "Edit",
    "EditRecord",
    "EngineInfo",
    "Event",
    "Failure",
    "Final",
    "FinishReason",
    "FirstToken",
    "HeldChoice",
    "Helper",
    "Invoke",
    "Live",
    "LogitLens",
    "Manifest",
    "Message",
    "ModuleInfo",
    "Notice",
    "OutputBase",
    "PathKey",
    "Paused",
    "Positions",
    "Probe",
    "RawOutput",
    "RawShared",
    "Restarted",
    "Resumed",
    "SaveDelta",
    "Set",
    "Snapshot",
    "Status",
    "Steer",
    "Steered",
    "StopWhen",
    "Submission",
    "Usage",
    "Versions",
    "Waiting",
]

#: The schema this package writes, `(major, minor)`. On an entry it stands as `"major.minor"`.
SCHEMA: tuple[int, int] = (1, 2)

PathKey: TypeAlias = Any
"""One step of a path into a saved value: a list's index, or a dict's key (str, int, float, bool, bytes or None)."""

FinishReason: TypeAlias = str
"""vLLM's own word for why a choice ended: `stop`, `length`, `abort`, ..."""

Status: TypeAlias = Literal["finished", "stopped", "cancelled", "expired", "rejected", "failed"]
"""How a trace ended. `rejected`: never ran. `failed`: its block raised, or its engine could not go on."""


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all structs on the wire."""


# --- submission -------------------------------------------------------------------------------------------------------


class Helper(Message):
    """A function that a block calls, as source.

    `source` is dedented and starts at the `def` (decorators are not carried); `first_line` is that line's number in
    `filename`, for tracebacks. `names` maps each free name of the helper to where its value stands: see
    `Block`.
    """

    name: str
    source: str
    filename: str = "<unknown>"
    first_line: int = 1


class Block(Message):
    """A block of nnsight code as source text, and what it uses.

    `source` is the function's *body*, dedented, without the `def` line; line 1 of it is line `first_line` of
    `filename`. The engine runs it with three names bound, as the function's first three parameters were called
    (`parameters`, usually `("model", "tracer", "live")`), plus everything in `variables`, `helpers` and `modules`.

    `variables` is the packed dict of plain values by name. `modules` maps a name to an importable module path
    (`{"np": "numpy"}`); `imports` maps a name to `(module, attribute)`, for `from torch import Tensor`. `paths` maps a
    name to the path of one of the model's modules (`""`: the model itself), `shared` to the name of one of the trace's
    shared values. Helpers see the same names as the block, and each other.
    """

    name: str
    source: str
    filename: str = "<unknown>"
    first_line: int = 1
    parameters: tuple[str, str, str] = ("model", "tracer", "live")
    variables: bytes = b"\x80"
    helpers: list[Helper] = []
    modules: dict[str, str] = {}
    imports: dict[str, tuple[str, str]] = {}
    paths: dict[str, str] = {}
    shared: dict[str, str] = {}


# --- declared interventions -------------------------------------------------------------------------------------------


class Live(Message):
    """Stands for the value of one of the trace's live parameters: `Live("alpha")` in place of a number or an array."""

    live: str


Positions: TypeAlias = Literal["last", "all", "prompt", "generated"]
"""Which positions of a sequence: `prompt` those of the prompt, `generated` those of sampled tokens, `all` both.

`last` is, for a value that is read, the one position of each step that the next token is sampled at; for one that is
edited, the prompt's last position and every generated one.
"""


class DeclaredIntervention(Message, tag_field="do"):
    """Base of the declared interventions.

    What most blocks do, said without code: an engine runs it for all requests of a step at once, and can take it from
    clients whose code it would not run. They apply in the order given; where they and a block touch one location, the
    block is served after them.

    `at` says where:

    - `residual(3)`: the residual stream after decoder layer 3. `residual(-1)`, `residual(*)` and `residual(2:6)` count
      as Python does.
    - `model.layers.3.mlp`: the output of a module, or its first tensor if it returns several; `.output` may be added,
      and `.input` is its first input. A `*` stands for any one step of the path.
    """

    def __repr__(self) -> str:
        shown = ((field, getattr(self, field.name)) for field in msgspec.structs.fields(self))
        parts = [f"{field.name}={_brief(value)}" for field, value in shown if value is not field.default]
        return f"{type(self).__name__}({', '.join(parts)})"


def _brief(value: Any) -> str:
    """A field's value: an array, or a list of numbers, by what it is and not by what it holds."""
    shape = getattr(value, "shape", None)
    if shape:
        return f"<{str(value.dtype).removeprefix('torch.')} {list(shape)}>"
    if isinstance(value, msgspec.msgpack.Ext):
        return f"<array of {memoryview(value.data).nbytes} bytes>"
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"<{type(value).__name__} of {len(value)}>"
    return repr(value)


class Probe(DeclaredIntervention, tag="probe"):
    """Reads the values at a location, reduces them, and saves one item a step in the list `name`.

    Without anything else, the value itself in the model's dtype: `[hidden]`. `weight` of shape `[hidden]` projects it
    to a number; `[outputs, hidden]` to `[outputs]` numbers; `bias` (a number, or `[outputs]`) is added, and
    `activation` applied. `reduce="norm"` gives its Euclidean norm instead; `reduce="mean"` the mean over the step's
    positions. What is computed is float32; a single number is saved as a float.

    With positions other than `last` an item has one row per position of the step, `[positions, ...]`, and a step
    without such positions saves none. Where `at` has a `*` or a slice, the locations are a dimension of their own,
    before the features: `[locations, ...]`.
    """

    name: str
    at: str
    weight: Any = None
    bias: Any = None
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    reduce: Literal["none", "mean", "norm"] = "none"
    positions: Positions = "last"


class LogitLens(DeclaredIntervention, tag="logit_lens"):
    """Reads the residual stream through the model's final norm and head, and saves the `top_k` likeliest tokens.

    Each item of the list `name` is a dict of `token_ids`, int32 `[top_k]`, and `logits`, float32 `[top_k]`, best first;
    with the dimensions of positions and locations of `Probe`. A trace that asks for token strings has them in it, too,
    as `token_strings`: nested lists of the shape of `token_ids`.
    """

    name: str
    at: str
    top_k: int = 5
    positions: Positions = "last"


class Steer(DeclaredIntervention, tag="steer"):
    """Adds `scale * vector` to the values at a location. `vector` has shape `[hidden]`; computed in float32."""

    at: str
    vector: Any
    scale: float | Live = 1.0
    positions: Positions = "all"


class Clamp(DeclaredIntervention, tag="clamp"):
    """Keeps the component along `direction` (`[hidden]`, of any length) between `min` and `max`."""

    at: str
    direction: Any
    min: float | Live | None = None
    max: float | Live | None = None
    positions: Positions = "all"


class Ablate(DeclaredIntervention, tag="ablate"):
    """Scales the component in the span of `direction` (`[hidden]` or `[directions, hidden]`) by `keep`.

    0 projects it out, 2 doubles it. Without a direction, the whole value is scaled: 0 turns a module's output off.
    """

    at: str
    direction: Any = None
    keep: float | Live = 0.0
    positions: Positions = "all"


class StopWhen(DeclaredIntervention, tag="stop_when"):
    """Ends a choice at the token in whose step the probe `probe` is over `above` or under `below`.

    The probe must save a single number a step, or several of which `output` says which. `steps` such steps in a row are
    needed. The trace ends as `stopped`; tokens sampled after that one are not part of it.
    """

    probe: str
    above: float | Live | None = None
    below: float | Live | None = None
    output: int = 0
    steps: int = 1


Declared: TypeAlias = Probe | LogitLens | Steer | Clamp | Ablate | StopWhen


# --- submission, continued --------------------------------------------------------------------------------------------


#: An invoke's `media` where it has none, and how many bytes its arrays may have in all.
NO_MEDIA: bytes = b"\x80"
MAX_MEDIA_BYTES: int = 256 * 1024 * 1024


class Invoke(Message):
    """One prompt of a trace: text, token ids or chat messages (exactly one of the three), and its sampling params.

    `sampling` holds fields of vLLM's `SamplingParams` by name, plain values only. `edits`, where given, counts in place
    of the submission's. `block` is its own block, which runs in place of the submission's. `lora` names an adapter of
    the engine's, to run with. `media` is the packed dict of what goes with a text or token ids, in the order of its
    placeholders: under `image` a list of arrays `[height, width, 3]` of uint8.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    edits: list[str] | None = None
    block: Block | None = None
    lora: str | None = None
    media: bytes = NO_MEDIA


class Submission(Message):
    """What a client puts on a model's queue. The declared interventions apply to each invoke, and the block to each
    that has none of its own.

    `live` is the packed dict of the live parameters' first values. `deadline_s` counts from the moment it was queued,
    by Redis's clock. `priority` orders a client's own traces on the queue and all in vLLM's scheduler, lower first.
    `client` is the name under which submissions take turns. `detach` keeps the trace running when its submitter goes
    away; otherwise `lease` is the lease that its submitter holds while it lives (`""`: none). `max_attempts` is how
    many engines may be lost over it until it fails; until then another begins it anew. `edits` names the standing
    interventions that it asks for (`Edit`); none at all and an empty list differ.
    `shared` is the packed dict of the first values of what all its blocks share (`Block.shared`): lists, dicts and
    arrays. `token_strings` has the engine send a string with each token id: of prompts, outputs and logit lenses.
    """

    trace: str
    model: str
    invokes: list[Invoke]
    block: Block | None = None
    live: bytes = b"\x80"
    deadline_s: float | None = None
    priority: int = 0
    detach: bool = False
    client: str = ""
    context: dict[str, str] = {}
    interventions: list[Declared] = []
    lease: str = ""
    max_attempts: int = 3
    edits: list[str] | None = None
    shared: bytes = b"\x80"
    token_strings: bool = False


# --- standing interventions -------------------------------------------------------------------------------------------


class Edit(Message):
    """A standing intervention: installed on all engines of a model under `name`, and run on requests from then on.

    A request is a trace's invoke, or one of a plain client. `scope` says on which: `all`; `default`, those that do not
    say which edits they ask for, and those that ask for it; `asked`, those that ask for it alone. A request is given
    those that are installed when its engine takes it, in the order in which they were first installed, before its own
    interventions.

    What it saves has the name `<edit>/<name>` on a trace. With `on_error="continue"` a request goes on without an edit
    that raised on it, and an edit that raised on `max_failures` requests of an engine in a row (0: any number) is
    disabled; with `"fail"` the request ends as failed.
    """

    name: str
    scope: Literal["all", "default", "asked"] = "all"
    block: Block | None = None
    interventions: list[Declared] = []
    on_error: Literal["continue", "fail"] = "continue"
    max_failures: int = 10
    by: str = ""


# --- save deltas ------------------------------------------------------------------------------------------------------


class SaveDelta(Message, array_like=True):
    """One change of the saves of one choice. `path` begins with the saved name."""


class Append(SaveDelta, tag="a"):
    """Extend the list at `path` with `items`. The list exists: a new one comes by `Set`."""

    path: tuple[PathKey, ...]
    items: list[Any]


class Set(SaveDelta, tag="s"):
    """Bind `value` at `path`: a saved name, a dict's key (new or old), or a list's existing index."""

    path: tuple[PathKey, ...]
    value: Any


class Delete(SaveDelta, tag="d"):
    """Remove a dict's key, or a name that is no longer saved."""

    path: tuple[PathKey, ...]


Delta: TypeAlias = Append | Set | Delete


class Manifest(Message, array_like=True):
    """What one saved name holds in the end, for a consumer to check its fold against.

    `kind` is one of the kinds of [`tracewire_bus.wire.packing`][]; `length` counts a container's items, an array's
    elements or a text's characters (bytes: its bytes), and is 1 for other scalars. `digest` is
    `digest` of the value. `invoke` is `SHARED_INVOKE` for what the trace shares.
    """

    invoke: int
    choice: int
    name: str
    kind: str
    length: int
    digest: bytes


# --- events of a trace ------------------------------------------------------------------------------------------------


class Event(Message, array_like=True):
    """Base of what stands on a trace's stream, under the id `<attempt>-<seq>`; a final's is the greatest id.

    Each event that callers see has a `type`, a literal, by which type checkers tell the events apart.
    """

    attempt: int
    seq: int

    @property
    def id(self) -> str:
        """Its id in the stream, after which to go on reading."""
        return f"{self.attempt}-{self.seq}"


class Versions(Message):
    """Versions of what an engine runs."""

    tracewire: str = ""
    vllm: str = ""
    nnsight: str = ""
    torch: str = ""


class Accepted(Event, tag="accepted"):
    """An engine has taken the trace and vLLM has taken its requests.

    `queued_at` is when it was queued (by Redis's clock) and `accepted_at` when it was taken (by the engine's), both in
    seconds since the epoch; `sampling` are the params of each invoke as vLLM resolved them, `prompt_tokens` the length
    of each invoke's prompt. `engine`, `model`, `revision`, `dtype` and `versions` say what runs it. `live_version` is
    the version of the live parameters that it starts with (0, or that of the last change made before it started),
    `live` their values by name. `edits` lists, for each invoke, the standing interventions that run on it, with their
    versions. `prompt_token_ids` are the token ids of each invoke's prompt, and `prompt_token_strings` has a string for
    each, if those were asked for (`Submission.token_strings`).
    """

    type: ClassVar[Literal["accepted"]] = "accepted"
    engine: str
    model: str
    queued_at: float = 0.0
    accepted_at: float = 0.0
    revision: str = ""
    dtype: str = ""
    versions: Versions = msgspec.field(default_factory=Versions)
    sampling: list[dict[str, Any]] = []
    prompt_tokens: list[int] = []
    live_version: int = 0
    live: dict[str, Any] = {}
    edits: list[list[tuple[str, int]]] = []
    prompt_token_ids: list[list[int]] = []
    prompt_token_strings: list[list[str]] = []


class OutputBase(Event):
    """What all forms of an output share: everything but its deltas, which stand last.

    `token_ids[k]` has index `index + k`; every index of a choice belongs to exactly one output. `time` is when the step
    of the last token ended, by the worker's clock (the adapter's for a trace without a block). `logprobs`, if asked
    for, holds one dict per token: token id to `(logprob, rank, text)`.
    """

    invoke: int = 0
    choice: int = 0
    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    time: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, tuple[float, int | None, str | None]]] | None = None

    @property
    def deltas(self) -> list[list[Delta]]:
        """`deltas[k]` is what the block newly saved in the step that sampled `token_ids[k]`."""
        raise NotImplementedError


class DecodedOutput(OutputBase, tag="o"):
    """What one vLLM output adds to one choice, its deltas decoded. `deltas` is as long as `token_ids`, or empty.

    So is `token_strings`, with the string of each token, if those were asked for (`Submission.token_strings`).
    """

    deltas: list[list[Delta]] = []
    token_strings: list[str] | None = None


class RawOutput(OutputBase, tag="o"):
    """An output whose steps are already encoded: what the adapter writes, so that it re-encodes nothing."""

    deltas: list[msgspec.Raw] = []  # type: ignore[assignment]
    token_strings: list[str] | None = None


#: The invoke of what belongs to no invoke, but to the trace: its shared values.
SHARED_INVOKE = -1


class DecodedShared(OutputBase, tag="x"):
    """What a trace's shared values gained since the last such event: an output of no invoke (`SHARED_INVOKE`).

    It has no tokens. `deltas` has one list for each step in which they changed.
    """

    deltas: list[list[Delta]] = []


class RawShared(OutputBase, tag="x"):
    """What a trace's shared values gained, its steps already encoded."""

    deltas: list[msgspec.Raw] = []  # type: ignore[assignment]


class Change(Message, array_like=True):
    """One accepted change of a trace's live parameters: those that were given, at once.

    `version` counts a trace's changes from 1. `by` is the client that made it; `time` when Redis took it, in
    milliseconds since the epoch. `values` holds the new values by name.
    """

    version: int
    by: str
    time: int
    values: dict[str, Any] = {}


class FirstToken(Message, array_like=True):
    """The first token of a choice that a change of the live parameters holds for.

    `invoke` and `choice` say which choice; `index` is the token's, from 0 for the first that was sampled.
    """

    invoke: int
    choice: int
    index: int


class SteeredBase(Event):
    """What both forms of a `Steered` share: everything but its changes, which stand last.

    `version` is that of the live parameters from now on. `first` says from where, for each choice that still runs: the
    step that sampled this token was the first with these values. Outputs with such a token come after this event, all
    others of that choice before it.
    """

    version: int
    first: list[FirstToken] = []
    time: float = 0.0


class Steered(SteeredBase, tag="steered"):
    """Live parameters have changed: all changes since the last such event, in the order in which they were accepted.

    Several that came within one step share an event; only what the last of them left holds for any token.
    """

    type: ClassVar[Literal["steered"]] = "steered"
    changes: list[Change] = []

    def first_token(self, invoke: int = 0, choice: int = 0) -> int | None:
        """Index of the first token of a choice that these values hold for; `None` if the choice had ended before."""
        return next((one.index for one in self.first if (one.invoke, one.choice) == (invoke, choice)), None)


class RawSteered(SteeredBase, tag="steered"):
    """A `Steered` whose changes are encoded already, as an adapter passes them on."""

    changes: list[msgspec.Raw] = []


class Paused(Event, tag="paused"):
    """The trace is held where it is: outputs of at most two further steps follow, until `Resumed`.

    `by` is the client that asked for it; `time` when the engine did it, in seconds since the epoch.
    """

    type: ClassVar[Literal["paused"]] = "paused"
    by: str = ""
    time: float = 0.0


class Resumed(Event, tag="resumed"):
    """The trace goes on from where it was paused. `by` and `time` are as for `Paused`."""

    type: ClassVar[Literal["resumed"]] = "resumed"
    by: str = ""
    time: float = 0.0


class Waiting(Event, tag="waiting"):
    """The engine that ran the trace is gone, and the trace waits for another: `Restarted` follows, or the end.

    What was folded stands until then. `reason` says why; `time` is when that was told, in seconds since the epoch.
    """

    type: ClassVar[Literal["waiting"]] = "waiting"
    reason: str = ""
    time: float = 0.0


class Restarted(Event, tag="restarted"):
    """The trace runs again from its beginning, as the next attempt: whoever folds starts over. `reason` says why."""

    type: ClassVar[Literal["restarted"]] = "restarted"
    reason: str = ""


Notice: TypeAlias = Steered | Paused | Resumed | Waiting | Restarted
"""The events between a trace's acceptance and its end that bring no output."""


class Failure(Message):
    """Why a trace was rejected or failed, in the caller's terms.

    `field` names the part of the submission at fault (`"block"`, `"prompt"`, `"sampling.temperature"`, `"model"`, ...).
    `line`, `source` and `filename` say where in the user's own code; `type` is an exception's class name,
    and `builtin` the name of the nearest class among Python's builtin exceptions that the exception is an instance of.
    `by` and `reason` say who cancelled a trace, and why.
    """

    type: str
    message: str
    field: str | None = None
    filename: str | None = None
    line: int | None = None
    source: str | None = None
    traceback: str | None = None
    builtin: str | None = None
    by: str | None = None
    reason: str | None = None


class Usage(Message):
    """Tokens of all invokes and choices together; `cached_tokens` of the prompts' were found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Final(Event, tag="final"):
    """The last event of a trace, exactly one.

    `status` is how it ended: `finished` and `stopped` are good ends; of the others (`failed`, `cancelled`, `expired`,
    `rejected`) `error` says why. `time` is in seconds since the epoch; `manifest` has the digest of every save.
    `deltas` holds what was saved after the last output, and a `Set` for every value whose fold would differ from what
    nnsight collected, as `(invoke, choice, deltas)`. `save_errors` names saves that cannot travel (by
    `invoke.choice.name`), each with the reason. `prompt_logprobs`, if any were asked for, holds for each invoke and
    each token of its prompt what `OutputBase.logprobs` does for a generated one; nothing for the first. `warnings` says
    what a block did that its author hardly meant, at the author's own line.
    """

    type: ClassVar[Literal["final"]] = "final"
    status: Status
    error: Failure | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    deltas: list[tuple[int, int, list[Delta]]] = []
    manifest: list[Manifest] = []
    save_errors: dict[str, str] = {}
    time: float = 0.0
    prompt_logprobs: list[list[dict[int, tuple[float, int | None, str | None]]]] = []
    warnings: list[str] = []

    @property
    def id(self) -> str:
        """Its id in the stream: the greatest there is."""
        return FINAL_ID


# --- what standing interventions leave --------------------------------------------------------------------------------


class EditRecord(Message):
    """What an edit left of one choice of one request, on the stream of the edit's own: an entry when it has ended.

    Of a request that is no trace, what was saved: `deltas` (an encoded `list[list[Delta]]`) from nothing on, under the
    names that the block gave, and `manifest` to check the fold against. Large arrays in it are blobs of `blobs`. What a
    trace saved stands on the trace; only an `error` on it is told here, too. `dropped` says why saves were left out.
    `request` is the id that its client knows.
    """

    edit: str
    version: int
    engine: str
    request: str
    trace: str = ""
    invoke: int = 0
    choice: int = 0
    time: float = 0.0
    tokens: int = 0
    finish_reason: FinishReason | None = None
    deltas: msgspec.Raw = msgspec.Raw(b"\x90")
    blobs: str = ""
    manifest: list[Manifest] = []
    save_errors: dict[str, str] = {}
    error: Failure | None = None
    dropped: str = ""


# --- snapshots --------------------------------------------------------------------------------------------------------


class HeldChoice(Message, array_like=True):
    """What a fold holds of one choice. `saves` are by name; large arrays among them stay references."""

    invoke: int
    choice: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    saves: dict[str, Any]
    token_strings: list[str] | None = None


class Snapshot(Message):
    """A trace folded up to one of its events, `<attempt>-<seq>`: what the events up to that one came to."""

    attempt: int
    seq: int
    choices: list[HeldChoice]
    accepted: Accepted | None = None
    live_version: int = 0
    paused: bool = False


# --- registry ---------------------------------------------------------------------------------------------------------


class ModuleInfo(Message, array_like=True):
    """One module of a model's tree: its path under the model (`"model.layers.0.mlp"`) and its class's name."""

    path: str
    cls: str


class EngineInfo(Message):
    """What an engine serves, published to the registry and renewed by its heartbeat.

    `modules` lists the tree in definition order, the root (path `""`) first; `attributes` gives, for each class in it,
    the names that can be read on a module besides its children. `layers` is the path of the list of decoder layers,
    which [`residual(i)`] counts in. `taps`, on an engine that replays CUDA graphs, are the only locations that can be
    read or edited, as `model.layers.3.output`; an engine without serves all. `queue_limit` is how many submissions may
    wait for its model, 0 for any number. `state` is `serving`, `holding` (until Redis has taken what waits),
    `draining` (it takes nothing new, and leaves), or `lost` (its vLLM has died). `host` is the name of its machine, or
    pod. `edits` is the generation of the model's standing interventions that it runs;
    `edit_errors` says why it runs some of them not, by name. `openai` is where it serves vLLM's HTTP API, if it does.
    `retention_s` is how long it keeps a trace after its end, in seconds; 0 where it does not say.
    `tree`, where `modules` and `attributes` are left out of a heartbeat, identifies them.
    `loras` names the LoRA adapters that a prompt can ask for, and `modalities` what it can have beside text (`image`).
    `malformed` counts what the engine has found in Redis that was malformed, and passed over. `config` is the model's
    configuration, as in its `config.json`; a heartbeat leaves it out with the tree.
    """

    engine: str
    model: str
    path: str = ""
    revision: str = ""
    dtype: str = ""
    vocabulary: int = 0
    hidden_size: int = 0
    max_model_len: int = 0
    layers: str = ""
    layer_count: int = 0
    modules: list[ModuleInfo] = []
    attributes: dict[str, list[str]] = {}
    versions: Versions = msgspec.field(default_factory=Versions)
    schema: str = ""
    capacity: int = 0
    running: int = 0
    state: str = "serving"
    started_at: float = 0.0
    taps: list[str] = []
    queue_limit: int = 0
    host: str = ""
    edits: int = 0
    edit_errors: dict[str, str] = {}
    openai: str = ""
    retention_s: float = 0.0
    tree: bytes = b""
    loras: list[str] = []
    modalities: list[str] = []
    malformed: int = 0
    config: dict[str, Any] = {}
