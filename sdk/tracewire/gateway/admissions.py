"""The requests that run, each for as long as its key holds: a key that is withdrawn ends its streams, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from tracewire_bus.transport.loops import Timer, running_loop

from .keys import Caller, Keys

__all__ = ["Admissions"]

#: The least time between two looks at the keys, in seconds.
_LEAST_S: Final = 0.05


class Admissions:
    """The requests of one gateway that were let in by a key. One timer looks after all of them."""

    def __init__(self, keys: Keys, *, age_s: float) -> None:
        self._keys = keys
        self._age_s = max(age_s, _LEAST_S)
        self._open: dict[anyio.CancelScope, Caller] = {}
        self._timer: Timer | None = None

    @contextmanager
    def request(self, caller: Caller) -> Iterator[anyio.CancelScope]:
        """A scope for a request of `caller`. It is cancelled once the caller's key holds no longer."""
        with anyio.CancelScope() as scope:
            self._open[scope] = caller
            if self._timer is None and self._keys.can_change:
                self._set_timer()
            try:
                yield scope
            finally:
                del self._open[scope]
                if not self._open and self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def _set_timer(self) -> None:
        loop = running_loop()
        self._timer = loop.call_at(loop.time() + self._age_s, self._look)

    def _look(self) -> None:
        for scope, caller in list(self._open.items()):
            if not self._keys.holds(caller):
                scope.cancel()
        self._set_timer()
