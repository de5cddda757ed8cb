"""Every message of the bus.

A message is a msgspec struct in msgpack. The trace id and the schema version (`SCHEMA`) are plain fields of the stream
entry beside the message, so that an engine can answer an entry that it cannot decode. Readers ignore unknown fields and
skip unknown kinds of events, so that two versions can share a bus; readers refuse a newer *major* version.

Most messages are maps by field name. The messages that are sent with every token (events, and the deltas in them) are
arrays instead: the tag, then the fields in the order below. A new field of such a message goes to the end, where older
readers ignore it. No field is ever moved or removed, and no field is ever added to a base of several messages.

Values (variables of a block, saved values) are not structs but trees: see [`tracewire_bus.wire.packing`][]. A field of
type `bytes` that is described as *packed* holds such a tree, encoded by `pack`. Nothing here is ever unpickled.

Invokes, choices and token indices count from 0. Times are seconds since the epoch unless a field says otherwise.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from .declared_base import DeclaredIntervention, Live, Message, Positions, When
from .feature_kinds import Autoencoder, Features, SteerFeatures
from .head_kinds import AttentionInfo, AttentionPattern, HeadAblate, HeadProbe
from .ids import FINAL_ID
from .lens_kinds import Coordinates, Lens, Project
from .patch_kinds import Patch
from .pieces import Pieces
from .steering_kinds import Hold

__all__ = [
    "MAX_MEDIA_BYTES",
    "NO_MEDIA",
    "REQUEST_SCHEMA",
    "SCHEMA",
    "SHARED_INVOKE",
    "Ablate",
    "Accepted",
    "Append",
    "AttentionInfo",
    "AttentionPattern",
    "Autoencoder",
    "Block",
    "Change",
    "Chat",
    "ChatMessage",
    "Clamp",
    "Columns",
    "ColumnsManifest",
    "Coordinates",
    "Declared",
    "DeclaredIntervention",
    "DecodedOutput",
    "DecodedShared",
    "Delete",
    "Delta",
    "Drafts",
    "Edit",
    "EditRecord",
    "EngineInfo",
    "Event",
    "Failure",
    "Features",
    "Final",
    "FinishReason",
    "FirstToken",
    "HeadAblate",
    "HeadProbe",
    "HeldChoice",
    "Helper",
    "Hold",
    "Invoke",
    "Lagging",
    "Lens",
    "Live",
    "LogitLens",
    "Manifest",
    "Message",
    "MessageDelta",
    "ModuleInfo",
    "Notice",
    "OutputBase",
    "Patch",
    "PathKey",
    "Paused",
    "Positions",
    "Probe",
    "Project",
    "RawOutput",
    "RawShared",
    "Reading",
    "Restarted",
    "Resumed",
    "SaveDelta",
    "ScheduledChange",
    "Set",
    "Snapshot",
    "Status",
    "Steer",
    "SteerFeatures",
    "Steered",
    "StopWhen",
    "Submission",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "Versions",
    "Waiting",
    "When",
]

#: The schema that this package writes, `(major, minor)`. A stream entry has it as the text `"major.minor"`.
SCHEMA: tuple[int, int] = (2, 6)
#: The schema of submissions and edits, which clients write for engines. Older engines of this major version read it.
REQUEST_SCHEMA: tuple[int, int] = (1, 8)

PathKey: TypeAlias = Any
"""One step of a path into a saved value: a list's index, or a dict's key (str, int, float, bool, bytes or None)."""

FinishReason: TypeAlias = str
"""Why a choice ended, as vLLM reports it: `stop`, `length`, `abort`, ..."""

Status: TypeAlias = Literal["finished", "stopped", "cancelled", "expired", "rejected", "failed"]
"""How a trace ended.

