"""The live requests of a worker: their blocks, live parameters, shared values and declared interventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracewire_bus.wire.messages import Failure
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.keys import (
    BLOCK_ARG,
    DECLARED_ARG,
    EDITS_ARG,
    END_ARG,
    FORCED_ARG,
    LIVE_ARG,
    PERMIT_ARG,
    RESULT_ARG,
    RUN_ARG,
    SCHEDULE_ARG,
    SHARED_ARG,
    TRACE_ARG,
)
from tracewire_engine.protocol.permits import NoPermit
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.encoder_guard import refuse_encoders
from tracewire_engine.worker.blocks.failures import failure_of
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns, ScheduledRun
from tracewire_engine.worker.blocks.request import Request
from tracewire_engine.worker.blocks.request_result import RequestResults
from tracewire_engine.worker.blocks.shared_values import SharedRuns
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest, edits_of
from tracewire_engine.worker.declared.ops import Declaration, is_early
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, BlockKey, Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, StageUpdate
from tracewire_engine.worker.parallel.staged_mediator import StagesDiffer

from .large_arrays import LargeArrayBudget
from .request_book import RequestBook
from .save_tracker import SaveTracker

if TYPE_CHECKING:
    from tracewire_engine.worker.block_host.setup import BlocksElsewhere

__all__ = ["RequestProgress", "TracedRequests", "extra_arguments"]


#: The arguments that a host of blocks is given.
_HOSTED = {BLOCK_ARG, EDITS_ARG, END_ARG, LIVE_ARG, PERMIT_ARG, RESULT_ARG, RUN_ARG, SCHEDULE_ARG, SHARED_ARG}


class RequestProgress:
    """How far a live request with a block has been reported."""

    __slots__ = (*("asks_result", "ended_at", "failure", "index", "last", "steps", "tells_end", "tokens", "tracker"),)

    def __init__(self, budget: LargeArrayBudget) -> None:
        self.tracker = SaveTracker(budget)
        #: The index of the token that the current step samples; negative if it samples none for this request.
        self.index = -1
        #: The index of the token in whose step its blocks ended the request, if they did.
        self.ended_at: int | None = None
        #: The error of reading the request's saves, if that failed.
        self.failure: Failure | None = None
        #: The index of the last token in whose step the saves were read; and how many steps have been reported.
        self.last = -1
        self.steps = 0
        #: Whether only the adapter knows at which token the request ends; and how many tokens the scheduler counted.
        self.tells_end = False
        self.tokens: int | None = None
        #: Whether the request's block uses `tracer.result`.
        self.asks_result = False

    def take_failure(self) -> None:
        """Set `failure` if a save could not be read."""
        broken = self.tracker.broken
        if broken is not None and self.failure is None:
            name, exception = broken
            self.failure = failure_of(exception, None, hint=f" (while the save {name!r} was read)")


class TracedRequests(RequestBook):
    """The live requests with interventions: their blocks, how far they are reported, and their live parameters.

    A request without a block is not registered here, so that it costs a step nothing. The declared interventions of all
    requests are in `declared`.
    """

    def __init__(
        self,
        blocks: BlockCache,
        declared: DeclaredRequests,
        live: LiveRuns,
        budget: LargeArrayBudget,
        pipeline: Pipeline | None,
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        #: Under tensor parallelism, the connection to the other ranks.
        self.ranks: Ranks | None = None
        self.blocks = blocks
        self.declared = declared
        self.live = live
        #: By the scheduler's request id, the name of the run of each request that has live parameters.
        self.runs: dict[str, str] = {}
        #: By the scheduler's request id, the live parameters of each request that has scheduled changes.
        self.scheduled: dict[str, ScheduledRun] = {}
        #: By the scheduler's request id, the first tokens of each request that has some in place of the sampled ones.
        self.forced: dict[str, list[int]] = {}
        self.budget = budget
        self.traced: dict[str, RequestProgress] = {}
        self.shared_runs = SharedRuns(blocks.device, budget)
        self.results = RequestResults()
        #: With `--blocks host`: the blocks of all requests.
        self.hosts: BlocksElsewhere | None = None
        #: The prefixes of locations whose values belong to no single request.
        self.encoders: tuple[str, ...] = ()

    def add(self, new_requests: list[Any]) -> None:
        """Take the interventions of requests that have come, from their `extra_args`."""
        ranks, pipeline = self.ranks, self.pipeline
        for data in new_requests:
            arguments = extra_arguments(data)
            # The next two are decided by the request's arguments, which are the same on all ranks and stages.
            if ranks is not None and not {BLOCK_ARG, EDITS_ARG, DECLARED_ARG}.isdisjoint(arguments):
                ranks.requests.add(data.req_id)
            self._take(data.req_id, arguments)
            if ranks is not None:
                self._announce(data.req_id, ranks)
            blocks = not {BLOCK_ARG, EDITS_ARG}.isdisjoint(arguments)
            if pipeline is not None and blocks and self.hosts is None:
                # Even if it failed on this stage.
                pipeline.blocks[data.req_id] = set()
                request = self.requests[data.req_id]
                for name, mediator in self.copies(data.req_id).items():
                    mediator.name(f"{request.engine_id}/{request.index}/{name}")

    def _take(self, request_id: str, arguments: dict[str, Any]) -> None:
        if FORCED_ARG in arguments:
            self.forced[request_id] = arguments[FORCED_ARG]
        block, edits = arguments.get(BLOCK_ARG), arguments.get(EDITS_ARG)
        request = Request(request_id) if edits is None else EditedRequest(request_id)
        try:
            live = self._join(request_id, request, arguments)
        except Exception as exception:  # live parameters that cannot be decoded
            live, request.error = LiveRun(""), failure_of(exception, None)
        if self.hosts is not None and not (block is None and edits is None):
            # Even if it fails here: the other ranks and stages go by the request's arguments.
            self.hosts.expect(request_id, arguments)
        names = self._declare(request_id, request, arguments, live)
        if block is None and edits is None and request.error is None:
            return
        if self.hosts is not None and request.error is None:
            self._host(request_id, request, arguments, names, live)
            if request.error is None:
                return
        self.requests[request_id] = request
        traced = self.traced[request_id] = RequestProgress(self.budget)
        traced.tells_end = bool(arguments.get(END_ARG))
        traced.tracker.reserved = frozenset(names)
        if self.hosts is not None:
            return
        if isinstance(request, EditedRequest) and edits is not None:
            request.take(edits, self.blocks)
        if block is None:
            return
        traced.asks_result = bool(arguments.get(RESULT_ARG))
        try:
            share = arguments.get(SHARED_ARG)
            shared = {} if share is None else self.shared_runs.join(share).values
            request.mediator = self.blocks.mediator(block, live, shared, arguments.get(PERMIT_ARG, b""))
        except BaseException as exception:  # a module or a helper's definition can raise anything, SystemExit too
            request.error = failure_of(exception, None)

    def _host(
        self, request_id: str, request: Request, arguments: dict[str, Any], names: list[str], live: LiveRun
    ) -> None:
        """Have a host run a request's blocks."""
        assert self.hosts is not None
        name, choices, tenant = arguments.get(TRACE_ARG) or (request.engine_id, 1, "")
        given = {key: value for key, value in arguments.items() if key in _HOSTED}
        run = self.live.runs.get(arguments.get(RUN_ARG, ""))
        if run is not None and run.changed and LIVE_ARG in given:
            # A host does not know of changes that came before the trace's first request.
            given[LIVE_ARG] = pack(run.values)
        try:
            if BLOCK_ARG in given:
                self.blocks.check_permit(given[BLOCK_ARG], given.get(PERMIT_ARG, b""))
            for edit in edits_of(given.get(EDITS_ARG)):
                self.blocks.check_permit(bytes(edit.block), edit.permit)
            self.hosts.open(request_id, request, given, (name, choices, tenant), names, live)
        except (NoPermit, NotImplementedError) as error:
            request.error = failure_of(error, None)
        except OSError as error:
            request.error = Failure(type="BlockHostLost", message=f"no process for blocks: {error}", field="block")

    def _announce(self, request_id: str, ranks: Ranks) -> None:
        """Tell the other ranks if a request could not be taken here, and let its blocks report later failures."""
        request = self.requests.get(request_id)
        failure = None if request is None else request.error
        if failure is not None:
            ranks.fail(BlockKey(request_id, ""), lambda: failure)
            if request_id not in self.declared.live:
                ranks.fail(BlockKey(request_id, DECLARED), lambda: failure)
        for name, mediator in self.copies(request_id).items():
            mediator.ranks, mediator.key = ranks, BlockKey(request_id, name)

    def _join(self, request_id: str, request: Request, arguments: dict[str, Any]) -> LiveRun:
        """The live parameters of the run that a request belongs to."""
        run, packed = arguments.get(RUN_ARG), arguments.get(LIVE_ARG)
        if run is None or packed is None:
            return LiveRun("")
        self.runs[request_id] = run
        joined = self.live.join(run, packed, request_id, request.engine_id, request.index)
        if (schedule := arguments.get(SCHEDULE_ARG)) is None:
            return joined
        own = self.scheduled[request_id] = self.live.schedule(run, request_id, schedule)
        return own

    def steer(self, changes: bytes) -> None:
        """Take changes of live parameters (`encode_changes`), and forget the runs that are over."""
        for name in self.live.steer(changes):
            self.shared_runs.forget(name)
            self.declared.forget(name)
        if self.hosts is not None:
            self.hosts.steer(changes)

    def advance(self, indices: Mapping[str, int]) -> None:
        """Put scheduled changes into effect, for the requests of a step with the index of the token that each samples.

        The step's blocks and declared interventions are to read live parameters after this.
        """
        for request_id, own in self.scheduled.items():
            if request_id in indices and own.advance(indices[request_id]):
                self.declared.update_live(own)

    def live_of(self, request_id: str) -> LiveRun:
        """The live parameters that the blocks of a request read."""
        own = self.scheduled.get(request_id)
        return own or self.live.runs.get(self.runs.get(request_id, "")) or LiveRun("")

    def leave(self, request_id: str) -> None:
        """Remove a request that is over from its run of live parameters."""
        self.scheduled.pop(request_id, None)
        self.forced.pop(request_id, None)
        run = self.runs.pop(request_id, None)
        if run is not None:
            self.live.leave(run, request_id)

    def _declare(self, request_id: str, request: Request, arguments: dict[str, Any], live: LiveRun) -> list[str]:
        """Take a request's declared interventions, and return the names under which they save."""
        encoded = arguments.get(DECLARED_ARG)
        if encoded is None:
            return []
        if self.pipeline is not None and is_early(encoded, self.pipeline.topology):
            self.pipeline.early.add(request_id)
        try:
            declaration = Declaration(request.engine_id, request.index, encoded, live, self.declared.decoded)
            for location in declaration.locations if self.encoders else ():
                refuse_encoders(self.encoders, location)
        except Exception as exception:  # for example, too large for the device
            request.error = Failure(type=type(exception).__name__, message=str(exception), field="interventions")
            return []
        self.declared.add(request_id, declaration)
        return declaration.names

    def copies(self, request: str) -> dict[str, Any]:
        """The mediators of a request in this process: those of edits by name, and the request's own under `""`."""
        known = self.requests.get(request)
        if known is None:
            return {}
        found: dict[str, Any] = dict(known.copies)
        if known.mediator is not None:
            found[""] = known.mediator
        return found

    def with_sharers(self, requests: set[str]) -> set[str]:
        """The given requests, and all requests whose blocks share values with theirs."""
        shared = self.shared_runs
        if not shared.runs:
            return requests
        runs = {shared.run_name(Request(request).engine_id) for request in requests} - {None}
        sharers = {name for name, request in self.requests.items() if shared.run_name(request.engine_id) in runs}
        return requests | sharers

    def fail(self, update: StageUpdate) -> None:
        """Take the failures of another pipeline stage, except those of blocks that failed here too."""
        request, copies = self.requests.get(update.request), self.copies(update.request)
        for name, error in update.errors.items():
            mediator = copies.get(name)
            if request is None or (mediator is not None and mediator.exception is not None):
                continue
            if not name:
                request.error = request.error or error
            if mediator is not None:
                mediator.halt(StagesDiffer(error.message))

    def has_ended(self, request_id: str) -> bool:
        """Whether the blocks of a request have ended it, which is the same on all ranks.

        The model still computes such a request until the adapter aborts it, but does not serve its blocks.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        mediator = request.mediator
        if mediator is not None and mediator.exception is not None:
            return True
        return isinstance(request, EditedRequest) and request.has_failed

    def scope(self, model: Any, spans: Sequence[tuple[str, int]]) -> None:
        super().scope(model, [("" if self.has_ended(name) else name, count) for name, count in spans])
        model.interleaver.batcher.counts = [count for _, count in spans]

    def unflatten(self, model: Any) -> None:
        super().unflatten(model)
        model.interleaver.batcher.counts = ()


def extra_arguments(data: Any) -> dict[str, Any]:
    """The `extra_args` of a new request, in which the adapter passes Tracewire's arguments."""
    return getattr(data.sampling_params, "extra_args", None) or {}
