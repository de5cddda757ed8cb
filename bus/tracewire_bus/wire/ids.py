"""Ids of a trace's events: `<attempt>-<seq>`, which are also their ids in the trace's Redis stream."""

from __future__ import annotations

__all__ = ["FINAL_ID", "event_id", "is_encodable", "parse_id"]

_GREATEST = 2**64 - 1

#: The id of every trace's final event: the greatest id of a Redis stream, so that nothing can be appended after it.
FINAL_ID = f"{_GREATEST}-{_GREATEST}"


def event_id(attempt: int, seq: int, *, final: bool = False) -> str:
    """The stream id of event `seq` (from 0) of attempt `attempt` (from 1), or of the trace's final event.

    Raises:
        ValueError: `attempt` or `seq` is out of range.
    """
    if attempt < 1 or seq < 0 or attempt >= _GREATEST:
        raise ValueError(f"attempts count from 1 and events from 0, got {attempt}-{seq}")
    return FINAL_ID if final else f"{attempt}-{seq}"


def is_encodable(text: str) -> bool:
    """Whether a string can be encoded in UTF-8, as all names and ids can. A string with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_id(text: str) -> tuple[int, int]:
    """Parse an id `"<attempt>-<seq>"` to the pair of its numbers. Such pairs compare as Redis compares the ids.

    Raises:
        ValueError: `text` is not an event's id.
    """
    attempt, dash, seq = text.partition("-")
    if not (dash and attempt.isascii() and attempt.isdigit() and seq.isascii() and seq.isdigit()):
        raise ValueError(f"an event id is '<attempt>-<seq>', got {text!r}")
    numbers = int(attempt), int(seq)
    if max(numbers) > _GREATEST:
        raise ValueError(f"an event id's numbers fit 64 bits, got {text!r}")
    return numbers