`rejected`: no engine ran the trace. `failed`: its block raised, or its engine could not continue.
"""


# --- submission -------------------------------------------------------------------------------------------------------


class Helper(Message):
    """A function that a block calls, as source.

    `source` is dedented and starts at the `def`, without decorators; `first_line` is that line's number in `filename`,
    for tracebacks. A helper sees the names that its block sees (`Block`).
    """

    name: str
    source: str
    filename: str = "<unknown>"
    first_line: int = 1


class Block(Message):
    """A block of nnsight code as source text, and the values of the names that the source uses.

    `source` is the function's *body*, dedented, without the `def` line; its line 1 is line `first_line` of `filename`.
    The engine binds the names of the function's first three parameters (`parameters`, usually
    `("model", "tracer", "live")`) and every name in `variables`, `helpers`, `modules`, `imports`, `paths` and `shared`.

    `variables` is the packed dict of plain values by name. `modules` maps a name to an importable module path
    (`{"np": "numpy"}`); `imports` maps a name to `(module, attribute)`, for `from torch import Tensor`. `paths` maps a
    name to the path of one of the model's modules (`""`: the model itself), `shared` to the name of one of the trace's
    shared values. Helpers see the same names as the block, and each other. `arguments` are the variables that the
    caller passed as arguments; the other variables came along with the code.
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
    arguments: list[str] = []


# --- declared interventions -------------------------------------------------------------------------------------------


class Probe(DeclaredIntervention, tag="probe"):
    """Reads the values at a location, reduces them, and saves one item a step in the list `name`.

    By default an item is the value itself in the model's dtype, `[hidden]`. A `weight` of shape `[hidden]` projects the
    value to a number, one of shape `[outputs, hidden]` to `[outputs]` numbers; then `bias` (a number, or `[outputs]`)
    is added and `activation` applied. `reduce="mean"` saves the mean over the step's positions. Without a `weight`,
    `reduce` can also be a norm of the value: `"norm"` (Euclidean), `"l1"` (the sum of magnitudes) or `"max"` (the
    greatest magnitude); or `"moments"`: the mean, the variance, the skewness and the kurtosis of the value's features,
    `[4]`, where a normal distribution has a skewness of 0 and a kurtosis of 3. Results of these operations are float32;
    a single number is saved as a float.

    With positions other than `last` an item has one row per position of the step, `[positions, ...]`, and a step
    without such positions saves no item. Where `at` has a `*` or a slice, the locations are a dimension of their own,
    before the features: `[locations, ...]`.
    """

    name: str
    at: str
    weight: Any = None
    bias: Any = None
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    reduce: Literal["none", "mean", "norm", "l1", "max", "moments"] = "none"
    positions: Positions = "last"


class LogitLens(DeclaredIntervention, tag="logit_lens"):
    """Applies the model's final norm and head to the residual stream, and saves the `top_k` likeliest tokens.

    Each item of the list `name` is a dict of `token_ids`, int32 `[top_k]`, and `logits`, float32 `[top_k]`, best first;
    the dimensions of positions and locations come before `top_k`, as in `Probe`. If the trace asks for token strings
    (`Submission.token_strings`), the dict also has `token_strings`: nested lists of the shape of `token_ids`.
    """

    name: str
    at: str
    top_k: int = 5
    positions: Positions = "last"


class Steer(DeclaredIntervention, tag="steer"):
    """Adds `scale * vector` to the values at a location, in float32. `vector` has shape `[hidden]`."""

    at: str
    vector: Any
    scale: float | Live = 1.0
    positions: Positions = "all"


class Clamp(DeclaredIntervention, tag="clamp"):
    """Limits the component of the values along `direction` (`[hidden]`, of any norm) to the range `min` to `max`."""

    at: str
    direction: Any
    min: float | Live | None = None
    max: float | Live | None = None
    positions: Positions = "all"


class Ablate(DeclaredIntervention, tag="ablate"):
    """Scales the component of the values in the span of `direction` (`[hidden]` or `[directions, hidden]`) by `keep`.

    A `keep` of 0 removes the component, 2 doubles it. Without a `direction` the whole value is scaled: 0 zeroes a
    module's output.
    """

    at: str
    direction: Any = None
    keep: float | Live = 0.0
    positions: Positions = "all"


class StopWhen(DeclaredIntervention, tag="stop_when"):
    """Ends a choice at the token in whose step the value of the probe `probe` is above `above` or below `below`.

    The probe must save a single number a step, or several numbers of which `output` is the index of one. The condition
    must hold for `steps` steps in a row. The trace ends as `stopped`; tokens sampled after that token are not part of
    the trace.
    """

    probe: str
    above: float | Live | None = None
    below: float | Live | None = None
    output: int = 0
    steps: int = 1


Reading: TypeAlias = Probe | LogitLens | Lens | Coordinates | Features | Hold | HeadProbe | AttentionPattern
"""The kinds that save what they read, in a list with their `name`."""

