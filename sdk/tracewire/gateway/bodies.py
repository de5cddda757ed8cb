"""The bodies of requests. An unknown field is refused, and so is a value of another type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from tracewire.chats import CHAT_NAMES
from tracewire_bus.wire.ids import is_encodable

__all__ = [
    "Biases",
    "Body",
    "ChatBody",
    "CompletionBody",
    "ControlBody",
    "EntryBody",
    "Extension",
    "Items",
    "NotServed",
    "OfVllm",
    "OpenAIBody",
    "SteerBody",
    "Text",
    "TraceBody",
    "by_first_fault",
]

T = TypeVar("T")


def _encodable(text: str) -> str:
    if not is_encodable(text):
        raise ValueError("expected text, got half of a surrogate pair")
    return text


#: Text that can be sent.
Text = Annotated[str, AfterValidator(_encodable)]


def _not_served(value: Any) -> Any:
    if value:
        raise ValueError("the gateway does not serve this yet")
    return value


#: A field of OpenAI's API, or of vLLM's, that is refused unless it asks for nothing.
NotServed = Annotated[Any, AfterValidator(_not_served), WithJsonSchema({"type": "null"})]


class _FailFast(FailFast):
    """pydantic's, with a hash, which unions take."""

    __hash__ = object.__hash__


#: A list that is refused by the first item that is wrong: a body has room for a million of them.
Items = Annotated[list[T], _FailFast()]


def by_first_fault(is_right: Callable[[Any, Any], bool]) -> BeforeValidator:
    """A validator that leaves of an object only the first wrong member: pydantic would have an error for each."""

    def shortened(value: Any) -> Any:
        for key, one in value.items() if isinstance(value, dict) else ():
            if not is_right(key, one):
                return {key: one}
        return value

    return BeforeValidator(shortened)


#: Parts of the document's examples.
_STEER: dict[str, Any] = {"do": "ablate", "at": "residual(2)", "keep": {"live": "alpha"}}
_ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 8,
    "tracewire": {"interventions": [_STEER], "live": {"alpha": 1.0}},
}
_TRACE: dict[str, Any] = {"model": "demo", "prompt": "def add(a, b):", "sampling": {"max_tokens": 8}}
_TRACE |= {"interventions": [_STEER], "live": {"alpha": 1.0}, "trace_id": "mine"}


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _shorten(cls, given: Any) -> Any:
        """Leave out the unknown fields behind the first."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in given if name not in known]
        return {name: one for name, one in given.items() if name in known or name == unknown[0]} if unknown else given


def _is_bias(key: Any, value: Any) -> bool:
    return (isinstance(key, int) or key.lstrip("-").isdecimal()) and type(value) in (int, float) and abs(value) < 1e300


def _ints(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        int(key) if isinstance(key, str) and key.lstrip("-").isdecimal() else key: one for key, one in value.items()
    }


#: A number for each token id. JSON has the ids as text.
Biases = Annotated[dict[int, float] | None, BeforeValidator(_ints), by_first_fault(_is_bias)]


class Tracing(Body):
    """What a trace has beside its prompts and sampling params."""

    interventions: Items[dict[str, Any]] = Field(default=[], examples=[[_STEER]])
    live: dict[str, Any] = Field(default={}, examples=[{"alpha": 1.0}])
    block: dict[str, Any] | None = None
    edits: Items[str] | None = None
    shared: dict[str, Any] | None = None
    deadline: float | None = Field(default=None, gt=0)
    on_engine_loss: Literal["restart", "fail"] = "restart"
    max_attempts: int = Field(default=3, ge=1, le=100)
    token_strings: bool = False
    on_lag: Literal["hold", "thin", "spill"] = "hold"
    trace_id: str | None = None


class Extension(Tracing):
    """The field `tracewire` of a body in OpenAI's form."""

    saves: Literal["inline", "reference", "none"] = "inline"
    arrays: Literal["list", "base64"] = "list"
    detach: bool = False


class OfVllm(Body):
    """Fields of vLLM's requests that the gateway does not serve. The page `docs/gateway.md` says why."""

    cache_salt: NotServed = None
    chat_template: NotServed = None
    ec_transfer_params: NotServed = None
    kv_transfer_params: NotServed = None
    media_io_kwargs: NotServed = None
    mm_payload: NotServed = None
    mm_processor_kwargs: NotServed = None
    prompt_embeds: NotServed = None
    request_id: NotServed = None
    return_mm_kwargs: NotServed = None
    return_prompt_text: NotServed = None
    return_token_offsets: NotServed = None
    return_tokens_as_token_ids: NotServed = None
    routed_experts_prompt_start: NotServed = None
    session_id: NotServed = None
    stream_interval: NotServed = None
    suffix: NotServed = None
    truncate_prompt_tokens: NotServed = None
    truncation_side: NotServed = None
    use_beam_search: NotServed = None
    vllm_xargs: NotServed = None
    #: Of beam search only.
    length_penalty: float | None = Field(default=None, ge=1, le=1)


