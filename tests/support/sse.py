"""Server-sent events, read by the rules of their standard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Sent", "events"]


@dataclass(frozen=True)
class Sent:
    """One event. `id` is that of the last event that had one."""

    name: str
    data: Any
    id: str | None


async def events(answer: httpx.Response) -> AsyncIterator[Sent]:
    """The events of an answer, as they come. One that is cut off is none."""
    name, lines, last = "message", [], None
    async for line in answer.aiter_lines():
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if lines:
                text = "\n".join(lines)
                yield Sent(name, text if text == "[DONE]" else json.loads(text), last)
            name, lines = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            lines.append(value)
        elif field == "id":
            last = value