Declared: TypeAlias = (
    Probe
    | LogitLens
    | Steer
    | Clamp
    | Ablate
    | StopWhen
    | Patch
    | Lens
    | Coordinates
    | Project
    | Features
    | SteerFeatures
    | Hold
    | HeadProbe
    | HeadAblate
    | AttentionPattern
)


# --- submission, continued --------------------------------------------------------------------------------------------


#: The `media` of an invoke without media: a packed empty dict.
NO_MEDIA: bytes = b"\x80"
#: Limit on the size of the arrays of one invoke's `media`, together.
MAX_MEDIA_BYTES: int = 256 * 1024 * 1024


class Chat(Message):
    """Chat messages whose output is a message, too, and how the engine's vLLM renders and parses them.

    `messages` and `tools` have OpenAI's form. `tool_choice` is `none`, `auto`, `required`, or a dict that names a
    function; `None` is `auto` where there are tools. `template_kwargs` are further variables of the chat template,
    `reasoning_effort` and `documents` such as have fields of their own. Without `include_reasoning`, the engine leaves
    the reasoning out of the messages that it sends. With `continue_final_message`, the output continues the last of the
    messages.

    Outputs have a `MessageDelta` (`OutputBase`), and the final a whole `ChatMessage` for each choice (`Final`).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] = []


class Invoke(Message):
    """One prompt of a trace, and its sampling params. The prompt is exactly one of text, token ids, chat messages, and
    a `Chat`, which an engine of an older schema refuses.

    `sampling` holds fields of vLLM's `SamplingParams` by name, plain values only. `edits` and `block`, where given,
    replace those of the submission. `lora` names a LoRA adapter of the engine. `media` is a packed dict: under `image`,
    a list of uint8 arrays `[height, width, 3]` in the order of the placeholders in the text or token ids.
    `forced_tokens` are the first tokens of each choice, in place of those that the model samples there.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    edits: list[str] | None = None
    block: Block | None = None
    lora: str | None = None
    media: bytes = NO_MEDIA
    chat: Chat | None = None
    forced_tokens: list[int] = []


class ScheduledChange(Message):
    """A change of live parameters that is part of the submission: it holds from one token of a choice on.

    `index` is the token's index among the sampled tokens of the choice: the step that samples it is the first with the
    new values. `values` is the packed dict of the values by name. `invoke` and `choice` limit the change to one prompt
    or one choice; `None` is all of them. `by` is whom a `Steered` event names as the author.
    """

    index: int
    values: bytes
    invoke: int | None = None
    choice: int | None = None
    by: str = ""


class Submission(Message):
    """A trace that a client puts on a model's queue.

    The declared interventions `interventions` apply to every invoke, `block` to every invoke without a block of its
    own. `live` is the packed dict of the live parameters' first values. `shared` is the packed dict of the first values
    of the values that all blocks share (`Block.shared`): lists, dicts and arrays.

    `deadline_s` is the seconds that the trace may take, from when it was queued, by Redis's clock (`None`: no limit).
    `priority` orders a client's own traces on the queue and all traces in vLLM's scheduler, lower first. Clients
    (`client`) take turns on the queue. With `detach` the trace keeps running when its submitter goes away;
    otherwise `lease` names the lease that the submitter renews while it runs (`""`: none). When an engine is lost,
    another starts the trace again from its beginning; after `max_attempts` engines were lost, the trace fails.

    `edits` names the standing interventions that the submission asks for (`Edit`); `None` and an empty list differ.
    With `token_strings` the engine sends a string with each token id: of prompts, outputs and logit lenses. `on_lag`
    says what the engine does while Redis takes the trace's events more slowly than it makes them (`Lagging`).
    `context` is the W3C trace context of the submitter's OpenTelemetry span: `traceparent`, and `tracestate` if there
    is one. Engines ignore other fields of it. `library` has the version of each entry of the library that a field of
    the interventions named, by that field. The field has the entry's array. `schedule` are changes of the live
    parameters at given tokens. For one choice they apply in the order of their tokens, and those at one token in the
    order given.
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
    on_lag: Literal["hold", "thin", "spill"] = "hold"
    library: dict[str, str] = {}
    schedule: list[ScheduledChange] = []


# --- standing interventions -------------------------------------------------------------------------------------------


class Edit(Message):
    """A standing intervention: installed on all engines of a model under `name`, and run on requests from then on.

    A request is a trace's invoke, or a request to the engine's HTTP API. `scope` selects the requests that an edit runs
    on: `all`, every request; `default`, requests that ask for this edit or name no edits; `asked`, only requests that
    ask for this edit. An engine fixes a request's edits when it takes the request, and runs them in the order of their
    first installation, before the request's own interventions.

    On a trace, an edit's saves are named `<edit>/<name>`. If the edit raises on a request, the request ends as failed
    with `on_error="fail"`, and continues without the edit with `"continue"`. In that case an engine disables the edit
    once it raised on `max_failures` requests in a row (0: never). `by` is the client that installed the edit.
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
    """Base of the changes to the saves of one choice. The first step of `path` is the saved name."""


