"""The keyword arguments of a trace, typed: its options, and vLLM's sampling params."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from tracewire_bus.wire.messages import DeclaredIntervention

from .checks import Duration
from .errors import UnknownOption
from .progress import HarvestProgress

__all__ = [
    "ChatOptions",
    "HarvestOptions",
    "SamplingOptions",
    "SweepOptions",
    "TraceOptions",
    "WithOptions",
    "check_names",
]


class SamplingOptions(TypedDict, total=False):
    """Sampling params by vLLM's names, and `lora`, of a trace or of one of its prompts.

    Without a param, vLLM's default holds. The engine's vLLM checks the values, and may be too old for some params.
    """

    n: int
    """How many sequences to sample of each prompt."""
    max_tokens: int | None
    """The most tokens to sample."""
    min_tokens: int
    """How many tokens to sample before an end is possible."""
    temperature: float
    """Randomness; 0 samples the likeliest token."""
    top_p: float
    """Samples among the likeliest tokens whose probabilities add up to this, from 0 to 1."""
    top_k: int
    """Samples among this many of the likeliest tokens; 0 or -1: among all."""
    min_p: float
    """Samples among tokens of at least this probability, relative to the likeliest token's."""
    seed: int | None
    """Seed of the sampling; by default the engine derives one from the trace's id, if the trace may run again."""
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: str | Sequence[str] | None
    """Texts that end the output."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the output."""
    include_stop_str_in_output: bool
    ignore_eos: bool
    """Whether to go on after the model's end-of-sequence token."""
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    """Numbers to add to the logits of tokens, by token id."""
    logprobs: int | None
    """For each sampled token, report the log-probabilities of this many of the likeliest tokens."""
    prompt_logprobs: int | None
    """The same for each token of the prompt."""
    prompt_logprob_start: int | None
    prompt_logprob_token_ids: Sequence[int] | None
    logprob_token_ids: Sequence[int] | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    structured_outputs: Mapping[str, Any] | None
    """A constraint on the output: `{"json": schema}`, `{"regex": ...}`, `{"choice": [...]}`, `{"grammar": ...}`."""
    thinking_token_budget: int | None
    repetition_detection: Mapping[str, Any] | None
    watermarking: bool | None
    routed_experts_prompt_start: int
    trace_decode_token_ids: Sequence[int] | None
    lora: str | None
    """Name of a LoRA adapter that the engine was started with."""
    extra_sampling: Mapping[str, Any]
    """Sampling params of a newer vLLM that this list lacks, by name. The client sends them unchecked."""


class ChatOptions(TypedDict, total=False):
    """How chat messages become a prompt, and the output a message, as in OpenAI's and vLLM's API.

    With one of these options, or with `messages=`, each choice has a `message`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    """The functions that the model may call, in OpenAI's form. The engine needs a `--tool-call-parser`."""
    tool_choice: str | Mapping[str, Any] | None
    """`"none"`, `"auto"` (the default where there are tools), `"required"`, or the function to call, in OpenAI's form.
    The last two constrain the output."""
    parallel_tool_calls: bool
    """Whether one message may have several tool calls."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the model's chat template, such as `{"enable_thinking": False}`."""
    reasoning_effort: str | None
    """How much the model reasons, for templates that know this variable."""
    include_reasoning: bool
    """Whether messages have the model's reasoning, which takes a reasoning parser of the engine."""
    add_generation_prompt: bool
    """Whether the prompt ends where the assistant's message begins: by default if the last one is not continued."""
    continue_final_message: bool
    """Whether the output continues the last of the messages."""
    documents: Sequence[Mapping[str, Any]] | None
    """Documents for templates that know this variable."""


