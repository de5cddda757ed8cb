"""The limits that an engine enforces, each with a name, a default and a meaning.

An operator sets a limit by `tracewire engine --limit NAME=NUMBER`. An engine publishes limits that differ from the
defaults, and how often each was reached, in the registry. The table in docs/internals/untrusted-input.md is generated
from this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Final, get_type_hints

import msgspec

__all__ = ["DEFAULTS", "LimitCounts", "LimitExceeded", "Limits", "changed", "documented", "option_name", "parse_limits"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of all limits. The note on each field is its meaning, for the documentation."""

    submission_bytes: Annotated[int, "bytes of an encoded submission, without its large arrays"] = 32 << 20
    values: Annotated[int, "values in a submission, or in one packed field, counted before they are decoded"] = 500_000
    containers: Annotated[int, "lists, dicts and arrays among these values"] = 30_000
    tuple_keys: Annotated[int, "tuples that are keys or items of sets, among these values"] = 1024
    depth: Annotated[int, "levels of lists and dicts in a message, around its values"] = 80
    prompts: Annotated[int, "prompts of a trace"] = 1024
    choices: Annotated[int, "choices of a prompt (the sampling param `n`)"] = 256
    requests: Annotated[int, "choices of all prompts of a trace"] = 4096
    prompt_tokens: Annotated[int, "tokens of a prompt, bounded by its characters before a template renders it"] = 0
    helpers: Annotated[int, "helpers of a block"] = 256
    source: Annotated[int, "characters of one block's or helper's source"] = 100_000
    sources: Annotated[int, "characters of all sources of a trace"] = 1_000_000
    interventions: Annotated[int, "declared interventions of a trace"] = 64
    edits: Annotated[int, "edits that a prompt asks for"] = 64
    name: Annotated[int, "characters of a name: of a client, lease, block, helper, edit or LoRA adapter"] = 256
    trace_id: Annotated[int, "characters of a trace's id"] = 256
    live: Annotated[int, "live parameters of a trace"] = 64
    live_bytes: Annotated[int, "bytes of a live parameter's value, at submission and when it is changed"] = 1 << 20
    shared_bytes: Annotated[int, "bytes of the first values of a trace's shared values"] = 1 << 20
    variable_bytes: Annotated[int, "bytes of a trace's large variables, which travel beside its submission"] = 4 << 30
    image_bytes: Annotated[int, "bytes of a prompt's images"] = 256 << 20
    vector_bytes: Annotated[int, "bytes of the large arrays in a trace's interventions"] = 32 << 20
    attempts: Annotated[int, "engines that may be lost over a trace (`max_attempts`)"] = 100
    deadline_s: Annotated[int, "seconds from a trace's submission to its end, whatever deadline it asks for"] = 0
    paused_s: Annotated[int, "seconds for which a trace may be paused at a time; then it fails"] = 86_400
    steers_waiting: Annotated[int, "changes of a trace's live parameters that no event has reported"] = 10_000
    steers_per_s: Annotated[int, "changes of a trace's live parameters a second"] = 10_000
    step_items: Annotated[int, "items that one list or dict of saves gains in one step"] = 2**18
    step_text_bytes: Annotated[int, "bytes of texts that a choice saves in one step"] = 64 << 20
    trace_save_bytes: Annotated[int, "bytes of all saves of a trace; beyond, the trace fails"] = 256 << 30
    client_traces: Annotated[int, "traces of one client that an engine runs at once"] = 0
    http_body_bytes: Annotated[int, "bytes of a request's body at the engine's own HTTP API (`--openai`)"] = 32 << 20
    http_requests: Annotated[int, "requests to that API at once"] = 0
    client_waiting: Annotated[int, "submissions of one client that wait for a model"] = 0


DEFAULTS: Final = Limits()

#: The limits for which 0 means that there is none, and what holds instead.
_NONE: Final = {
    "prompt_tokens": "the model's length",
    "deadline_s": "none",
    "paused_s": "none",
    "trace_save_bytes": "none",
    "client_traces": "the engine's capacity",
    "client_waiting": "the client's share of the queue",
    "http_requests": "half of the engine's capacity",
}
#: The limits that no option changes: workers read them, or clients rely on them.
_FIXED: Final = frozenset(
    {
        *("values", "containers", "tuple_keys", "depth", "live", "live_bytes", "trace_id"),
        *("step_items", "step_text_bytes", "image_bytes", "vector_bytes"),
    }
)


class LimitExceeded(ValueError):
    """A submission or a trace exceeds a limit.

    Attributes:
        field: the part of the submission that exceeds it.
        message: the limit and the actual count, and the option that sets the limit.
        limit: the limit's name, as in `Limits`.
    """

    def __init__(self, field: str, message: str, limit: str = "") -> None:
        text = message + (f" (--limit {option_name(limit)})" if limit and limit not in _FIXED else "")
        super().__init__(text)
        self.field = field
        self.message = text
        self.limit = limit


class LimitCounts(Counter[str]):
    """How often each limit was reached, by the limit's name."""

    def note(self, error: BaseException) -> None:
        """Count an error, if it is that of a limit."""
        if name := getattr(error, "limit", ""):
            self[name] += 1


def option_name(name: str) -> str:
    """The name of a limit in `--limit NAME=NUMBER`."""
    return name.replace("_", "-")


def parse_limits(given: Iterable[str]) -> Limits:
    """Read the values of `--limit`.

    Raises:
        ValueError: one is not `NAME=NUMBER`, names no limit, or names a limit that cannot be changed.
    """
    known = {option_name(name): name for name in Limits.__struct_fields__}
    found: dict[str, int] = {}
    for text in given:
        word, equals, number = text.partition("=")
        name = known.get(word.replace("_", "-"))
        if name is None or not equals:
            near = get_close_matches(word, known, 1)
            hint = f"; did you mean {near[0]}?" if near and near[0] != word else ""
            raise ValueError(f"expected NAME=NUMBER with one of {', '.join(sorted(known))}, got {text!r}{hint}")
        if name in _FIXED:
            raise ValueError(f"{word} is fixed at {getattr(DEFAULTS, name)}, since clients and workers rely on it")
        least = 0 if name in _NONE else 1
        if not number.isdecimal() or int(number) < least:
            raise ValueError(f"expected {word}=NUMBER with a whole number of at least {least}, got {text!r}")
        found[name] = int(number)
    return Limits(**found)


def changed(limits: Limits) -> dict[str, int]:
    """Those of the limits that differ from the defaults, by name."""
    return {
        name: getattr(limits, name)
        for name in Limits.__struct_fields__
        if getattr(limits, name) != getattr(DEFAULTS, name)
    }


def documented() -> list[str]:
    """The rows of the documentation's table of limits, in Markdown."""
    hints: dict[str, Any] = get_type_hints(Limits, include_extras=True)
    rows = ["| limit | default | bounds |", "| --- | --- | --- |"]
    for name in Limits.__struct_fields__:
        default = getattr(DEFAULTS, name)
        shown = _NONE.get(name, "") if default == 0 else _number(default, name)
        star = " (fixed)" if name in _FIXED else ""
        rows.append(f"| `{option_name(name)}`{star} | {shown} | {hints[name].__metadata__[0]} |")
    return rows


def _number(value: int, name: str) -> str:
    if name.endswith("bytes"):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}"