class Append(SaveDelta, tag="a"):
    """Extend the existing list at `path` with `items`. A `Set` creates a list."""

    path: tuple[PathKey, ...]
    items: list[Any]


class Set(SaveDelta, tag="s"):
    """Bind `value` at `path`: a saved name, a dict's key (new or old), or a list's existing index."""

    path: tuple[PathKey, ...]
    value: Any


class Delete(SaveDelta, tag="d"):
    """Remove the dict key, or the saved name, at `path`."""

    path: tuple[PathKey, ...]


class Columns(SaveDelta, tag="c"):
    """The reads of declared interventions in one step: each of the layout's names gains one item in its saved list.

    `layout` says which names these are and which bytes of `values` belong to each ([`tracewire_bus.wire.columns`][]).
    A name that comes by `Columns` comes by no other delta of its choice. A list that does not exist yet begins here.
    """

    layout: bytes
    values: memoryview


Delta: TypeAlias = Append | Set | Delete | Columns


class Manifest(Message, array_like=True):
    """The final value of one saved name, for a consumer to check its fold against.

    `kind` is one that `kinds.kind` returns. `length` is the number of a container's items, an array's elements, a
    text's characters or a bytes object's bytes, and 1 for other scalars. `digest` is the value's `digests.digest`; it
    is empty for a list that came by `Columns`, which the choice's `ColumnsManifest` covers. `invoke` is `SHARED_INVOKE`
    for a shared value of the trace.
    """

    invoke: int
    choice: int
    name: str
    kind: str
    length: int
    digest: bytes


class ColumnsManifest(Message, array_like=True):
    """The number of `Columns` records of one choice, and a digest of their digests, in order."""

    invoke: int
    choice: int
    records: int
    digest: bytes


# --- events of a trace ------------------------------------------------------------------------------------------------


class Event(Message, array_like=True):
    """Base of the entries of a trace's stream.

    `attempt` counts from 1 the engines that began the trace; `seq` counts from 0 the events of an attempt. Each event
    that callers see has a `type`, a literal, by which type checkers tell the events apart.
    """

    attempt: int
    seq: int

    @property
    def id(self) -> str:
        """The event's id in the stream, `<attempt>-<seq>`. A reader continues after the last id that it has read."""
        return f"{self.attempt}-{self.seq}"


class Versions(Message):
    """Versions of the packages that an engine runs, and a digest of its model (`""` if the engine cannot tell).

    `weights` covers what `model_digest.py` of the engine says: files in full or by samples.
    """

    tracewire: str = ""
    vllm: str = ""
    nnsight: str = ""
    torch: str = ""
    weights: str = ""


class Drafts(Message):
    """Whether the engine drafts the tokens of an invoke, where it does speculative decoding.

    `tokens` is how many tokens it drafts for a step at most. It is 0 if it drafts none, and `why` then says why.
    """

    tokens: int
    why: str = ""


