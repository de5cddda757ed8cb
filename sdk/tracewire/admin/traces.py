"""The traces of all clients, as `client.traces`."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from tracewire.checks import check_count, check_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.traces.model import Model, model_name
from tracewire_bus.store.trace_list import ListedTrace, parse_place, place_text

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.session import Session

__all__ = ["Traces"]

#: The states of a trace, from its submission on.
STATES = frozenset({"queued", "running", "paused", "finished", "stopped", "cancelled", "expired", "rejected", "failed"})


class Traces:
    """The traces that were submitted of late, running and ended. Available as `Client.traces`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(
        self,
        *,
        model: Model | str | None = None,
        client: str | None = None,
        states: Sequence[str] | None = None,
        id_prefix: str = "",
        before: str | None = None,
        limit: int | None = None,
    ) -> Listing[ListedTrace]:
        """The traces, the newest first: those of one `model`, of one submitting `client`, in one of `states`.

        Redis remembers submissions for a day, and about 100,000 of them. A trace in the list may have expired, so that
        its events can no longer be read. `id_prefix` limits the list to ids that begin so. `before` is the `place` of a
        listed trace, after which the list goes on. `limit` is how many traces are listed at most.

        Raises:
            ValueError: `before` is no place, `limit` is not positive, or a state is none.
        """
        asked = _Asked(model, client, states, id_prefix, before)
        left = None if limit is None else check_count("limit", limit)

        async def pages() -> AsyncIterator[Sequence[ListedTrace]]:
            count = 0
            with bus_errors():
                async for trace in self._session.open_bus().list_traces(asked.before, id_prefix=id_prefix):
                    if asked.fits(trace):
                        yield [trace]
                        count += 1
                        if count == left:
                            return

        return Listing(pages)

    async def _page(
        self,
        *,
        model: str | None,
        client: str | None,
        states: Sequence[str] | None,
        id_prefix: str,
        before: str | None,
        limit: int,
        entries: int,
    ) -> tuple[Sequence[ListedTrace], str | None]:
        """At most `limit` traces among the next `entries` lifecycle entries, and the `before` of the next page.

        Raises:
            ValueError: `before` is no place, or a state is none.
        """
        asked = _Asked(model, client, states, id_prefix, before)
        found: builtins.list[ListedTrace] = []
        with bus_errors():
            scan = self._session.open_bus().list_traces(asked.before, id_prefix=id_prefix, most=entries)
            async for trace in scan:
                if asked.fits(trace):
                    found.append(trace)
                    if len(found) == limit:
                        return found, trace.place
        return found, None if scan.stopped_at is None else place_text(scan.stopped_at)

    def __repr__(self) -> str:
        return "<Traces>"


class _Asked:
    """Which traces are asked for.

    Raises:
        ValueError: `before` is no place, or a state is none.
    """

    def __init__(
        self,
        model: Model | str | None,
        client: str | None,
        states: Sequence[str] | None,
        id_prefix: str,
        before: str | None,
    ) -> None:
        self._model = None if model is None else model_name(model)
        self._client = client
        self._states = states
        self._id_prefix = id_prefix
        self.before = None if before is None else parse_place(check_text("before", before))
        for state in states or ():
            if state not in STATES:
                raise ValueError(f"states: expected some of {', '.join(sorted(STATES))}, got {shown(state)}")

    def fits(self, trace: ListedTrace) -> bool:
        """Whether a trace is one of them."""
        return (
            self._model in (None, trace.model)
            and self._client in (None, trace.client)
            and (self._states is None or trace.state in self._states)
            and trace.trace_id.startswith(self._id_prefix)
        )
