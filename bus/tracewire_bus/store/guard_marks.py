"""The decisions of guards about a trace, in one hash beside the trace's record.

A guard that takes a trace over from one that has died reads the trace from its beginning. By the marks it knows which
alarms were decided, and decides none of them again.
"""

from __future__ import annotations

from typing import Final

from .audit import Commands
from .queue_entries import REMEMBER_S

__all__ = ["GuardMarks"]

#: The longest decision that is kept, in characters.
_TEXT: Final = 200


class GuardMarks:
    """The marks on one bus. A mark is a text that names an alarm within its trace."""

    def __init__(self, bus: Commands) -> None:
        self._bus = bus

    async def read(self, trace: str, group: str) -> set[str]:
        """The marks that the guards of a group have set on a trace.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        before = f"{group}/"
        flat = await self._bus.command("HGETALL", self._bus.keys.guarded(trace))
        names = [name.decode("utf-8", "replace") for name in flat[::2]]
        return {name.removeprefix(before) for name in names if name.startswith(before)}

    async def add(self, trace: str, group: str, mark: str, decision: str) -> None:
        """Set a mark, with the decision in words. Redis keeps it as long as it remembers the trace's id.

        Raises:
            BusUnavailable: Redis does not answer; the mark may have been set.
        """
        key = self._bus.keys.guarded(trace)
        await self._bus.commands(
            ("HSET", key, f"{group}/{mark}", decision[:_TEXT].encode("utf-8", "replace")), ("EXPIRE", key, REMEMBER_S)
        )