class Accepted(Event, tag="accepted"):
    """An engine has taken the trace and vLLM has accepted its requests.

    `queued_at` is when the trace was queued (by Redis's clock), `accepted_at` when the engine took it (by the engine's
    clock), both in seconds since the epoch. `engine`, `model`, `revision`, `dtype` and `versions` identify the engine
    and what it runs. `live_version` is the version of the live parameters that the trace starts with (0, or the version
    of the last change before the start), `live` their values by name.

    The other lists have one item an invoke: `sampling` the sampling params as vLLM resolved them, `prompt_tokens` the
    number of tokens of the prompt, `prompt_token_ids` their ids, `prompt_token_strings` a string for each if the
    submission asked for them (`Submission.token_strings`), and `edits` the `(name, version)` of each standing
    intervention that runs on the invoke. `code` is the hash of its block's code, `""` without a block. `drafts` says
    whether its tokens are drafted, on an engine with speculative decoding.

    `key` is the id of the key that signed the submission, and `tenant` the key's tenant; both are `""` if the
    submission was not signed. `library` is that of the submission: versions of the library's entries, by field.
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
    code: list[str] = []
    key: str = ""
    tenant: str = ""
    library: dict[str, str] = {}
    drafts: list[Drafts] = []


class ToolCallDelta(Message):
    """What an output adds to the tool call of this index. Its first delta has the `id` and the name of the function."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class MessageDelta(Message):
    """What an output adds to the message that it belongs to, as vLLM's parsers found it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class ToolCall(Message):
    """A call of a function by the model. `arguments` are JSON as text, as the model wrote them."""

    id: str
    name: str
    arguments: str = ""


class ChatMessage(Message):
    """A message of the model: its content (`None` if it has none beside tool calls), reasoning and tool calls."""

    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class OutputBase(Event):
    """Base of the outputs. Subclasses add the deltas, decoded or encoded, as the last fields.

    `token_ids[k]` is token `index + k` of the choice; each token of a choice belongs to exactly one output. `time` is
    when the step of the last token ended, by the worker's clock (by the adapter's for a trace that saves nothing).
    `logprobs`, if the invoke asked for them, has one dict per token: token id to `(logprob, rank, text)`.
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
        """`deltas[k]` are the changes of the saves in the step that sampled `token_ids[k]`."""
        raise NotImplementedError


class DecodedOutput(OutputBase, tag="o"):
    """One vLLM output of one choice, with decoded deltas.

    `deltas` is as long as `token_ids`, or empty. `token_strings` has the string of each token if the submission asked
    for them (`Submission.token_strings`), else is `None`. `message` is what the output adds to the choice's message, if
    the invoke has a `Chat` and the output adds anything.
    """

    deltas: list[list[Delta]] = []
    token_strings: list[str] | None = None
    message: MessageDelta | None = None


class RawOutput(OutputBase, tag="o"):
    """A `DecodedOutput` with encoded deltas. The adapter writes this form, so as not to re-encode a worker's deltas:
    `codec.encode_output` encodes it. If the deltas are in a bulk store, `deltas` is the encoded reference to them.
    """

    deltas: list[msgspec.Raw | Pieces] | msgspec.Raw = []  # type: ignore[assignment]
    token_strings: list[str] | None = None
    message: MessageDelta | None = None


#: The number in place of an invoke's for the shared values, which belong to the whole trace.
SHARED_INVOKE = -1


class DecodedShared(OutputBase, tag="x"):
    """The changes of a trace's shared values since the last such event, decoded.

    `invoke` is `SHARED_INVOKE` and `token_ids` is empty. `deltas` has one list for each step that changed the values.
    """

    deltas: list[list[Delta]] = []


class RawShared(OutputBase, tag="x"):
    """A `DecodedShared` with encoded deltas. The adapter writes this form."""

    deltas: list[msgspec.Raw] = []  # type: ignore[assignment]


class Change(Message, array_like=True):
    """One accepted change of a trace's live parameters; all parameters in it change in the same step.

    `version` counts a trace's changes from 1. `by` is the client that made the change; `time` is when Redis accepted
    it, in milliseconds since the epoch. `values` holds the new values by name. `proof` is the client's signature of the
    values, if the client has a key.
    """

    version: int
    by: str
    time: int
    values: dict[str, Any] = {}
    proof: bytes = b""


class FirstToken(Message, array_like=True):
    """The first token of a choice that was sampled with changed live parameters.

    `invoke` and `choice` identify the choice; `index` is the token's index among the choice's sampled tokens.
    """

    invoke: int
    choice: int
    index: int


class SteeredBase(Event):
    """Base of the two forms of a `Steered`. Subclasses add the changes, decoded or encoded, as the last field.

    `version` is the version of the live parameters from this event on. `first` has, for each choice that still runs,
    the token whose step was the first to use these values: outputs from that token on come after this event, earlier
    outputs of the choice before it. `time` is in seconds since the epoch.
    """

    version: int
    first: list[FirstToken] = []
    time: float = 0.0


