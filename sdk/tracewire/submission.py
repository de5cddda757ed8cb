"""A submission: checks the arguments of `trace`, and makes the message of them.

The checks here need no engine. An error names the part at fault as the caller wrote it (`"sampling.temperature"`,
`"prompts[1].block"`).
"""

from __future__ import annotations

import inspect
import keyword
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar, Unpack

import msgspec

from tracewire.capture.capture import ModelHandle
from tracewire.capture.intervention import Intervention, live_reads
from tracewire_bus.wire.ids import is_encodable
from tracewire_bus.wire.messages import Block, Declared, DeclaredIntervention, Submission
from tracewire_bus.wire.messages import Invoke as InvokeMessage

from .chats import CHAT_NAMES, set_chats
from .checks import Duration, is_sendable_text, shown
from .errors import TraceRejected, UntransportableVariable
from .media import packed_media
from .options import SamplingOptions, TraceOptions, check_names
from .plain_values import plain
from .planned import check_planned, planned_tokens, scheduled_changes

__all__ = [
    "Prompt",
    "PromptInput",
    "Settings",
    "checked_block",
    "checked_interventions",
    "checked_trace_id",
    "make_submission",
    "split_options",
]


PromptInput: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Prompt"
"""A prompt: text, token ids, or chat messages (dicts with `role` and `content`), or one of vLLM's dicts, with images
under `multi_modal_data`."""
#: Greatest priority, in either direction: beyond it, the queue's scores, which are doubles, skip integers.
_MAX_PRIORITY = 2**53
_TRACE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Prompt:
    """A prompt with sampling params, or a LoRA adapter, of its own: `prompts=[Prompt("a", max_tokens=3), "b"]`.

    Its `block` runs in place of the trace's block, and its `edits` replace the trace's `edits`.

    Raises:
        UnknownOption: a keyword is no sampling param. The error names the nearest one.
    """

    def __init__(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        /,
        block: Intervention | Block | None = None,
        *,
        edits: Sequence[str] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        check_names(sampling, SamplingOptions)
        self.prompt = prompt
        self.block = block
        self.edits = edits
        self.sampling: dict[str, Any] = {**sampling}

    def __repr__(self) -> str:
        parts = [repr(self.prompt)]
        if self.block is not None:
            parts.append(f"block={self.block.name}")
        parts += [f"{name}={value!r}" for name, value in self.sampling.items()]
        if self.edits is not None:
            parts.append(f"edits={self.edits!r}")
        return f"Prompt({', '.join(parts)})"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The keyword arguments of `Client.trace` other than sampling params, with their defaults."""

    prompts: Sequence[PromptInput] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    interventions: Sequence[DeclaredIntervention] = ()
    live: Mapping[str, Any] | None = None
    deadline: Duration | None = None
    priority: int = 0
    detach: bool = False
    on_engine_loss: Literal["restart", "fail"] = "restart"
    max_attempts: int = 3
    edits: Sequence[str] | None = None
    trace_id: str | None = None
    shared: Mapping[str, Any] | None = None
    token_strings: bool = False
    on_lag: Literal["hold", "thin", "spill"] = "hold"
    by: str | None = None
    schedule: Mapping[int, Mapping[str, Any]] | None = None
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None
    #: The options about chats that were given, by name.
    chat: dict[str, Any] = {}


ChoiceT = TypeVar("ChoiceT", bound=str)

_SETTINGS = frozenset(Settings.__struct_fields__) - {"chat", "messages"}


def split_options(
    given: Mapping[str, Any],
    prompts: Sequence[PromptInput] | None,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Settings, dict[str, Any]]:
    """The keyword arguments of a trace, as its settings and its sampling params.

    Raises:
        UnknownOption: one of them is neither.
    """
    check_names(given, TraceOptions)
    chat = {name: value for name, value in given.items() if name in CHAT_NAMES}
    own = {name: value for name, value in given.items() if name in _SETTINGS}
    settings = Settings(prompts=prompts, messages=messages, chat=chat, **own)
    return settings, {name: value for name, value in given.items() if name not in _SETTINGS and name not in chat}


def make_submission(
    client: str,
    model: ModelHandle | str,
    prompt: PromptInput | None,
    block: Intervention | Block | None,
    options: Settings,
    sampling: dict[str, Any],
) -> Submission:
    """The submission of a trace by the client of this name, with all checks that need no engine.

    Raises:
        TraceRejected: the trace cannot be submitted; `field` names the part at fault.
    """
    shared, live = options.shared, options.live
    packed = _packed_shared(shared)
    names = frozenset(shared or ())
    for name, value in (("detach", options.detach), ("token_strings", options.token_strings)):
        if not isinstance(value, bool):
            raise TraceRejected(name, f"expected True or False, got {shown(value)}")
    first_values = _packed_live(live)
    if options.messages is not None:
        if prompt is not None or options.prompts is not None:
            raise TraceRejected("messages", "expected one of a prompt, prompts=[...] and messages=[...], got two")
        invokes = [_checked_invoke("messages", options.messages, sampling, names)]
    else:
        invokes = _checked_invokes(prompt, options.prompts, sampling, names)
    if options.chat or options.messages is not None:
        set_chats(invokes, options.chat)
    whole = checked_block(block, names)
    for one in (whole, *(invoke.block for invoke in invokes)):
        if one is not None:
            _check_live(one, live)
    planned_tokens(invokes, options.forced_tokens)
    made = Submission(
        trace=checked_trace_id(options.trace_id),
        model=_checked_model_name(model),
        invokes=invokes,
        block=whole,
        live=first_values,
        deadline_s=_deadline_seconds(options.deadline),
        priority=_checked_priority(options.priority),
        detach=options.detach,
        client=client if options.by is None else _author(options.by),
        interventions=checked_interventions(options.interventions, keep_saved=True),
        max_attempts=_attempt_limit(options.on_engine_loss, options.max_attempts),
        edits=_edit_names("edits", options.edits),
        shared=packed,
        token_strings=options.token_strings,
        on_lag=_choice("on_lag", options.on_lag, "hold", "thin", "spill"),
        schedule=scheduled_changes(options.schedule),
    )
    check_planned(made)
    return made


def checked_trace_id(trace_id: Any) -> str:
    if trace_id is None:
        return uuid.uuid4().hex
    if not isinstance(trace_id, str) or not _TRACE_ID.fullmatch(trace_id):
        raise TraceRejected(
            "trace_id", f"expected 1 to 128 letters, digits, '.', '_', ':' or '-', got {shown(trace_id)}"
        )
    return trace_id


def _author(by: Any) -> str:
    if not is_sendable_text(by) or not by:
        raise TraceRejected("by", f"expected the name of a client, got {shown(by)}")
    return str(by)


def _checked_model_name(model: Any) -> str:
    if isinstance(model, ModelHandle):
        return model.name
    if not isinstance(model, str) or not model or not is_encodable(model):
        raise TraceRejected("model", f"expected a model of client.models.get(), or its name, got {shown(model)}")
    return model


def _checked_invokes(
    prompt: Any, prompts: Any, sampling: dict[str, Any], shared: frozenset[str]
) -> list[InvokeMessage]:
    if prompts is None:
        if prompt is None:
            raise TraceRejected("prompt", "expected a prompt (text, token ids or chat messages), or prompts=[...]")
        return [_checked_invoke("prompt", prompt, sampling, shared)]
    if prompt is not None:
        raise TraceRejected("prompts", "expected either a prompt or prompts=[...], got both")
    if isinstance(prompts, str | bytes | Mapping | Prompt):
        raise TraceRejected("prompts", f"expected a list of prompts, got {shown(prompts)}")
    try:
        several = list(prompts)
    except TypeError:
        raise TraceRejected("prompts", f"expected a list of prompts, got {shown(prompts)}") from None
    if not several:
        raise TraceRejected("prompts", "expected at least one prompt, got an empty list")
    return [_checked_invoke(f"prompts[{index}]", one, sampling, shared) for index, one in enumerate(several)]


def _checked_invoke(field: str, prompt: Any, sampling: dict[str, Any], shared: frozenset[str]) -> InvokeMessage:
    params = _sampling_params("sampling", sampling)
    own = f"{field}." if field not in ("prompt", "messages") else ""
    if isinstance(prompt, Prompt):
        params |= _sampling_params(f"{own}sampling", prompt.sampling)
    lora = params.pop("lora", None)
    if lora is not None and (not isinstance(lora, str) or not lora):
        raise TraceRejected("lora", f"expected the name of an adapter, got {shown(lora)}")
    message = _invoke_of(field, prompt.prompt if isinstance(prompt, Prompt) else prompt, params)
    message.lora = lora
    if isinstance(prompt, Prompt):
        message.block = checked_block(prompt.block, shared, f"{own}block")
        message.edits = _edit_names(f"{own}edits", prompt.edits)
    return message


def _sampling_params(field: str, given: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: plain(f"{field}.{name}", value) for name, value in given.items() if name != "extra_sampling"}
    extra = plain("extra_sampling", given.get("extra_sampling", {}))
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise TraceRejected("extra_sampling", f"expected a dict of sampling params by name, got {shown(extra)}")
    return params | extra


def _invoke_of(field: str, prompt: Any, params: dict[str, Any]) -> InvokeMessage:
    if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
        rest = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        message = _invoke_of(field, rest, params)
        message.media = packed_media(f"{field}.multi_modal_data", prompt["multi_modal_data"])
        return message
    if isinstance(prompt, Mapping):
        prompt = _ids_or_text(field, prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise TraceRejected(field, "the prompt is empty")
        return InvokeMessage(prompt=plain(field, prompt), sampling=params)
    if isinstance(prompt, bytes):
        raise TraceRejected(field, f"expected text, token ids or chat messages, got {shown(prompt)}")
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        items = list(listed)
    except TypeError:
        raise TraceRejected(field, f"expected text, token ids or chat messages, got {shown(prompt)}") from None
    if not items:
        raise TraceRejected(field, "the prompt is empty")
    if all(isinstance(item, Mapping) for item in items):
        return InvokeMessage(
            messages=[_chat_message(f"{field}[{index}]", item) for index, item in enumerate(items)],
            sampling=params,
        )
    if all(type(item) is int and 0 <= item < 2**63 for item in items):
        return InvokeMessage(token_ids=items, sampling=params)
    for index, item in enumerate(items):
        if isinstance(item, Mapping | bool) or not hasattr(item, "__index__"):
            raise TraceRejected(f"{field}[{index}]", f"expected token ids or chat messages, got {shown(item)}")
        if not 0 <= int(item) < 2**63:
            raise TraceRejected(f"{field}[{index}]", f"expected a token id, which is not negative, got {shown(item)}")
    return InvokeMessage(token_ids=[int(item) for item in items], sampling=params)


def _ids_or_text(field: str, prompt: Mapping[str, Any]) -> Any:
    """The text or the token ids in a prompt dict of vLLM's, or in the output of a tokenizer."""
    if set(prompt) == {"prompt"}:
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"}:
        return prompt["prompt_token_ids"]
    if "input_ids" not in prompt:
        raise TraceRejected(
            field,
            "expected text, token ids, chat messages, or a dict with prompt, prompt_token_ids or input_ids, "
            f"got {shown(prompt)}",
        )
    ids, mask = (_only_row(prompt.get(name)) for name in ("input_ids", "attention_mask"))
    if mask is None:
        return ids
    if len(mask) != len(ids):
        raise TraceRejected(f"{field}.attention_mask", f"expected {len(ids)} numbers, one a token, got {len(mask)}")
    return [token for token, kept in zip(ids, mask, strict=True) if kept]


def _only_row(values: Any) -> Any:
    """A list of numbers, or the only row of a table of them."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple) and len(values) == 1 and isinstance(values[0], list | tuple):
        return values[0]
    return values


def _chat_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise TraceRejected(f"{field}.role", f"expected a chat message with a role, got {shown(message.get('role'))}")
    if "content" not in message and "tool_calls" not in message:
        raise TraceRejected(f"{field}.content", "expected a chat message with a content")
    parts = message.get("content")
    for index, part in enumerate(parts if isinstance(parts, list | tuple) else ()):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise TraceRejected(
                f"{field}.content[{index}]",
                f"expected text, got {kind!r}: media are not taken in chat messages (images are, as "
                '{"prompt": text, "multi_modal_data": {"image": array}})',
            )
    found = plain(field, message)
    assert isinstance(found, dict)
    return found


def _is_intervention(value: Any) -> bool:
    return isinstance(value, Intervention)


def checked_block(block: Any, shared: frozenset[str] = frozenset(), field: str = "block") -> Block | None:
    if block is None or isinstance(block, Block):
        return block
    if isinstance(block, Intervention):
        return block.block(shared)
    advice = ": decorate it with @tracewire.intervention" if callable(block) else ""
    if callable(block) and isinstance(inspect.unwrap(block, stop=_is_intervention), Intervention):
        advice = ": decorators do not travel; take the one above @tracewire.intervention away"
    raise TraceRejected(field, f"expected an intervention, got {shown(block)}{advice}")


def _edit_names(field: str, edits: Any) -> list[str] | None:
    if edits is None:
        return None
    if isinstance(edits, str | bytes | Mapping) or not isinstance(edits, Iterable):
        raise TraceRejected(field, f"expected a list of names of edits, got {shown(edits)}")
    names = list(edits)
    for name in names:
        if not is_sendable_text(name):
            raise TraceRejected(field, f"expected names of edits, got {shown(name)}")
    return names


def checked_interventions(interventions: Any, *, keep_saved: bool = False) -> list[Declared]:
    from tracewire_bus.domain.intervention_checks import DeclarationError, normalize

    if isinstance(interventions, str | bytes | Mapping) or not isinstance(interventions, Iterable):
        raise TraceRejected("interventions", f"expected a list of interventions, got {shown(interventions)}")
    try:
        return normalize(list(interventions), keep_saved=keep_saved, again=True)
    except DeclarationError as error:
        raise TraceRejected(error.field, error.message) from None


#: Limit on the packed first values of a trace's shared values, in bytes: each request of the trace carries them.
_MAX_SHARED_BYTES = 2**20


def _packed_shared(shared: Any) -> bytes:
    from tracewire_bus.wire.kinds import Unsavable, is_array
    from tracewire_bus.wire.packing import pack

    if shared is not None and not isinstance(shared, Mapping):
        raise TraceRejected("shared", f"expected a dict of shared values by name, got {shown(shared)}")
    for name, value in (shared or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise TraceRejected("shared", f"expected names that a block can use, got {shown(name)}")
        if not isinstance(value, list | dict) and not is_array(value):
            raise TraceRejected(
                f"shared.{name}",
                f"expected a list, a dict or an array, which blocks change in place, got {shown(value)}",
            )
        try:
            pack(value)
        except Unsavable as error:
            raise UntransportableVariable(name, str(error), field=f"shared.{name}") from None
    packed = pack(dict(shared or {}))
    if len(packed) > _MAX_SHARED_BYTES:
        raise TraceRejected("shared", f"expected first values of at most {_MAX_SHARED_BYTES} bytes, got {len(packed)}")
    return packed


def _packed_live(live: Any) -> bytes:
    from tracewire_bus.wire.live_values import LiveError, live_values, pack_live

    if live is not None and not isinstance(live, Mapping):
        raise TraceRejected("live", f"expected a dict of live parameters' first values, got {shown(live)}")
    try:
        prepared = live_values(live or {})
    except LiveError as error:
        if error.name:
            raise UntransportableVariable(error.name, error.message, field=f"live.{error.name}") from None
        raise TraceRejected("live", error.message) from None
    return pack_live({name: value.packed for name, value in prepared.items()})


def _check_live(block: Block, live: Any) -> None:
    """Refuse a block that reads a live parameter which the trace does not declare.

    Reads inside a `try` are left to the block.
    """
    declared = sorted(live or {})
    for name, line in live_reads(block.source, *block.parameters[1:]):
        if name not in declared:
            from difflib import get_close_matches

            near = get_close_matches(name, declared, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TraceRejected(
                f"live.{name}",
                f"the block reads live.{name}, and the trace declares {', '.join(declared) or 'none'}{hint}",
                filename=block.filename,
                line=block.first_line + line - 1,
            )


def _deadline_seconds(deadline: Any) -> float | None:
    if deadline is None:
        return None
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else deadline
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 1e300:
        raise TraceRejected("deadline", f"expected a positive number of seconds or a timedelta, got {shown(deadline)}")
    return float(seconds)


def _choice(field: str, given: ChoiceT, *allowed: ChoiceT) -> ChoiceT:
    if given not in allowed:
        expected = " or ".join(repr(one) for one in allowed)
        raise TraceRejected(field, f"expected {expected}, got {shown(given)}")
    return given


def _attempt_limit(on_engine_loss: str, most: int) -> int:
    _choice("on_engine_loss", on_engine_loss, "restart", "fail")
    if type(most) is not int or not 0 < most <= 100:
        raise TraceRejected("max_attempts", f"expected a number from 1 to 100, got {shown(most)}")
    return 1 if on_engine_loss == "fail" else most


def _checked_priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TraceRejected("priority", f"expected an integer, got {shown(priority)}")
    if abs(priority) > _MAX_PRIORITY:
        raise TraceRejected("priority", f"expected an integer of at most 53 bits, got {shown(priority)}")
    return priority
