"""What an earlier pipeline stage does for blocks in hosts, which belong to the last stage (`stage_rows.py`)."""

from __future__ import annotations

import logging
import queue
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes, SharedValueError
from tracewire_engine.link.thread_names import name_thread
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.parallel.rank_sockets import RankSockets
from tracewire_engine.worker.request_book import token_index

from .accounts import Accounts
from .answers import ModelAnswers
from .blocks_of_others import BlocksOfOthers, with_edits
from .rank_link import Called, Edit, RankLink, Served, StepBegan, StepWatch
from .report_thread import lost
from .rows import StepRows
from .stage_rows import (
    HostedRequests,
    Names,
    Pieces,
    StageAnswer,
    StageBegan,
    StageMessage,
    StagePart,
    StageReached,
    packed,
    packed_whole,
)

__all__ = ["ForwardedBlocks"]

logger = logging.getLogger("vllm.tracewire")

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[StepBegan | Served | Called] = msgspec.msgpack.Decoder(StepBegan | Served | Called)

_Answer = TypeVar("_Answer", StepBegan, Served)


class ForwardedBlocks(BlocksOfOthers):
    """Takes the place of `HostedBlocks` on the earlier stages: sends what blocks ask for here to the last stage.

    Args:
        model: nnsight's model.
        accounts: of blocks.
        group: of the stages.
        address: of the link to the adapter.
        ranks: connects the tensor-parallel ranks of this stage, if there are several. The first one sends.
        fail: on the other ranks, tells the first one that a request's rows could not be put into a value here.
    """

    def __init__(
        self,
        model: Any,
        accounts: Accounts,
        group: Any,
        address: str,
        ranks: RankLink | None = None,
        fail: Callable[[str, Failure], None] | None = None,
    ) -> None:
        #: Calls modules for blocks.
        self.answers = ModelAnswers(model)
        self._accounts, self._stage, self._ranks, self._fail = accounts, group.rank_in_group, ranks, fail
        self._sends = ranks is None or ranks.first
        self._requests = HostedRequests()
        super().__init__()
        #: Where blocks may read in the step, if all of them only read; otherwise where hosts want something.
        self._reads: frozenset[str] = frozenset()
        self._watch: StepWatch | None = None
        #: The requests of the step.
        self._step: Collection[str] = ()
        #: The rows of requests with blocks; `None` outside of a step with any.
        self._rows: StepRows | None = None
        self._names = Names()
        self._passed: array[int] = array("H")
        self._reached: list[StageReached] = []
        self._pieces = Pieces()
        self._failures: dict[str, Failure] = {}
        sockets = RankSockets(group, address, "stages")
        self._pull, self._send = sockets.pull, _Sender(sockets.push[-1])
        if not self._sends:
            sockets.close()

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
        self._requests.add(request_id, self._accounts.of(arguments))

    def finish(self, request_id: str, tokens: int | None, failure: Failure | None, failed_at: int | None) -> bool:
        """Forget a request that the scheduler has ended. Returns whether it had blocks."""
        self._requests.discard(request_id)
        return self._by_request.pop(request_id, None) is not None

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether blocks take part in the step."""
        return self._rows is not None

    def begin_for(self, states: Mapping[str, Any], scheduled: dict[str, int], order: Sequence[str]) -> bool:
        """Begin a step, as `HostedBlocks.begin_for` does. Returns whether blocks take part in it."""
        self._rows = self._requests.rows_of(scheduled, order)
        self._reads, self._watch, self._step = frozenset(), None, scheduled
        if self._rows is None:
            return False
        if not self._requests.wait_in(scheduled):
            self._reads = self._requests.reads_in(scheduled)
            return True
        requests = []
        for request_id in order:
            if (count := scheduled.get(request_id)) is not None:
                state = states.get(request_id)
                index = 0 if state is None else token_index(state, count)
                requests.append((request_id, count, index))
        self._tell(StageBegan(self._stage, requests), Pieces())
        self._watch = self._told(StepBegan)[0].watch or StepWatch()
        return True

    def pass_by(self, locations: Collection[str]) -> bool:
        """Count these locations as passed, if no block wants anything there. Returns whether none does."""
        if self._rows is None:
            return True
        watched: Collection[str] | StepWatch = self._reads if self._watch is None else self._watch
        if any(location in watched for location in locations):
            return False
        self._passed.extend(map(self._names.place, locations))
        return True

    def wants(self, location: str) -> bool:
        """Whether the last stage is sent the value at a location when the model passes it the next time."""
        return location in self._reads if self._watch is None else self._watch.due(location)

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> Any:
        """Serve a location to the blocks of the last stage's hosts. Returns the value as they leave it."""
        place = self._names.place(location)
        watch, rows = self._watch, self._rows
        observed = location in (self._reads if watch is None else watch.observed)
        waits = watch is not None and watch.passes(location)
        if not self._sends:
            return self._served(value) if waits else value
        if rows is None or not (observed or waits):
            self._passed.append(place)
            return value
        pieces = self._pieces if watch is None else Pieces()
        try:
            shared = packed(value, rows, pieces)
        except Exception as error:  # it costs the hosts that ask for it, not the engine
            self._passed.append(place)
            failure = lost(f"{location} cannot be shared: {type(error).__name__}: {error}")
            self._failures |= dict.fromkeys(self._requests.asking(location, self._step), failure)
            if waits and self._ranks is not None:
                self._ranks.tell(Served())
            return value
        before, self._passed = self._passed.tobytes(), array("H")
        reached = StageReached(self._stage, [], place, before, shared, waits)
        if watch is None:
            self._reached.append(reached)
            return value
        reached.names, reached.failures = self._names.take(), self._take_failures()
        self._tell(reached, pieces)
        return self._served(value) if waits else value

    def _served(self, value: Any) -> Any:
        served, data = self._told(Served)
        self._watch = served.watch or self._watch
        return with_edits(value, served.edits, data, self._broken, by_request=False)

    def _broken(self, edit: Edit, error: Exception) -> None:
        if not isinstance(error, SharedValueError):
            logger.warning("rows that blocks have left cannot be put into the model's value: %s", error)
        elif not self._sends:
            # The first rank finds the same.
            return
        failure = Failure(type=type(error).__name__, message=str(error), field="block")
        for request in edit.requests:
            self._note(request, failure)

    def _note(self, request: str, failure: Failure) -> None:
        """Note that this stage could not do its part for a request. The last stage is told with the next message."""
        if self._sends:
            self._failures[request] = failure
        elif self._fail is not None:
            self._fail(request, failure)

    def fail(self, request_id: str, failure: Failure) -> bool:
        """End the host of a request for which another rank could not do its part. Returns whether it has blocks."""
        if request_id in self._by_request:
            self._note(request_id, failure)
        return request_id in self._by_request

    def _take_failures(self) -> dict[str, Failure]:
        failures, self._failures = self._failures, {}
        return failures

    def end(self) -> None:
        """End this stage's part of the step: tell the last stage."""
        if self._rows is None:
            return
        self._rows, self._watch, self._reads = None, None, frozenset()
        reached, self._reached = self._reached, []
        pieces, self._pieces = self._pieces, Pieces()
        passed, self._passed = self._passed.tobytes(), array("H")
        self._tell(StagePart(self._stage, self._names.take(), reached, passed, self._take_failures()), pieces)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _tell(self, message: StageMessage, pieces: Pieces) -> None:
        if self._sends:
            self._send(_encode(message), pieces, later=isinstance(message, StagePart))

    def _told(self, kind: type[_Answer]) -> tuple[_Answer, RowBytes]:
        """The last stage's next message of a kind, behind the calls that it asks for.

        If the last stage ends, vLLM ends this one.
        """
        while True:
            head, *data = self._parts()
            message, rows = _message.decode(head), RowBytes.of(data)
            if isinstance(message, kind):
                return message, rows
            if not isinstance(message, Called):
                raise RuntimeError(f"the last stage says {message!r:.200} where {kind.__name__} was expected")
            self._call(message, rows)

    def _parts(self) -> list[bytes]:
        """The last stage's next message, which the first rank passes on to the others."""
        if self._ranks is None:
            return self._pull.recv_multipart(copy=True)
        if not self._sends:
            return self._ranks.parts()
        parts = self._pull.recv_multipart(copy=True)
        self._ranks.pass_on(parts)
        return parts

    def _call(self, called: Called, rows: RowBytes) -> None:
        """Call a module for a block, and answer. All ranks do, since each may have a part of the module."""
        answer, pieces = StageAnswer(self._stage), Pieces()
        try:
            answer.value = packed_whole(self.answers.checked_call(called.path, called.value, rows), pieces)
        except Exception as error:
            answer, pieces = StageAnswer(self._stage, error=(type(error).__name__, str(error)[:10_000])), Pieces()
        self._tell(answer, pieces)


class _Sender:
    """Sends messages in their order, from a thread of its own while copies from a GPU must be waited for."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._waiting: queue.SimpleQueue[tuple[bytes, Pieces]] = queue.SimpleQueue()
        self._threaded = False

    def __call__(self, head: bytes, pieces: Pieces, *, later: bool) -> None:
        if not self._threaded and not (later and pieces.late):
            self._socket.send_multipart([head, pieces.bytes()])
            return
        if not self._threaded:
            self._threaded = True
            threading.Thread(target=self._run, name="tracewire stages", daemon=True).start()
        self._waiting.put((head, pieces))

    def _run(self) -> None:
        name_thread("stages")
        while True:
            head, pieces = self._waiting.get()
            self._socket.send_multipart([head, pieces.bytes()])