class Steered(SteeredBase, tag="steered"):
    """Live parameters have changed.

    `changes` are all changes since the last such event, in the order in which Redis accepted them. Changes that arrive
    within one step share an event, and no token is sampled with the values of any but the last of them.
    """

    type: ClassVar[Literal["steered"]] = "steered"
    changes: list[Change] = []

    def first_token(self, invoke: int = 0, choice: int = 0) -> int | None:
        """The index of a choice's first token that was sampled with these values; `None` if the choice had ended."""
        return next((one.index for one in self.first if (one.invoke, one.choice) == (invoke, choice)), None)


class RawSteered(SteeredBase, tag="steered"):
    """A `Steered` with encoded changes. The adapter writes this form."""

    changes: list[msgspec.Raw] = []


class Paused(Event, tag="paused"):
    """The engine has paused the trace: outputs of at most two further steps follow before `Resumed`.

    `by` is the client that asked for the pause; `time` is when the engine applied it, in seconds since the epoch.
    """

    type: ClassVar[Literal["paused"]] = "paused"
    by: str = ""
    time: float = 0.0


class Resumed(Event, tag="resumed"):
    """The engine has resumed the trace from where it was paused. `by` and `time` are as in `Paused`."""

    type: ClassVar[Literal["resumed"]] = "resumed"
    by: str = ""
    time: float = 0.0


class Lagging(Event, tag="lagging"):
    """Events of the trace wait in the engine's adapter, since Redis takes them more slowly than the engine makes them.

    `action` says what the engine does from now on, as the submission's `on_lag` asks for: `"held"`, it makes no tokens
    for the trace; `"thinned"`, it leaves out the reads of declared interventions; `"spilled"`, it puts all saves into
    a bulk store; `"caught_up"`, it does none of these.
    `nbytes` is about how many bytes waited; `left_out` is the number of steps whose reads were left out so far, of all
    choices. `time` is when the adapter decided so, in seconds since the epoch.
    """

    type: ClassVar[Literal["lagging"]] = "lagging"
    action: Literal["held", "thinned", "spilled", "caught_up"] = "held"
    nbytes: int = 0
    left_out: int = 0
    time: float = 0.0


class Waiting(Event, tag="waiting"):
    """The engine that ran the trace was lost, and the trace waits for another: `Restarted` or `Final` follows.

    Until then the folded state stays valid. `reason` says how the engine was lost; `time` is when this event was
    written, in seconds since the epoch.
    """

    type: ClassVar[Literal["waiting"]] = "waiting"
    reason: str = ""
    time: float = 0.0


class Restarted(Event, tag="restarted"):
    """The trace starts again from its beginning, as the next attempt. A fold discards its state. `reason` says why."""

    type: ClassVar[Literal["restarted"]] = "restarted"
    reason: str = ""


Notice: TypeAlias = Steered | Paused | Resumed | Lagging | Waiting | Restarted
"""The events between a trace's acceptance and its end that bring no output."""


class Failure(Message):
    """Why a trace was rejected, failed or cancelled.

    `type` is an exception's class name, and `builtin` the name of the nearest of Python's builtin exception classes
    that the exception is an instance of. `field` names the part of the submission at fault (`"block"`, `"prompt"`,
    `"sampling.temperature"`, `"model"`, ...). `filename`, `line` and `source` are the place in the user's own code. For
    a cancelled trace, `by` is the client that cancelled the trace and `reason` the reason that the client gave.
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
    """Numbers of tokens, of all invokes and choices together.

    `cached_tokens` is how many of the prompt tokens vLLM found in its prefix cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Final(Event, tag="final"):
    """The last event of a trace; every trace has exactly one.

    `status` is how the trace ended: `finished` and `stopped` are successes; for the others (`failed`, `cancelled`,
    `expired`, `rejected`) `error` gives the reason. `time` is when it ended, in seconds since the epoch.

    `deltas` are `(invoke, choice, deltas)`: the changes of saves after the last output, and a `Set` for every value
    whose fold would differ from the value that nnsight collected. `manifest` has the digest of every save, and
    `columns` covers the records of `Columns`.
    `save_errors` maps `invoke.choice.name` of each save that cannot travel to the reason. `prompt_logprobs`, if the
    submission asked for them, has for each invoke one dict per prompt token, as in `OutputBase.logprobs`; the dict of
    the first token is empty. `warnings` are texts about likely mistakes in a block, each with the block's line.
    `messages` are `(invoke, choice, message)` of the invokes with a `Chat`: the whole messages, parsed at once.
    `signature` is the engine's signature of the event, if it signs finals (`tracewire_bus.wire.signing`).
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
    columns: list[ColumnsManifest] = []
    messages: list[tuple[int, int, ChatMessage]] = []
    signature: bytes = b""

    @property
    def id(self) -> str:
        """The greatest id that a stream can have, so that nothing can follow."""
        return FINAL_ID


# --- records of standing interventions --------------------------------------------------------------------------------


class EditRecord(Message):
    """The saves of an edit on one choice of one request. The engine writes them to the edit's own stream at the end.

    For a request of the HTTP API the record holds the saves: `deltas` (an encoded `list[list[Delta]]`, starting from
    empty saves) under the names that the edit gave, and `manifest` to check their fold against. Large arrays in the
    saves are blobs of the owner `blobs`. A trace's own stream has an edit's saves on the trace; its record only
    repeats an `error`. `dropped` is the reason if the engine left saves out. `request` is the id that the request's
    client knows; `time` is in seconds since the epoch; `tokens` is the number of sampled tokens.
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
    """The folded state of one choice. `saves` maps names to values; large arrays in them stay references. `columns` are
    the records of the names that came by `Columns`, in order. `message` is the choice's message so far, if it has one.
    """

    invoke: int
    choice: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    saves: dict[str, Any]
    token_strings: list[str] | None = None
    columns: list[Columns] = []
    message: ChatMessage | None = None


