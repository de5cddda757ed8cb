"""The traces of all clients, as `client.traces`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from tracewire.checks import check_count, check_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.traces.model import Model, model_name
from tracewire_bus.store.trace_list import ListedTrace, parse_place

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
        wanted = None if model is None else model_name(model)
        start = None if before is None else parse_place(check_text("before", before))
        for state in states or ():
            if state not in STATES:
                raise ValueError(f"states: expected some of {', '.join(sorted(STATES))}, got {shown(state)}")
        left = None if limit is None else check_count("limit", limit)

        def fits(trace: ListedTrace) -> bool:
            return (
                wanted in (None, trace.model)
                and client in (None, trace.client)
                and (states is None or trace.state in states)
                and trace.trace_id.startswith(id_prefix)
            )

        async def pages() -> AsyncIterator[Sequence[ListedTrace]]:
            count = 0
            with bus_errors():
                async for trace in self._session.open_bus().list_traces(start):
                    if fits(trace):
                        yield [trace]
                        count += 1
                        if count == left:
                            return

        return Listing(pages)

    def __repr__(self) -> str:
        return "<Traces>"