class Sampling(OfVllm):
    """Sampling params by vLLM's names."""

    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None
    logit_bias: Biases = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    logprob_token_ids: Items[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The params that were given, by vLLM's names."""
        names = Sampling.model_fields.keys() - OfVllm.model_fields.keys()
        return {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}


class StreamOptions(Body):
    """What a stream has beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """A schema that the text must fit."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that the text must have. `format`, `structures` and `triggers` are vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Any = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None


class OpenAIBody(Sampling):
    """What the requests for completions and for chat completions share. The last fields have no effect."""

    model: Text = Field(min_length=1, examples=["demo"])
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int = 0
    return_token_ids: bool | None = None
    tracewire: Extension | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def choices(self) -> int:
        """How many choices each prompt has."""
        return self.n or 1

    @property
    def extension(self) -> Extension:
        """The field `tracewire`, or its defaults."""
        return self.tracewire if self.tracewire is not None else Extension(saves="none")

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("a stream has no prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are those of a stream")
        return self

    @abstractmethod
    def prompts(self) -> Sequence[Any]:
        """The prompts, one or several."""

    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """How many logprobs of each token are wanted; None for none."""


class CompletionBody(OpenAIBody):
    """A request for completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**_ASKED, "prompt": "def add(a, b):"}]})
    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(examples=["def add(a, b):"])
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None
    best_of: NotServed = None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and (self.logprobs is not None or self.prompt_logprobs is not None):
            raise ValueError("echo is served without logprobs; prompt_logprobs has those of the prompt")
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise ValueError("echo is served for prompts of text")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def wanted_logprobs(self) -> int | None:
        """How many logprobs of each token are wanted; None for none."""
        return self.logprobs


class ChatBody(OpenAIBody):
    """A request for a chat completion."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_ASKED, "messages": [{"role": "user", "content": "Hello"}]}]}
    )
    messages: Items[dict[str, Any]] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Items[dict[str, Any]] | None = Field(default=None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: NotServed = None
    function_call: NotServed = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Items[dict[str, Any]] | None = None
    echo: NotServed = None
    add_special_tokens: NotServed = None
    modalities: Items[Literal["text"]] | None = None

    def prompts(self) -> list[list[dict[str, Any]]]:
        """The messages, as one prompt."""
        return [self.messages]

    def chat(self) -> dict[str, Any]:
        """The options of the chat that were given, by the SDK's names."""
        return {name: value for name in CHAT_NAMES if (value := getattr(self, name)) is not None}

    def wanted_logprobs(self) -> int | None:
        """How many logprobs of each token are wanted; None for none."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TraceBody(Tracing):
    """A trace that runs detached."""

    model_config = ConfigDict(json_schema_extra={"examples": [_TRACE]})
    model: Text = Field(min_length=1, examples=["demo"])
    prompt: str | Items[int] | None = Field(default=None, title="TracePrompt", examples=["def add(a, b):"])
    prompts: Items[str | Items[int] | Items[dict[str, Any]]] | None = None
    messages: Items[dict[str, Any]] | None = None
    sampling: dict[str, Any] = Field(default={}, examples=[{"max_tokens": 64, "temperature": 0.0}])
    priority: int = 0

    def given(self) -> Iterator[str]:
        """The names of the prompts that were given."""
        yield from (name for name in ("prompt", "prompts", "messages") if getattr(self, name) is not None)


class SteerBody(Body):
    """A change of live parameters."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"values": {"alpha": 8.0}}]})
    values: dict[str, Any] = Field(examples=[{"alpha": 8.0}])
    if_version: int | None = Field(default=None, ge=0)
    by: Text | None = None


class ControlBody(Body):
    """Who pauses, resumes or cancels a trace, and why it is cancelled."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"by": "alice", "reason": "it repeats itself"}]})
    by: Text | None = None
    reason: Text = ""


class DrainBody(Body):
    """How long a drained engine may take."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"timeout": 600}]})
    timeout: float | None = Field(default=None, ge=0, le=1e9)
    by: Text | None = None


class EntryBody(Body):
    """An entry of the library. `arrays` is one array, or an object of arrays by name, or of one by layer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "arrays": {"dtype": "float32", "shape": [2], "base64": "AACAPwAAAAA="},
                    "model": "demo",
                    "at": "residual(4)",
                    "licence": "MIT",
                    "provenance": {"method": "difference of means"},
                    "effect": {"score": 0.85},
                }
            ]
        }
    )
    arrays: list[Any] | dict[str, Any]
    kind: Literal["vector", "subspace", "probe", "autoencoder"] = "vector"
    model: Text = ""
    at: Text = ""
    description: Text = ""
    licence: Text = ""
    provenance: dict[str, Any] = {}
    effect: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class EditBody(Body):
    """A standing intervention. `timeout` is how long the gateway waits for the engines, in seconds."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"interventions": [{"do": "ablate", "at": "residual(2)", "keep": 0.5}]}]}
    )
    block: dict[str, Any] | None = None
    interventions: Items[dict[str, Any]] = []
    scope: Literal["all", "default", "asked"] = "all"
    on_error: Literal["continue", "fail"] = "continue"
    max_failures: int = Field(default=10, ge=0)
    timeout: float = Field(default=5.0, ge=0)
