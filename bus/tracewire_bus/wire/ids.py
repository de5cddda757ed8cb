"""Ids of a trace's events."""

from __future__ import annotations

__all__ = ["FINAL_ID", "event_id", "is_text", "parse_id"]

_GREATEST = 2**64 - 1

#: Id of every trace's final event: nothing can be appended after it.
FINAL_ID = f"{_GREATEST}-{_GREATEST}"


def event_id(attempt: int, seq: int, *, final: bool = False) -> str:
    """The stream id of an event.

    Raises:
        ValueError: `attempt` is under 1 or `seq` under 0.
    """
    if attempt < 1 or seq < 0 or attempt >= _GREATEST:
        raise ValueError(f"attempts count from 1 and events from 0, got {attempt}-{seq}")
    return FINAL_ID if final else f"{attempt}-{seq}"


def is_text(text: str) -> bool:
    """Whether a string can be sent as it is: one with half of a surrogate pair cannot, and names nothing of ours."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_id(text: str) -> tuple[int, int]:
    """An id `"<attempt>-<seq>"` as numbers, which compare as Redis compares ids.

    Raises:
        ValueError: `text` is no such id.
    """
    attempt, dash, seq = text.partition("-")
    if not (dash and attempt.isascii() and attempt.isdigit() and seq.isascii() and seq.isdigit()):
        raise ValueError(f"an event id is '<attempt>-<seq>', got {text!r}")
    numbers = int(attempt), int(seq)
    if max(numbers) > _GREATEST:
        raise ValueError(f"an event id's numbers fit 64 bits, got {text!r}")
    return numbers
