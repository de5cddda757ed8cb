"""From a request's body to a trace of the SDK."""

from __future__ import annotations

import json
from typing import Any

from tracewire import Client, Trace, TraceRejected
from tracewire.options import SamplingOptions, check_names

from .bodies import ChatBody, OpenAIBody, TraceBody, Tracing
from .json_values import block_of, interventions_of, value_of, values_of
from .keys import Caller

__all__ = ["detached_trace", "openai_trace"]


def _options(tracing: Tracing, caller: Caller, priority: int) -> dict[str, Any]:
    """The options of a trace that have nothing to do with its prompts.

    Raises:
        Problem: the caller's key lacks a right.
        TraceRejected: a value is malformed.
    """
    options: dict[str, Any] = {
        "interventions": interventions_of(tracing.interventions, "interventions"),
        "live": values_of(tracing.live, "live", arrays=True) or None,
        "deadline": tracing.deadline,
        "on_engine_loss": tracing.on_engine_loss,
        "max_attempts": tracing.max_attempts,
        "edits": tracing.edits,
        "token_strings": tracing.token_strings,
        "on_lag": tracing.on_lag,
        "trace_id": caller.trace_id(tracing.trace_id),
        "priority": priority,
        "by": caller.name,
    }
    if tracing.trace_id is not None:
        # Submitted again, an id is the trace that has it, with all of its events.
        caller.require("read")
    if priority < 0:
        # Lower runs first, ahead of everybody's traces.
        caller.require("operate")
    if tracing.block is not None:
        caller.require("code")
        options["block"] = block_of(tracing.block, "block")
    if tracing.shared is not None:
        options["shared"] = value_of(tracing.shared, "shared")
    return options


def openai_trace(client: Client, body: OpenAIBody, base: tuple[str, str | None], caller: Caller) -> Trace:
    """The trace of a request under `/v1`. `base` is its model and its LoRA adapter.

    Raises:
        Problem: the caller's key lacks a right.
        TraceRejected: the trace cannot be submitted.
    """
    extension = body.extension
    sampling = body.sampling() | _constraint(body)
    if isinstance(body, ChatBody):
        # Without a limit, a chat's answer may fill the model's context.
        sampling["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if (top := body.wanted_logprobs()) is not None:
        sampling["logprobs"] = top
    model, lora = base
    if lora is not None:
        sampling["lora"] = lora
    options = _options(extension, caller, body.priority)
    if isinstance(body, ChatBody):
        given = {"messages": body.messages, **body.chat()}
        return client.trace(model, detach=extension.detach, **given, **options, **sampling)
    prompts: Any = body.prompts()
    given = {"prompt": prompts[0]} if len(prompts) == 1 else {"prompt": None, "prompts": prompts}
    return client.trace(model, **given, detach=extension.detach, **options, **sampling)


def _constraint(body: OpenAIBody) -> dict[str, Any]:
    """The `structured_outputs` that `response_format` stands for."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if body.structured_outputs is not None:
        raise TraceRejected("sampling.response_format", "expected either response_format or structured_outputs")
    if wanted.type == "structural_tag":
        tag = wanted.model_dump(exclude_none=True, exclude={"json_schema"})
        return {"structured_outputs": {"structural_tag": json.dumps(tag)}}
    if wanted.type == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise TraceRejected("sampling.response_format.json_schema.schema", "expected a JSON schema")
    return {"structured_outputs": {"json": wanted.json_schema.schema_}}


def detached_trace(client: Client, body: TraceBody, caller: Caller) -> Trace:
    """The trace of a `POST /traces`.

    Raises:
        Problem: the caller's key lacks a right.
        TraceRejected: the trace cannot be submitted.
    """
    given = list(body.given())
    if len(given) != 1:
        raise TraceRejected("prompt", f"expected one of prompt, prompts and messages, got {', '.join(given) or 'none'}")
    prompt: Any = body.prompt if body.prompt is not None else body.messages
    options = _options(body, caller, body.priority)
    check_names(body.sampling, SamplingOptions, "sampling.")
    prompts = {"prompt": None, "prompts": body.prompts} if body.prompts is not None else {"prompt": prompt}
    return client.trace(body.model, **prompts, detach=True, **options, **body.sampling)
