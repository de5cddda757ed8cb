"""How long a step of the model waits for the hosts of blocks, and what they reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import wait_for
from tracewire_engine.protocol.block_host import Reply

from .host import BlockHost
from .report_thread import lost_by, too_slow

__all__ = ["Patience", "wait_for_replies"]

_WAITED = "within one step, while every request waited for it"

#: The share of a step's time that each host has, whatever the others take.
_SHARE = 0.5


class Patience:
    """How long a step waits for all hosts.

    Args:
        step_s: the time that they have together, in seconds.
        step: the number of the step.
    """

    def __init__(self, step_s: float, step: int = 0) -> None:
        self.step_s = self._left_s = step_s
        self.step = step
        self._used: dict[BlockHost, float] = {}

    def left_s(self, host: BlockHost) -> float:
        """How long the step waits for a host from now on: all that is left, or its share if others have used it up."""
        return max(self._left_s, _SHARE * self.step_s - self._used.get(host, 0.0))

    def spend(self, seconds: float) -> None:
        """Count time for which the step has waited."""
        self._left_s -= seconds

    def spend_for(self, host: BlockHost, seconds: float) -> None:
        """Count time for which the step has waited for a host, perhaps beside others."""
        self._used[host] = self._used.get(host, 0.0) + seconds

    def over(self, host: BlockHost) -> Failure:
        """Why a host is ended for which the step has waited too long."""
        return too_slow(host, self.step_s, _WAITED)


def wait_for_replies(
    hosts: Sequence[BlockHost],
    patience: Patience,
    take: Callable[[BlockHost], Reply | None],
    fail: Callable[[BlockHost, Failure], None],
) -> dict[BlockHost, Reply]:
    """Wait for the replies of hosts that were told so.

    Args:
        hosts: that were sent their turns.
        patience: of the step.
        take: takes what a host has said. Returns its reply, if it has come.
        fail: ends a host that is gone, too slow or of no use.

    Returns:
        The replies of the hosts that are of use.
    """
    waiting = list(hosts)
    began = time.monotonic()
    replies: dict[BlockHost, Reply] = {}
    while waiting:
        left = min(map(patience.left_s, waiting))
        ready = wait_for([host.calls for host in waiting], left - time.monotonic() + began)
        passed = time.monotonic() - began
        for host in list(waiting):
            try:
                reply = take(host) if host.calls in ready else None
            except Exception as error:  # it costs the host, not the engine
                fail(host, lost_by(error, host))
            else:
                if reply is not None:
                    replies[host] = reply
                elif passed >= patience.left_s(host):
                    fail(host, patience.over(host))
                else:
                    continue
            waiting.remove(host)
            patience.spend_for(host, passed)
    patience.spend(time.monotonic() - began)
    return {host: reply for host, reply in replies.items() if host.failure is None}
