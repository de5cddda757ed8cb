"""The pauses of a trace: whether a client wants it paused, and whether it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from tracewire_bus.wire.messages import Paused, Resumed

from .trace_stream import UNNUMBERED

__all__ = ["PauseState"]

#: How many operations of clients a run knows again.
_KNOWN: Final = 256


class PauseState:
    """The pauses of one run, which begins as not paused."""

    def __init__(self) -> None:
        #: The client that asked for the pause; `None` if the trace is to run.
        self.wanted_by: str | None = None
        #: The number of the last pause or resumption that was asked for, counted over the whole trace.
        self.number = 0
        #: When the pause ends, by the event loop's clock, and whether the trace is cancelled then; None without an end.
        self.due: float | None = None
        self.cancels = False
        #: Whether its requests are paused in the engine, or are about to be.
        self.paused = False
        #: Since when it is paused, by the event loop's clock; None if it is not.
        self.paused_since: float | None = None
        self._asked_by = self._begun_by = ""
        self._applying = False
        #: The ids of the last operations by which clients asked for one.
        self._known: deque[str] = deque(maxlen=_KNOWN)

    def is_known(self, id: str) -> bool:
        """Whether a client's operation was asked for before; False for one without an id."""
        return id in self._known

    def request(
        self,
        by: str,
        *,
        resume: bool = False,
        number: int = 0,
        within_s: float | None = None,
        then: str = "",
        id: str = "",
    ) -> bool:
        """Ask for a pause, or for its end. `TraceRun.apply_pause` carries that out.

        The arguments are as in an `Order`; `PauseEnds` carries `within_s` and `then` out.

        Returns:
            Whether the trace's record is to be told again. It is if the number was given before: Redis had lost the
            pause or resumption that had it. This one then gets the next number.
        """
        again = 0 < number <= self.number
        self.number = self.number + 1 if again else max(self.number, number)
        if id:
            self._known.append(id)
        self.wanted_by = None if resume else by
        self._asked_by = by
        self.due = None if resume or within_s is None else anyio.current_time() + max(0.0, within_s)
        self.cancels = then == "cancel"
        return again

    @property
    def outstanding(self) -> bool:
        """Whether the last pause or resumption that a client asked for is still to be carried out."""
        return (self.wanted_by is not None) != self.paused

    @contextmanager
    def applying(self) -> Iterator[bool]:
        """Carry pauses out for as long as the context lasts; `False` if another task does so already."""
        if self._applying:
            yield False
            return
        self._applying = True
        try:
            yield True
        finally:
            self._applying = False

    def begin(self) -> None:
        """Pause or resume, as was asked for last."""
        self.paused, self._begun_by = not self.paused, self._asked_by
        self.paused_since = anyio.current_time() if self.paused else None

    def event(self) -> Paused | Resumed:
        """The event for the last `begin`."""
        return (Paused if self.paused else Resumed)(**UNNUMBERED, by=self._begun_by, time=time.time())
