"""The live requests of a worker: their blocks, live parameters, shared values and declared interventions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight.modeling.vllm.model_runners.GPUModelRunner import Request, Requests

from tracewire_bus.wire.messages import Failure
from tracewire_engine.protocol.keys import (
    BLOCK_ARG,
    DECLARED_ARG,
    EDITS_ARG,
    END_ARG,
    LIVE_ARG,
    PERMIT_ARG,
    RESULT_ARG,
    RUN_ARG,
    SHARED_ARG,
    TRACE_ARG,
)
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.encoder_guard import refuse_encoders
from tracewire_engine.worker.blocks.failures import as_failure, failure_of
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns
from tracewire_engine.worker.blocks.mediator import BlockMediator
from tracewire_engine.worker.blocks.request_result import RequestResults
from tracewire_engine.worker.blocks.shared_values import SharedRuns
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest
from tracewire_engine.worker.declared.ops import Declaration, is_early
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, BlockKey, Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, StageUpdate
from tracewire_engine.worker.parallel.staged_mediator import StagesDiffer

from .large_arrays import LargeArrayBudget
from .save_tracker import SaveTracker

if TYPE_CHECKING:
    from tracewire_engine.worker.block_host.hosted_blocks import HostedBlocks

__all__ = ["RequestProgress", "TracedRequests", "extra_arguments", "saves_of"]


#: The arguments that a host of blocks is given.
_HOSTED = {BLOCK_ARG, EDITS_ARG, END_ARG, LIVE_ARG, RESULT_ARG, RUN_ARG, SHARED_ARG}


class RequestProgress:
    """How far a live request with a block has been reported. nnsight's own record of the request is `Request`."""

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


