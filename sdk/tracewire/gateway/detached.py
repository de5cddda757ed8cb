"""The tokens of detached traces, which no request reads: they count against their keys' limits, too."""

from __future__ import annotations

import logging
from typing import Final

from tracewire import Client, Output, TracewireError
from tracewire_bus.transport.loops import Task, running_loop, wait

from .keys import Caller
from .limits import Limits

__all__ = ["DetachedTokens"]

logger = logging.getLogger("tracewire.gateway")

#: How many traces are remembered, so that one that is submitted again is counted once.
_KEPT: Final = 4096


class DetachedTokens:
    """Follows the detached traces of keys with a limit on tokens, for as long as they run."""

    def __init__(self, client: Client, limits: Limits) -> None:
        self._client = client
        self._limits = limits
        self._tasks: set[Task[None]] = set()
        #: The traces that are counted, or were to their end: None. Of one whose events broke off: its last position.
        self._counted: dict[str, str | None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def count(self, caller: Caller, trace_id: str, since: str = "start") -> None:
        """Count the tokens of a trace after `since`, unless they are counted already, or need not be."""
        if not caller.tokens_per_minute:
            return
        if trace_id in self._counted:
            reached = self._counted.pop(trace_id)
            if reached is None:
                self._counted[trace_id] = None
                return
            since = reached
        while len(self._counted) >= _KEPT:
            del self._counted[next(iter(self._counted))]
        self._counted[trace_id] = None
        task = running_loop().create_task(self._follow(caller, trace_id, since), name="tracewire: a detached trace")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Follow no trace any longer."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            await wait(task)

    async def _follow(self, caller: Caller, trace_id: str, since: str) -> None:
        subscription = self._client.subscribe(trace_id, since=since, names=())
        try:
            async with subscription:
                async for event in subscription:
                    if isinstance(event, Output):
                        self._limits.sampled(caller, len(event.token_ids))
        except TracewireError as error:
            # Such as one that was never submitted, since its client has left before. It may be submitted again.
            if trace_id in self._counted:
                self._counted[trace_id] = subscription.position or since
            logger.info("the tokens of the trace %s are not counted any further: %s", trace_id, error)
