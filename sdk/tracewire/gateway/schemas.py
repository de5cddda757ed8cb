"""The forms of JSON answers and of interventions, as the API's document has them.

No answer is made of these classes. A test compares the answers of every route with them.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tracewire_bus.wire.messages import Declared, Usage, Versions

from .json_values import BlockBody

__all__ = ["INTERVENTION", "components"]


class Form(msgspec.Struct):
    """Base of the forms. A member that is unset may be missing."""


# --- OpenAI's API -----------------------------------------------------------------------------------------------------


class ServedModel(Form):
    """A model as its engines serve it. `running` of at most `capacity` traces run."""

    engines: list[str]
    layers: int
    hidden_size: int
    vocabulary: int
    dtype: str
    revision: str
    capacity: int
    running: int
    modalities: list[str]


class ModelCard(Form):
    """A model, or a LoRA adapter, which has a `parent` and no `tracewire`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None
    tracewire: ServedModel | UnsetType = UNSET


class ModelList(Form):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenUsage(Form):
    """Numbers of tokens in OpenAI's form."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionChoice(Form):
    """A completion of one prompt."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    tracewire: dict[str, Any] | UnsetType = UNSET


class Completion(Form):
    """The answer to a request for completions. `tracewire` has the trace's id, status and events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    system_fingerprint: str | None
    tracewire: dict[str, Any]


class Message(Form):
    """A message of the model."""

    role: str
    content: str | None
    refusal: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(Form):
    """An answer to the messages."""

    index: int
    message: Message
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    tracewire: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(Form):
    """The answer to a request for a chat completion. `tracewire` has the trace's id, status and events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    system_fingerprint: str | None
    tracewire: dict[str, Any]


class ModelResponse(Form):
    """A response. `output` has items of the types `reasoning`, `message` and `function_call`."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    usage: dict[str, Any] | None
    max_output_tokens: int | UnsetType | None = UNSET
    tracewire: dict[str, Any] | UnsetType = UNSET


class OpenAIErrorDetails(Form):
    """What went wrong, with the field at fault as `param`."""

    message: str
    type: str
    param: str | None
    code: str
    tracewire: dict[str, Any] | UnsetType = UNSET


class OpenAIError(Form):
    """An error in OpenAI's form."""

    error: OpenAIErrorDetails


# --- traces -----------------------------------------------------------------------------------------------------------


class SubmittedTrace(Form):
    """A trace that was submitted. `links` has the paths of the trace itself, its events, state and live parameters."""

    id: str
    model: str
    links: dict[str, str]


class TraceSummary(Form):
    """A trace in a list. Times are in seconds since the epoch."""

    id: str
    model: str
    client: str
    state: str
    engine: str
    attempt: int
    queued_at: float
    ended_at: float | None
    error: str | None
    prompt_tokens: int | None
    tokens: int | None


class TracePage(Form):
    """Traces, the newest first. `next`, if there may be more, is `before` of the following page."""

    data: list[TraceSummary]
    next: str | UnsetType = UNSET


class LiveParameters(Form):
    """Live parameters by name, and the version that each change raises."""

    version: int
    values: dict[str, Any]


class TraceFailure(Form):
    """Why a trace did not end well."""

    type: str
    message: str
    field: str | UnsetType = UNSET
    filename: str | UnsetType = UNSET
    line: int | UnsetType = UNSET
    source: str | UnsetType = UNSET
    traceback: str | UnsetType = UNSET
    builtin: str | UnsetType = UNSET
    by: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class InstalledEdit(Form):
    """A standing intervention that runs on a prompt."""

    name: str
    version: int


class DraftedPrompt(Form):
    """How many tokens an engine with speculative decoding drafts for a step of a prompt, and why none."""

    tokens: int
    why: str


class AcceptedTrace(Form):
    """An engine's acceptance of a trace. Lists have an item for each prompt."""

    engine: str
    model: str
    revision: str
    dtype: str
    queued_at: float
    accepted_at: float
    sampling: list[dict[str, Any]]
    prompt_tokens: list[int]
    prompt_token_ids: list[list[int]]
    prompt_token_strings: list[list[str]]
    live_version: int
    live: dict[str, Any]
    edits: list[list[InstalledEdit]]
    versions: Versions
    drafts: list[DraftedPrompt]


class TraceChoiceBase(Form):
    """A choice so far."""

    text: str
    token_ids: list[int]
    token_strings: list[str] | None
    finish_reason: str | None
    stop_reason: int | str | None
    message: Message | UnsetType = UNSET


class TraceChoice(TraceChoiceBase, kw_only=True):
    """A choice so far, with the names of its saves."""

    saves: list[str]


class TraceChoiceState(TraceChoiceBase, kw_only=True):
    """A choice so far, with its saves by name."""

    saves: dict[str, Any]


class TraceBase(Form):
    """How far a trace is. `status` is null while it runs; `position` is where its events go on."""

    id: str
    position: str
    status: Literal["finished", "stopped", "cancelled", "expired", "rejected", "failed"] | None
    error: TraceFailure | None
    attempt: int
    paused: bool
    live_version: int
    usage: Usage
    save_errors: dict[str, str]
    warnings: list[str]
    accepted: AcceptedTrace | None