class Snapshot(Message):
    """The folded state of a trace after its event `<attempt>-<seq>`."""

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
    """An engine's entry in the registry. The engine publishes it and renews it by heartbeats.

    The model: `path` and `revision` are where it was loaded from, `vocabulary` and `hidden_size` its sizes,
    `max_model_len` the longest sequence in tokens, and `config` its configuration as in `config.json`. `modules` lists
    the module tree in definition order, the root (path `""`) first. `attributes` maps each class in the tree to the
    names that can be read on a module besides its children. `layers` is the path of the list of the `layer_count`
    decoder layers, which the index of `residual(i)` refers to. `taps` are the only locations that can be read or edited
    (such as `model.layers.3.output`) on an engine that replays CUDA graphs; empty if all can be. `loras` names the LoRA
    adapters that a prompt can ask for, `modalities` the media that a prompt can have besides text (`image`). `sources`
    maps each class in the tree to the source of its `forward`, as nnsight prints it: with the name of each operation
    beside its line. `attention` has the attention heads of the decoder layers whose heads the engine knows. Heartbeats
    leave out `modules`, `attributes`, `sources`, `config` and `attention`; `tree` identifies them.

    The engine: `state` is `serving`, `holding` (waiting until Redis has taken the events that the engine could not yet
    write), `stalled` (its vLLM has not answered for a while), `draining` (takes no new traces, and then ends) or
    `lost` (its vLLM has died). `capacity` is how many traces it runs at once, `running` how many it runs now,
    `queue_limit` how many submissions may wait for its model (0: any number). `host` is its machine or pod.
    `openai` is the URL of its HTTP API, `""` if it serves none. `retention_s` is how many seconds it keeps a trace
    after the trace's end, 0 if unknown. `edits` is the generation of the model's standing interventions that the
    engine runs; `edit_errors` maps the name of an intervention that it cannot run to the reason. `malformed` counts
    the malformed entries that the engine found in Redis and skipped. `waiting_bytes` is how many bytes of events
    and saves wait for Redis. `edit_failures` counts for each standing intervention the requests of this engine on
    which it raised. `code` says whose blocks the engine runs (`none`, `listed`, `signed` or `any`; `""` if
    unknown), `code_reason` why. `unsigned` says whether it accepts submissions and orders that no key has signed.
    `public_key` is the key with which it signs finals, in hexadecimal; `""` if it signs none. `limits` are the
    engine's limits that differ from the defaults, by name (`domain/limit_table.py`), and `limits_reached` counts
    for each limit how often it was reached.
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
    sources: dict[str, str] = {}
    waiting_bytes: int = 0
    edit_failures: dict[str, int] = {}
    code: str = ""
    code_reason: str = ""
    unsigned: bool = True
    public_key: str = ""
    limits: dict[str, int] = {}
    limits_reached: dict[str, int] = {}
    attention: list[AttentionInfo] = []
