"""What a tensor-parallel rank does for blocks in hosts, which belong to the first rank: it follows that rank.

No block runs for this rank. At each step and location it does what the first rank tells it (`rank_link.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes, SharedValueError
from tracewire_engine.worker.blocks.live_params import LiveRun

from .accounts import Accounts
from .answers import ModelAnswers
from .blocks_of_others import BlocksOfOthers, with_edits
from .rank_link import Called, Edit, RankLink, Served, StepBegan, StepWatch
from .stage_rows import HostedRequests

__all__ = ["FollowedBlocks"]

logger = logging.getLogger("vllm.tracewire")


class FollowedBlocks(BlocksOfOthers):
    """Takes the place of `HostedBlocks` on all ranks but the first.

    Args:
        model: nnsight's model.
        link: to the first rank.
        fail: tells the first rank that a request's rows could not be put into a value here.
        accounts: of blocks, if there are earlier stages.
    """

    def __init__(
        self,
        model: Any,
        link: RankLink,
        fail: Callable[[str, Failure], None],
        accounts: Accounts | None = None,
    ) -> None:
        self._link, self._fail, self._accounts = link, fail, accounts
        self._requests = HostedRequests()
        #: Whether the step has begun before this stage came to it.
        self._ahead = False
        #: Calls modules, as on the first rank.
        self.answers = ModelAnswers(model)
        super().__init__()
        self._watch = StepWatch()
        #: Whether blocks in hosts take part in the step.
        self.active = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        request: Any,
        arguments: dict[str, Any],
        trace: tuple[str, int, str | None],
        reserved: Iterable[str],
        live: LiveRun,
    ) -> None:
        """Take a new request with blocks, as `HostedBlocks.open` does."""
        self.expect(request_id, arguments)
        self._by_request[request_id] = request.engine_id

    def expect(self, request_id: str, arguments: dict[str, Any]) -> None:
        """Note that a new request has blocks, as `HostedBlocks.expect` does."""
        self._link.requests.add(request_id)
        if self._accounts is not None:
            self._requests.add(request_id, self._accounts.of(arguments))

    def finish(self, request_id: str, tokens: int | None, failure: Failure | None, failed_at: int | None) -> bool:
        """Forget a request that the scheduler has ended. Returns whether it had blocks."""
        self._link.requests.discard(request_id)
        self._requests.discard(request_id)
        return self._by_request.pop(request_id, None) is not None

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_ahead(self, scheduled: Collection[str]) -> None:
        """Begin a step with these requests if earlier stages wait for blocks in it, as `HostedBlocks.begin_ahead` does.

        Meanwhile this rank runs the modules that the blocks call.
        """
        if self._requests.wait_in(scheduled):
            self._begin(scheduled)
            self._ahead = True

    def begin_for(self, states: Mapping[str, Any], scheduled: dict[str, int], order: Sequence[str]) -> bool:
        """Begin a step with these requests. Returns whether blocks in hosts take part in it."""
        if not self._ahead:
            self._begin(scheduled)
        self._ahead = False
        return self.active

    def _begin(self, scheduled: Collection[str]) -> None:
        self.active = self._link.takes_part(scheduled)
        if self.active:
            began, _ = self._told(StepBegan)
            self._watch = began.watch or self._watch

    def _told(self, kind: type[Any]) -> tuple[Any, RowBytes]:
        """The first rank's next message of a kind. The modules that it calls before are run here too."""
        while True:
            message, data = self._link.hear()
            if isinstance(message, kind):
                return message, data
            if not isinstance(message, Called):
                raise RuntimeError(f"the first rank says {message!r:.200} where {kind.__name__} was expected")
            # Where it raises here, it raises on all ranks, and the first one tells the block.
            with suppress(Exception):
                self.answers.call(message.path, message.value, data)

    def pass_by(self, locations: Collection[str]) -> bool:
        """Return whether blocks want nothing at any of these locations."""
        return not (self.active and any(location in self._watch for location in locations))

    def wants(self, location: str) -> bool:
        """Whether the first rank gives its hosts the value at a location when the model passes it the next time."""
        return self.active and self._watch.due(location)

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> Any:
        """Do what the first rank does at a location. Returns the value as the blocks leave it."""
        if not self._watch.passes(location):
            return value
        served: Served
        served, data = self._told(Served)
        self._watch = served.watch or self._watch
        return with_edits(value, served.edits, data, self._broken, by_request=by_request)

    def _broken(self, edit: Edit, error: Exception) -> None:
        if isinstance(error, SharedValueError):
            # The host sent rows that do not fit. The first rank finds the same and ends the host.
            return
        logger.warning("rows that blocks have left cannot be put into the model's value: %s", error)
        failure = Failure(type=type(error).__name__, message=str(error), field="block")
        for request in edit.requests:
            self._fail(request, failure)

    def end(self) -> None:
        """End the step."""
        self.active = False
