"""How the command line prints events and values, one line each."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from tracewire.traces.output import (
    Accepted,
    Event,
    Final,
    Gap,
    Lagging,
    Paused,
    Restarted,
    Resumed,
    Steered,
    Waiting,
)
from tracewire_bus.store.lifecycle import Lifecycle
from tracewire_bus.wire.messages import Failure

__all__ = ["age", "counted", "event_line", "failure_text", "lifecycle_line", "printable", "short_value", "timestamp"]


#: How many elements of a list, a dict or an array of one dimension are shown.
_ELEMENTS = 8

_LAG = {
    "held": "the engine holds the trace",
    "thinned": "the engine leaves out reads of declared interventions",
    "spilled": "the engine puts all saves into its bulk store",
    "caught_up": "the engine runs the trace as before",
}


def lifecycle_line(event: Lifecycle) -> str:
    """One lifecycle event, with tabs between its columns."""
    more = [event.status or "", event.error or ""]
    if event.type in ("accepted", "restarted"):
        more.append(f"by {event.engine}, attempt {event.attempt}")
    if event.type == "queued" and event.client:
        more.append(f"by {event.client}")
    if event.tokens is not None:
        more.append(counted(event.tokens, "token"))
    return "\t".join(
        (timestamp(event.time), event.type, event.trace_id, event.model, ", ".join(part for part in more if part))
    ).rstrip()


def event_line(event: Event) -> str:
    """One event of a trace."""
    if isinstance(event, Accepted):
        return f"accepted by {event.engine}"
    if isinstance(event, Waiting):
        return f"waiting for another engine: {event.reason}"
    if isinstance(event, Restarted):
        return f"restarted: {event.reason}" if event.reason else "restarted"
    if isinstance(event, Steered):
        values = {name: value for change in event.changes for name, value in change.values.items()}
        shown = "  ".join(f"{name}={short_value(value)}" for name, value in values.items())
        several = any((one.invoke, one.choice) != (0, 0) for one in event.first)
        where = ", ".join(
            f"token {one.index}" + (f" of {one.invoke}.{one.choice}" if several else "") for one in event.first
        )
        by = event.changes[-1].by if event.changes else ""
        return (
            f"steered{f' by {by}' if by else ''} from {where or 'no token yet'} on (version {event.version}): {shown}"
        )
    if isinstance(event, Paused | Resumed):
        return f"{'paused' if isinstance(event, Paused) else 'resumed'} by {event.by}"
    if isinstance(event, Lagging):
        return f"{_LAG[event.action]}: {event.nbytes} bytes wait for Redis, {event.left_out} steps left out"
    if isinstance(event, Gap):
        return f"(trimmed: the events after {event.since} up to {event.until})"
    if isinstance(event, Final):
        error = f": {failure_text(event.error)}" if event.error else ""
        return f"{event.status}, {counted(event.usage.completion_tokens, 'token')}{error}"
    saved = "  ".join(f"{name}={short_value(value)}" for name, value in event.delta.items())
    text = json.dumps(event.text, ensure_ascii=False)
    return f"{event.invoke}.{event.choice} {event.index:5d} {text}  {saved}".rstrip()


def failure_text(failure: Failure | None) -> str:
    """Why a trace did not end well, in one line, with the place in the user's code; `""` for `None`."""
    if failure is None:
        return ""
    where = "" if failure.line is None else f", at {failure.filename or '<block>'}:{failure.line}"
    source = f": {failure.source.strip()}" if where and failure.source else ""
    return f"{failure.type}: {failure.message}{where}{source}"


def age(seconds: float) -> str:
    """How long ago something was, in its greatest unit: `40 s`, `3 min`, `2 h`, `5 d`."""
    left = max(0, int(seconds))
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if left < size:
            return f"{left} {unit}"
        left //= size
    return f"{left} d"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 engine`, `2 engines`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def short_value(value: Any) -> str:
    """A text of at most 60 characters for a number or a text; long arrays show their dtype and shape."""
    shape = getattr(value, "shape", None)
    if shape and len(shape) == 1 and shape[0] <= _ELEMENTS and hasattr(value, "tolist"):
        return short_value(value.tolist())
    if shape:
        return f"{getattr(value.dtype, 'name', value.dtype)}{list(shape)}"
    if isinstance(value, list):
        shown = [short_value(item) for item in value[:_ELEMENTS]]
        return f"[{', '.join([*shown, '...'] if len(value) > _ELEMENTS else shown)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {short_value(item)}' for key, item in list(value.items())[:_ELEMENTS])}}}"
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


#: Control characters as the pictures that Unicode has of them; lines and tabs stay.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x9B: 0x241B}


def printable(text: str) -> str:
    """A model's text for a terminal, on which control characters would move the cursor or do worse."""
    return text.translate(_PICTURES)


def timestamp(seconds: float) -> str:
    """A time in seconds since the epoch, in UTC as ISO 8601 writes it, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