class TraceDescription(TraceBase):
    """A trace so far: its prompts' choices, the names of its saves, and its live parameters."""

    invokes: list[list[TraceChoice]]
    shared: list[str]
    live: LiveParameters


class TraceState(TraceBase):
    """A trace so far: its prompts' choices, and its saves."""

    invokes: list[list[TraceChoiceState]]
    shared: dict[str, Any]


class NewVersion(Form):
    """The version of the live parameters behind a change."""

    version: int


class PausedTrace(Form):
    """Whether the trace was running."""

    paused: bool


class ResumedTrace(Form):
    """Whether the trace was paused."""

    resumed: bool


class CancelledTrace(Form):
    """Whether the trace had not ended."""

    cancelled: bool


# --- engines and edits ------------------------------------------------------------------------------------------------


class RunningEngine(Form):
    """An engine. `ready` says whether it takes traces; `running` of at most `capacity` traces run."""

    name: str
    model: str
    state: str
    ready: bool
    running: int
    capacity: int
    host: str
    revision: str
    dtype: str
    max_model_len: int
    schema: str
    versions: dict[str, str]
    started_at: float
    malformed: int
    waiting_bytes: int
    edit_failures: dict[str, int]
    edit_errors: dict[str, str]
    code: str
    code_reason: str
    unsigned: bool
    public_key: str
    limits: dict[str, int]
    limits_reached: dict[str, int]


class EngineList(Form):
    """The running engines."""

    data: list[RunningEngine]


class DrainingEngine(Form):
    """An engine that drains, the others of its model, and how many submissions wait for the model."""

    engine: str
    others: list[str]
    waiting: int


class CallerKey(Form):
    """The key of a request: its name, its rights, and the tenant whose traces it sees."""

    name: str
    rights: list[str]
    tenant: str | None


class StandingEdit(Form):
    """A standing intervention. `problems` says why engines do not run it, by engine."""

    name: str
    version: int
    time: float
    scope: str
    on_error: str
    max_failures: int
    by: str
    block: str | None
    filename: str | None
    line: int | None
    disabled: str
    problems: dict[str, str]
    engines: list[str]
    interventions: list[dict[str, Any]]


class EditList(Form):
    """A model's standing interventions, in the order in which they apply."""

    data: list[StandingEdit]


class RecordedTrace(Form):
    """A recording of a trace. `events` are those of the trace's stream, `engine` is that of its last attempt."""

    trace_id: str
    model: str
    made_at: float
    made_by: str
    complete: bool
    engine: dict[str, Any]
    events: list[dict[str, Any]]


class LibraryEntry(Form):
    """A version of a name in the library. `removed` and `removed_by` say when and by which client it was removed.

    `shapes` are those of its arrays, and `arrays` the arrays themselves, if they were asked for.
    """

    id: str
    tenant: str
    name: str
    version: int
    kind: str
    model: str
    at: str
    layers: list[int]
    shapes: dict[str, list[int]]
    description: str
    licence: str
    provenance: dict[str, Any]
    effect: dict[str, Any]
    settings: dict[str, Any]
    by: str
    time: float
    digest: str
    removed: float | None
    removed_by: str
    arrays: dict[str, Any] | UnsetType = UNSET


class LibraryList(Form):
    """Entries of the library."""

    data: list[LibraryEntry]


class RemovedEntries(Form):
    """The ids of the versions that were removed."""

    removed: list[str]


class Problem(Form):
    """An error as problem details (RFC 9457), with the `field` of the request at fault.

    `exception`, `filename` and `line` are the error in a block; `nearest` is a name like the one that does not exist;
    `version` is the one that holds; `by` and `reason` are those of a cancellation. After `retry_after` seconds another
    attempt may succeed; without it none will.
    """

    type: str
    title: str
    status: int
    detail: str
    field: str | UnsetType = UNSET
    retry_after: float | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    exception: str | UnsetType = UNSET
    filename: str | UnsetType = UNSET
    line: int | UnsetType = UNSET
    nearest: str | UnsetType = UNSET
    version: int | UnsetType = UNSET
    by: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class ServerSentEvent(Form):
    """One event of a stream. `data` is JSON, and `id` the position to go on from with `Last-Event-ID`."""

    data: str
    event: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    retry: int | UnsetType = UNSET


_FORMS = (
    *(ModelCard, ModelList, Completion, ChatCompletion, ModelResponse, OpenAIError, SubmittedTrace, TracePage),
    *(LiveParameters, TraceDescription, TraceState, NewVersion, PausedTrace, ResumedTrace, CancelledTrace),
    *(
        CallerKey,
        EngineList,
        RunningEngine,
        DrainingEngine,
        EditList,
        StandingEdit,
        RecordedTrace,
        LibraryEntry,
        LibraryList,
        RemovedEntries,
        Problem,
        ServerSentEvent,
        BlockBody,
        Declared,
    ),
)

#: The name of the schema of declared interventions, which `do` tells apart.
INTERVENTION = "Intervention"


def components() -> dict[str, Any]:
    """The schemas by name."""
    shapes, found = msgspec.json.schema_components(_FORMS, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    declared = shapes[_FORMS.index(Declared)]
    return {**found, INTERVENTION: {"oneOf": declared["anyOf"], "discriminator": declared["discriminator"]}}