class TraceOptions(SamplingOptions, ChatOptions, total=False):
    """The keyword arguments of `Client.trace`: sampling params, and these. `Client.trace` says what they mean."""

    interventions: Sequence[DeclaredIntervention]
    live: Mapping[str, Any] | None
    deadline: Duration | None
    priority: int
    detach: bool
    on_engine_loss: Literal["restart", "fail"]
    max_attempts: int
    edits: Sequence[str] | None
    trace_id: str | None
    shared: Mapping[str, Any] | None
    token_strings: bool
    """Whether the engine sends a string with each token id."""
    on_lag: Literal["hold", "thin", "spill"]
    schedule: Mapping[int, Mapping[str, Any]] | None
    """Changes of live parameters by the index of the sampled token from which on they hold: `{20: {"alpha": 8.0}}`."""
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] | None
    """The first tokens of the output, in place of those that the model samples; with `prompts=`, a list for each."""
    by: str | None
    """The name under which the trace is submitted, in place of the client's: engines serve these names in turns."""


class SweepOptions(SamplingOptions, total=False):
    """The keyword arguments of `Client.patch_sweep`: sampling params, and these."""

    layers: str | int | Sequence[int]
    """The layers to patch: `"*"` (the default), an index, indices, or a slice such as `"4:12"`."""
    positions: str | int | Sequence[int]
    """The positions of the prompt to patch, as `Patch.positions` names them; by default all."""
    at: str
    """The location to patch, with `{layer}` for a layer's number: by default `residual({layer})`."""
    concurrency: int
    """How many traces run at once; by default 32."""
    interventions: Sequence[DeclaredIntervention]
    """Interventions of all runs, such as a `Probe` that a function as metric reads."""
    deadline: Duration | None
    priority: int
    edits: Sequence[str] | None


class HarvestOptions(SamplingOptions, total=False):
    """The keyword arguments of `Client.harvest`: sampling params, and these."""

    column: str | None
    """Of rows that are dicts, the prompt's column: by default the first of `prompt`, `text`, `messages`, `input_ids`
    and `prompt_token_ids` that a row has."""
    key: str | None
    """Of rows that are dicts, the column of integers or texts that tell the prompts apart: by default their numbers."""
    format: Literal["safetensors", "parquet"]
    """The format of the values. With `parquet` they stand beside the index."""
    dtype: str | None
    """The dtype of floating-point values: by default the engine's. The client converts."""
    positions: Sequence[int] | slice | None
    """The positions of each sequence to keep, as Python indexes them. The client leaves out the others' rows; the
    `positions` of an intervention have the engine do so."""
    every: int
    """Keep each position that this number divides. The client leaves out the others' rows."""
    keep_top: int | None
    """How many of the greatest values of each row to keep, with their indices. The client chooses them."""
    concurrency: int
    """How many prompts are submitted at once."""
    shard_bytes: int
    """How many bytes of values a shard has before the next one begins."""
    shard_prompts: int
    """How many prompts a shard has at most."""
    patience: Duration
    """How long the harvest waits for a Redis or engines that are away, in seconds."""
    max_failures: int | None
    """How many prompts may fail one after the other before the harvest ends with the error of the last."""
    retry_failed: bool
    """Whether prompts that failed in an earlier run are run again."""
    repair: bool
    """Whether the prompts of damaged shards are run again."""
    storage_options: Mapping[str, Any] | None
    """The options that fsspec gets with the URL, such as credentials."""
    progress: Callable[[HarvestProgress], object] | None
    """A function that is called whenever a prompt has ended or a shard is written."""
    live: Mapping[str, Any] | None
    deadline: Duration | None
    priority: int
    edits: Sequence[str] | None
    max_attempts: int
    token_strings: bool
    """Whether the index has a string for each token: by default it has."""


class WithOptions(TraceOptions, total=False):
    """The keyword arguments of `Model.trace`: those of `Client.trace`, and nnsight's name for one of them."""

    max_new_tokens: int | None
    """The same as `max_tokens`."""


def check_names(given: Iterable[str], kind: type[Any], field: str = "") -> None:
    """Refuse keyword arguments that are not of this kind, with the nearest name that is.

    Raises:
        UnknownOption: one of them is not; its field is its name after `field`.
    """
    known: frozenset[str] = getattr(kind, "__optional_keys__")  # noqa: B009  (mypy does not know it of a class)
    for name in given:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, sorted(known), 1)
            raise UnknownOption(field + name, name, near[0] if near else None)