class TracedRequests(Requests):
    """nnsight's registry of requests, extended: blocks arrive as source text, and each request has its progress.

    A request without a block is not registered here, so that it costs a step nothing. The declared interventions of all
    requests are in `declared`.
    """

    out: set[Any]

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
        self.budget = budget
        self.traced: dict[str, RequestProgress] = {}
        self.shared_runs = SharedRuns(blocks.device, budget)
        self.results = RequestResults()
        #: With `--blocks host`: the blocks of all requests.
        self.hosts: HostedBlocks | None = None
        #: The prefixes of locations whose values belong to no single request.
        self.encoders: tuple[str, ...] = ()

    def add(self, new_requests: list[Any], persistent_objects: dict[str, Any]) -> None:
        new = [data for data in new_requests if data.req_id not in self.traced]
        ranks = self.ranks
        for data in new if ranks is not None else ():
            assert ranks is not None
            # Decided by the request's arguments, which are the same on all ranks.
            if not {BLOCK_ARG, EDITS_ARG, DECLARED_ARG}.isdisjoint(extra_arguments(data)):
                ranks.requests.add(data.req_id)
        self._add(new_requests, persistent_objects)
        for data in new if ranks is not None else ():
            assert ranks is not None
            self._announce(data.req_id, ranks)
        pipeline = self.pipeline
        for data in new if pipeline is not None else ():
            assert pipeline is not None
            # Decided by the request's arguments, which are the same on all stages, even if it failed on this one.
            if not {BLOCK_ARG, EDITS_ARG}.isdisjoint(extra_arguments(data)):
                pipeline.blocks[data.req_id] = set()
                request = self.requests[data.req_id]
                for name, mediator in self.copies(data.req_id).items():
                    mediator.name(f"{request.engine_id}/{request.index}/{name}")

    def _add(self, new_requests: list[Any], persistent_objects: dict[str, Any]) -> None:
        super().add(new_requests, persistent_objects)
        for data in new_requests:
            arguments = extra_arguments(data)
            block, edits = arguments.get(BLOCK_ARG), arguments.get(EDITS_ARG)
            if edits is not None and data.req_id not in self.traced:
                self.requests[data.req_id] = EditedRequest(data.req_id)
            request = self.requests[data.req_id]
            try:
                live = self._join(data.req_id, request, arguments)
            except Exception as exception:  # live parameters that cannot be decoded
                live, request.error = LiveRun(""), failure_of(exception, None)
            names = self._declare(data.req_id, request, arguments, live)
            if block is None and edits is None and request.error is None and not request.workers():
                del self.requests[data.req_id]
            if (block is None and edits is None and request.error is None) or data.req_id in self.traced:
                continue
            if self.hosts is not None and request.error is None:
                self._host(data.req_id, request, arguments, names)
            if self.hosts is not None and request.error is None:
                continue
            traced = self.traced[data.req_id] = RequestProgress(self.budget)
            traced.tells_end = bool(arguments.get(END_ARG))
            traced.tracker.reserved = frozenset(names)
            if self.hosts is not None:
                continue
            if isinstance(request, EditedRequest) and edits is not None:
                request.take(edits, self.blocks)
            if block is None:
                continue
            traced.asks_result = bool(arguments.get(RESULT_ARG))
            try:
                share = arguments.get(SHARED_ARG)
                shared = {} if share is None else self.shared_runs.join(share).values
                request.mediator = self.blocks.mediator(block, live, shared, arguments.get(PERMIT_ARG, b""))
            except BaseException as exception:  # a module or a helper's definition can raise anything, SystemExit too
                request.error = failure_of(exception, None)

    def _host(self, request_id: str, request: Request, arguments: dict[str, Any], names: list[str]) -> None:
        """Have a host run a request's blocks."""
        assert self.hosts is not None
        name, choices = arguments.get(TRACE_ARG) or (request.engine_id, 1)
        given = {key: value for key, value in arguments.items() if key in _HOSTED}
        try:
            self.hosts.open(request_id, request, given, (name, choices), names)
        except OSError as error:
            request.error = Failure(type="BlockHostLost", message=f"no process for blocks: {error}", field="block")
        else:
            del self.requests[request_id]

    def _announce(self, request_id: str, ranks: Ranks) -> None:
        """Tell the other ranks if a request could not be taken here, and let its blocks report later failures."""
        request = self.requests.get(request_id)
        failure = None if request is None else as_failure(request.error)
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
        return self.live.join(run, packed, request_id, request.engine_id, request.index)

    def steer(self, changes: bytes) -> None:
        """Take changes of live parameters (`encode_changes`), and forget the runs that are over."""
        for name in self.live.steer(changes):
            self.shared_runs.forget(name)
        if self.hosts is not None:
            self.hosts.steer(changes)

    def leave(self, request_id: str) -> None:
        """Remove a request that is over from its run of live parameters."""
        run = self.runs.pop(request_id, None)
        if run is not None:
            self.live.leave(run, request_id)

    def _declare(self, request_id: str, request: Request, arguments: dict[str, Any], live: LiveRun) -> list[str]:
        """Take a request's declared interventions, and return the names under which they save."""
        encoded = arguments.get(DECLARED_ARG)
        if encoded is None or request_id in self.declared.live:
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

    def exclude_missed_steps(self, model: Any) -> None:
        """Exclude locations passed in steps without a block from the block's counts.

        nnsight's `scope` does this, but under pipeline parallelism it must happen before the next step.
        """
        counts = model.interleaver.counts
        for mediator in self.out:
            start = mediator.counts_at_start
            for location, count in counts.items():
                passed = count - self.counts.get(location, 0)
                if passed:
                    start[location] = start.get(location, 0) + passed
        self.out = set()

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

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        super().scope(model, [("" if self.has_ended(name) else name, count) for name, count in spans])
        model.interleaver.batcher.counts = [count for _, count in spans]

    def unflatten(self, model: Any) -> None:
        super().unflatten(model)
        model.interleaver.batcher.counts = ()

    def harvest(self, finished: set[str]) -> None:
        """Do nothing: the saves of edits are reported with the request's own."""

    def record(self, mediator: Any) -> None:
        """Note the block's saves. The reporter reads errors from the mediator later."""
        if isinstance(mediator, BlockMediator):
            mediator.found = mediator.saved()
            mediator.nnsight_saved = set(mediator.found)
        else:
            super().record(mediator)


def saves_of(request: Request) -> dict[str, Any]:
    """The values that a request's blocks have saved so far, by name."""
    mediator = request.mediator
    if isinstance(mediator, BlockMediator) and not isinstance(request, EditedRequest):
        return mediator.saved()
    saves: dict[str, Any] = request.saves()
    return saves


def extra_arguments(data: Any) -> dict[str, Any]:
    """The `extra_args` of a new request, in which the adapter passes Tracewire's arguments."""
    return getattr(data.sampling_params, "extra_args", None) or {}
