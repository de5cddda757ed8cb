"""Our model runner: nnsight's, plus the delta path.

nnsight's runner interleaves blocks with the forward pass, the logits and the samples. This one changes how a block
comes in (source text on the request, see `compiler.py`, instead of a pickled mediator) and how what it saved gets out:
what each live request newly saved leaves by the link in one message a step, from the thread that the blocks run on,
behind the answer to `sample_tokens` where the worker has a process of its own. A request's worker state goes when the
scheduler says that the request is over. There is no RPC on either way. What large arrays need besides being frozen,
and the reports of requests that have any, is left to another thread (`large_arrays.py`, `blob_link.py`).

`TracewireRunner` is mixed into vLLM's runner for the platform at hand; see `worker.py`.
"""

from __future__ import annotations

import difflib
import logging
import pickle  # noqa: TID251 (nnsight's own collect, within this process)
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner, Request
from nnsight.modeling.vllm.vllm import VLLM
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from tracewire_bus.wire.messages import Failure, Manifest
from tracewire_bus.wire.values import digest
from tracewire_engine.link.step_link import LinkSender
from tracewire_engine.model_layout import find_layers, find_norm, takes_residual
from tracewire_engine.protocol.keys import (
    BLOB_THRESHOLD,
    BLOCK_TIMEOUT,
    CHECK_COLLECT,
    LINK_ADDRESS,
)
from tracewire_engine.protocol.messages import Applied, FinishRecord, Report, StepRecord
from tracewire_engine.worker.blocks import save_marks as marks
from tracewire_engine.worker.blocks import time_limit as watchdog
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.encoder_guard import encoder_locations
from tracewire_engine.worker.blocks.failures import failure_of, is_stop
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRun, LiveRuns
from tracewire_engine.worker.blocks.mediator import SAMPLES, BlockMediator
from tracewire_engine.worker.blocks.plain_values import plain, trim
from tracewire_engine.worker.blocks.residual import Residual
from tracewire_engine.worker.blocks.shared_values import SharedRun
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest
from tracewire_engine.worker.declared.cuda_graphs import breakable_throughout, without_taps
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.parallel.merged_columns import ColumnFragments
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, Key, Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, StageState, shared
from tracewire_engine.worker.parallel.staged_mediator import StagedMediator

from .blob_sender import BlobSender
from .deferred_report import AfterAnswer
from .host_copy import HostCopy, ToHost
from .kv_offload import KeptCache, KvBlocks
from .large_arrays import Hold
from .remote_inputs import inputs_at
from .reporting import BEHIND, NO_DELTAS, PACE, PendingReport, encode_deltas, encoder
from .requests import BLOCKS, TracedRequest, TracedRequests, arguments_of, saves_of, unchecked, waits_for_result
from .save_tracker import Ending

__all__ = ["TracedModel", "TracewireRunner"]

logger = logging.getLogger("vllm.tracewire")

_Counted: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


class TracedModel(VLLM):
    """The model as a block sees it: nnsight's envoy over vLLM's module, and the residual stream by its name."""

    def residual(self, index: int) -> Residual:
        """The residual stream after decoder layer `index` (negative counts from the last).

        Raises:
            IndexError: no such layer.
            ValueError: the model has no list of decoder layers that could be told.
        """
        path: str = self.__dict__["_tracewire_layers"]
        if not path:
            raise ValueError("this model has no list of decoder layers that residual(i) could count in")
        layers: Any = self
        for name in path.split("."):
            layers = getattr(layers, name)
        count = len(layers)
        if not -count <= index < count:
            raise IndexError(f"residual({index}): {path} has {count} layers, 0 to {count - 1}")
        return Residual(layers[index % count], index % count, self.__dict__["_tracewire_sums"])


class TracewireRunner(NNsightGPUModelRunner):
    """A vLLM model runner that runs blocks and reports what they save, step by step."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        marks.install()
        watchdog.keep_modules(("nnsight", "tracewire"), marks.remount)
        watchdog.limit_turns(self.vllm_config.additional_config.get(BLOCK_TIMEOUT, 0.0))
        model = self.nnsight_model
        model.__class__ = TracedModel
        if model.interleaver.taps:
            vllm_runner: Any = self
            vllm_runner.model = breakable_throughout(vllm_runner.model, self.vllm_config)
        model.__dict__["_tracewire_layers"] = layers = find_layers(
            self.get_model().named_modules(),
            getattr(self.model_config.hf_text_config, "num_hidden_layers", 0),
        )
        decoder: Any = self.get_model().get_submodule(layers) if layers else ()
        model.__dict__["_tracewire_sums"] = takes_residual(decoder)
        address = self.vllm_config.additional_config.get(LINK_ADDRESS)
        self.tracewire_inputs = inputs_at(address or "")
        pipeline: Pipeline | None = getattr(self, "tracewire_pipeline", None)
        self.tracewire_pipeline = pipeline
        self.tracewire_hold = Hold(self.vllm_config.additional_config.get(BLOB_THRESHOLD, 0))
        self.tracewire_declared = DeclaredRequests(self.device, sums=model.__dict__["_tracewire_sums"])
        DeclaredInterleaver.install(model.interleaver, self.tracewire_declared, self.get_model())
        model.interleaver.batcher = RowBatcher(None)
        model.interleaver.fragments.__class__ = ColumnFragments
        self.tracewire_hold.changes = self._changes
        kind_of_block: type[BlockMediator] = BlockMediator
        if pipeline is not None:
            topology = model.interleaver.topology = pipeline.topology
            model.interleaver.elsewhere = topology.elsewhere
            self.tracewire_declared.here = lambda location: topology.owner(location) in (None, topology.index)
            topology.adopt(model)
            kind_of_block = StagedMediator
        self.nnsight_requests = TracedRequests(
            BlockCache(model, self.device, self.tracewire_inputs, kind=kind_of_block),
            self.tracewire_declared,
            LiveRuns(),
            self.tracewire_hold,
            pipeline,
        )
        model.interleaver.encoders = self.nnsight_requests.encoders = encoder_locations(self.get_model())
        self.tracewire_ranks: Ranks | None = None
        #: Whether the step under way has blocks or interventions, which all ranks know alike.
        self.tracewire_shared = False
        if get_tp_group().world_size > 1:
            limit_s = self.vllm_config.additional_config.get(BLOCK_TIMEOUT, 0.0)
            self.tracewire_ranks = Ranks(get_tp_group(), address or "", limit_s)
            self.tracewire_ranks.watch_calls()
        model.interleaver.ranks = self.tracewire_declared.ranks = self.tracewire_ranks
        self.nnsight_requests.ranks = self.tracewire_ranks
        self.tracewire_norm = find_norm(self.get_model(), model.__dict__["_tracewire_layers"])
        self.tracewire_after = AfterAnswer()
        self.tracewire_unsent = PendingReport(Report())
        self.tracewire_behind: deque[PendingReport] = deque()
        self.tracewire_sent = 0.0
        self.tracewire_unwatched = False
        self.tracewire_kept: KeptCache | None = None
        self.tracewire_blocks: KvBlocks | None = None
        kind: Any = type(model)
        self.tracewire_phases = frozenset(value._location(model) for value in (kind.logits, kind.samples))
        # Every rank runs every block, and gathers what it reads: one rank's values are all there are. Of a pipeline's
        # stages, the last has them in the step that they belong to.
        reporting = get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank
        self.tracewire_check_collect = bool(self.vllm_config.additional_config.get(CHECK_COLLECT))
        self.tracewire_link = LinkSender(address) if address and reporting else None
        self.tracewire_blobs = BlobSender(address) if address and reporting else None

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.tracewire_after.finish()
        book = self.nnsight_requests
        if book.traced or book.results.waiting or scheduler_output.scheduled_new_reqs:
            # Code of blocks runs in this step, or may.
            watchdog.begin_step()
        output = super().execute_model(scheduler_output, intermediate_tensors)
        pipeline = self.tracewire_pipeline
        if pipeline is not None and pipeline.index < pipeline.topology.last:
            self.tracewire_declared.check_reached()
            self._tell(pipeline)
        return output

    def _update_states(self, scheduler_output: Any) -> Any:
        self._leave_blocks(scheduler_output)
        ranks = self.tracewire_ranks
        if ranks is not None:
            ranks.begin()
            self._part(ranks)
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            self.nnsight_requests.settle(self.nnsight_model)
            involved = scheduler_output.finished_req_ids | scheduler_output.num_scheduled_tokens.keys()
            pipeline.catch_up(self.nnsight_requests.with_sharers(involved), self.nnsight_requests)
        if scheduler_output.finished_req_ids:
            self._finish_requests(scheduler_output.finished_req_ids, getattr(scheduler_output, "tracewire_ends", {}))
        changed = self.nnsight_requests.live.apply()
        for run in changed:
            self.tracewire_declared.renew(run)
        corrections = self._scope_step(scheduler_output)
        if self.tracewire_kept:
            cached = scheduler_output.scheduled_cached_reqs
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if request_id in cached.resumed_req_ids:
                    self.tracewire_kept.restore(request_id, blocks)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, traced in self.nnsight_requests.traced.items():
            state = self.requests.get(request_id)
            if state is not None and request_id in scheduled:
                # The index of the token that this step samples; negative while a prompt is only partly computed.
                traced.index = state.num_computed_tokens + scheduled[request_id] - state.num_prompt_tokens
            else:
                traced.index = -1
        self.tracewire_shared = ranks is not None and not ranks.requests.isdisjoint(scheduled)
        self.tracewire_unsent.report.applied.extend(self._applied(run, scheduled) for run in changed)
        declared = self.tracewire_declared
        if declared.live:
            ids = [request_id for request_id in self.input_batch.req_ids if request_id in scheduled]
            declared.begin(ids, scheduled, scheduler_output.total_num_scheduled_tokens, self.requests)
            self.nnsight_model.interleaver.arm(declared.stages)
        elif declared.stages:
            declared.begin([], {}, 0, {})
        if pipeline is not None:
            for message in pipeline.take_earlier(self.nnsight_requests):
                declared.fail_with(message.failures)
                declared.supply(message.read)
            if pipeline.sharing:
                self.nnsight_model.interleaver.reindex()
        # A step without tokens is the last one for now.
        self._send(wait=not scheduler_output.total_num_scheduled_tokens)
        return corrections

    def _leave_blocks(self, scheduler_output: Any) -> None:
        """Copy the KV of traced requests that were just preempted, and zero the blocks that traced requests have left.

        From now on those blocks are anybody's.
        """
        unclean: list[int] = getattr(scheduler_output, "tracewire_unclean", [])
        leaving: dict[str, Any] = getattr(scheduler_output, "tracewire_leaving", {})
        if (unclean or leaving) and self.tracewire_blocks is None:
            self.tracewire_blocks = KvBlocks(self.kv_caches, self.kv_cache_config.num_blocks)
        kept, finished = self.tracewire_kept, scheduler_output.finished_req_ids
        if kept and finished:
            kept.forget(finished)
        if leaving and kept is None and self.tracewire_blocks is not None:
            kept = self.tracewire_kept = KeptCache(self.tracewire_blocks)
        for request_id, blocks in leaving.items():
            if request_id in self.requests and request_id not in finished and kept is not None:
                kept.keep(request_id, blocks)
        if unclean and self.tracewire_blocks is not None:
            self.tracewire_blocks.zero(unclean)

    def _applied(self, run: LiveRun, scheduled: dict[str, int]) -> Applied:
        """From which token of each of its choices on a run's live parameters hold, if they do from this step on."""
        first = []
        for request_id, (request, choice) in run.requests.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            if request_id in scheduled:
                index = state.num_computed_tokens + scheduled[request_id] - state.num_prompt_tokens
            else:
                # Preempted, say: it samples its next token in some later step.
                index = len(state.output_token_ids)
            first.append((request, choice, max(0, index)))
        return Applied(run.name, run.version, first, self.nnsight_requests.live.late)

    def _scope_step(self, scheduler_output: Any) -> Any:
        """vLLM's update of its states, then nnsight's part: nothing, in a step that has no block and gets none."""
        book = self.nnsight_requests
        fresh = scheduler_output.scheduled_new_reqs
        if book.requests or book.templates or any(BLOCKS & arguments_of(data).keys() for data in fresh):
            corrections = super()._update_states(scheduler_output)
            if self.tracewire_pipeline is not None:
                self._begin_shared(self.tracewire_pipeline, scheduler_output.num_scheduled_tokens)
            # The step begins, for blocks that wait for its live parameters.
            self.nnsight_model.interleaver.handle(LIVE, None)
            return corrections
        corrections = super(NNsightGPUModelRunner, self)._update_states(scheduler_output)
        if fresh:
            book.add(fresh, self.nnsight_persistent_objects)
            if book.requests:
                # One that could not be taken: it is there to be reported.
                tokens = scheduler_output.num_scheduled_tokens
                book.scope(self.nnsight_model, [(name, tokens[name]) for name in self.input_batch.req_ids])
        self.nnsight_model.interleaver.batcher.total = scheduler_output.total_num_scheduled_tokens
        if self.tracewire_pipeline is not None:
            self._begin_shared(self.tracewire_pipeline, scheduler_output.num_scheduled_tokens)
        return corrections

    def _begin_shared(self, pipeline: Pipeline, scheduled: dict[str, int]) -> None:
        """A step begins: note whose blocks share it with other pipeline stages."""
        pipeline.begin(scheduled)
        for request_id in pipeline.sharing:
            for mediator in self.nnsight_requests.copies(request_id).values():
                mediator.begin_step()

    def _tell(self, pipeline: Pipeline) -> None:
        """This stage's part of the step is over: tell the others."""
        book, declared = self.nnsight_requests, self.tracewire_declared

        def share(request_id: str) -> StageState:
            return shared(book.copies(request_id), book.requests[request_id].error)

        if pipeline.index == pipeline.topology.last or not pipeline.reads:
            pipeline.tell(share, [], {})
            return
        failures = declared.failures()
        for request_id in pipeline.early - declared.live.keys():
            # Its interventions could not be made here.
            if request_id in book.requests and (error := share(request_id).errors.get("")) is not None:
                failures[request_id] = error
        pipeline.tell(share, declared.read(), failures)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        stepped = self.execute_model_state is not None
        self.tracewire_unwatched = stepped and self._skip_sampling_phases()
        if self.tracewire_unwatched:
            # vLLM's own; nnsight's would scope every block anew and copy the logits, for nobody.
            output = super(NNsightGPUModelRunner, self).sample_tokens(*args, **kwargs)
            self.nnsight_requests.record_saves()
        else:
            output = super().sample_tokens(*args, **kwargs)
        pipeline = self.tracewire_pipeline
        if stepped and pipeline is None and self.tracewire_link is not None:
            if self._has_reports():
                self.tracewire_after.put(self._report)
        elif stepped:
            self._report()
            if pipeline is not None:
                self._tell(pipeline)
        elif pipeline is not None:
            # What the blocks marked as saved and hold no more is let go.
            self._report_step()
        return output

    def _skip_sampling_phases(self) -> bool:
        """Whether no block of this step waits for the logits or the samples; they then count as having come by."""
        interleaver = self.nnsight_model.interleaver
        phases = self.tracewire_phases
        if not interleaver.parked.isdisjoint(phases):
            return False
        for location in phases:
            interleaver.counts[location] = interleaver.counts.get(location, 0) + 1
        return True

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM's own; what nnsight's adds is below.
        output: Any = super(NNsightGPUModelRunner, self)._sample(*args, **kwargs)
        if not self.tracewire_unwatched:
            with self._still_running() as interleaver:
                drawn = output.sampled_token_ids
                # Waiting for them, or for another block that does.
                parked = [one for one in interleaver.mediators if one.pending is not None]
                asking = [one for one in parked if one.pending.provider in (SAMPLES, None)]
                # nnsight's own mediators do not note the line.
                asked = [(one, getattr(one, "asked_samples", None)) for one in asking]
                # Blocks may keep what they are served, and write to it later: that is not what the model goes on with.
                served = type(self.nnsight_model).samples.provide(self.nnsight_model, drawn.clone() if asked else drawn)
                output.sampled_token_ids = self._checked(served.clone(), drawn, asked) if asked else drawn
        return output

    def _checked(self, served: torch.Tensor, drawn: torch.Tensor, asked: list[tuple[Any, Any]]) -> torch.Tensor:
        """The tokens `[requests, 1]` that blocks have left, where they are of the vocabulary, or else those drawn.

        Anything else would end the worker in the next step's embedding. The block that left it ends with an error.
        """
        size = self.model_config.get_vocab_size()
        valid = ((served >= 0) & (served < size)).all(-1)
        if bool(valid.all()):
            return served
        for row in (~valid).nonzero().flatten().tolist():
            left = [token for token in served[row].tolist() if not 0 <= token < size]
            for mediator, where in asked:
                rows: Any = mediator.batch_group
                if isinstance(mediator, BlockMediator) and rows[0] == row and mediator.exception is None:
                    mediator.halt(mediator.not_in_vocabulary(left, size, where))
        return torch.where(valid.unsqueeze(-1), served, drawn)

    def _finish_erred(self, sampler_output: Any) -> None:
        """Nothing: a block that ended is reported, and the adapter aborts its request. No token is forced."""

    # --- reporting --------------------------------------------------------------------------------------------------

    def _has_reports(self) -> bool:
        """Whether there may be anything to report of this step, or left of those before it."""
        declared = self.tracewire_declared
        return bool(
            self.nnsight_requests.traced or declared.plan is not None or self.tracewire_behind or self.tracewire_shared
        )

    @torch.inference_mode()
    def _report(self) -> None:
        """Report a step, behind its answer where that can be."""
        if self.tracewire_ranks is not None and self.tracewire_shared:
            self._compare(self.tracewire_ranks)
        self._report_step()
        self._report_declared()
        self._send()

    def _compare(self, ranks: Ranks) -> None:
        """Compare what has ended in this step with the other ranks, of which the first reports."""
        ended: dict[Key, str] = {}
        for request_id in ranks.requests:
            for name, mediator in self.nnsight_requests.copies(request_id).items():
                if not mediator.compared and mediator.ended:
                    mediator.compared = True
                    ended[Key(request_id, name)] = mediator.ended
        if ranks.index:
            ranks.over(ended)
        else:
            ranks.settle(ended)
            self._part(ranks)

    def _part(self, ranks: Ranks) -> None:
        """End here what has ended otherwise on another rank."""
        book = self.nnsight_requests
        for key, error, sure in ranks.parted():
            failure = Failure(type=type(error).__name__, message=str(error), field="block")
            if key.name == DECLARED:
                self.tracewire_declared.fail_with(
                    {key.request: msgspec.structs.replace(failure, field="interventions")}
                )
                continue
            request, mediator = book.requests.get(key.request), book.copies(key.request).get(key.name)
            if mediator is not None and (not mediator.ended or (sure and mediator.ended != "failed")):
                mediator.halt(error)
            if mediator is None and request is not None and not key.name:
                request.error = request.error or failure

    def _report_declared(self) -> None:
        """Add what declared interventions read to the report."""
        declared = self.tracewire_declared
        plan = declared.plan
        if plan is None or not (plan.reads or declared.stale or not plan.steps):
            return
        collected = declared.collect(self._lens)
        unsent = self.tracewire_unsent
        for declaration, _, first in plan.declarations if declared.stale else ():
            if declaration.failure is not None and not declaration.reported:
                declaration.reported, declaration.failed_at = True, first + plan.steps
                record = StepRecord(declaration.request, declaration.choice, first + plan.steps, NO_DELTAS, "error")
                unsent.report.steps.append(record)
        link = self.tracewire_link
        if collected is not None and link is not None:
            unsent.report.layout, unsent.report.batch, flat = collected
            unsent.batch = unsent.copy = link.put(flat, unsent.report) or ToHost(flat)

    def _lens(self, values: torch.Tensor) -> torch.Tensor | None:
        """Logits `[rows, vocabulary]` of residual streams `[rows, hidden]`; `None` on a rank that is not given them."""
        if self.tracewire_norm is None:
            raise ValueError("this model has no final norm that could be told")
        normed = self.tracewire_norm(values)
        # Cohere's gives its residual back as well.
        logits: torch.Tensor | None = self.get_model().compute_logits(
            normed[0] if isinstance(normed, tuple) else normed
        )
        return logits

    def _report_step(self) -> None:
        requests = self.nnsight_requests
        live: list[tuple[Request, TracedRequest, dict[str, Any]]] = []
        fresh: list[Any] = []
        reporting = self.tracewire_link is not None
        for request_id, traced in requests.traced.items():
            if traced.index < 0 or (traced.ended_at is not None and requests.has_ended(request_id)):
                continue
            traced.last = traced.index
            request = requests.requests[request_id]
            mediator = request.mediator
            # As recorded a moment ago, if its block was in the step.
            saves = getattr(mediator, "found", None)
            edited = isinstance(request, EditedRequest)
            if saves is None or edited:
                saves = saves_of(request)
            if edited:
                request.settle()
                request.prune()
            if mediator is not None:
                mediator.found = None
                marks.prune(mediator, saves)
            if reporting:
                live.append((request, traced, saves))
                traced.tracker.fresh(saves, fresh)
        if not live:
            return
        shares = list(requests.shares.runs.values())
        for run in shares:
            run.tracker.fresh(run.values, fresh)
        unsent = self.tracewire_unsent
        host = HostCopy(self.tracewire_hold.threshold)
        try:
            host.prime(fresh)
        except Exception:  # out of memory, say: each trace then copies its own, and fails on its own
            logger.exception("the arrays of a step could not be copied together")
        late = host.under_way is not None
        blobs, reported, waiting = self.tracewire_blobs, unsent.report.steps, unsent.steps
        for request, traced, saves in live:
            tracker = traced.tracker
            try:
                deltas = tracker.step(saves, host, still=self._is_over(request), index=traced.index)
            except Exception as exception:  # its trace fails, the engine does not
                logger.exception("could not read the saves of %s", request.engine_id)
                deltas = []
                traced.failure = traced.failure or failure_of(exception, None, hint=" (while its saves were read)")
            traced.take_failure()
            if traced.ended_at is not None:
                # Looked at to be undone in the end: other blocks of the request go on until it is aborted.
                continue
            ended = self._ended(request, traced)
            if ended:
                traced.ended_at = traced.index
            record = StepRecord(request.engine_id, request.index, traced.index, NO_DELTAS, ended)
            traced.steps += 1
            if tracker.large and blobs is not None:
                blobs.step(record, deltas, tracker.taken)
                continue
            reported.append(record)
            if deltas and late:
                waiting.append((record, deltas, traced))
            elif deltas:
                encode_deltas(record, deltas, traced)
        for run in shares:
            self._report_shared(run, host)
        unsent.copy = host.under_way

    def _report_shared(self, run: SharedRun, host: HostCopy) -> None:
        """Add what a trace's shared values gained in this step, if anything, to the report."""
        tracker, blobs = run.tracker, self.tracewire_blobs
        try:
            deltas = tracker.step(run.values, host)
        except Exception:  # values of a hostile type: they end as they were
            logger.exception("could not read the shared values of %s", run.name)
            return
        if not deltas:
            return
        record = StepRecord(run.name, 0, run.steps, NO_DELTAS)
        run.steps += 1
        if tracker.large and blobs is not None:
            blobs.step(record, deltas, tracker.taken)
            return
        self.tracewire_unsent.report.steps.append(record)
        if host.under_way is not None:
            self.tracewire_unsent.steps.append((record, deltas, None))
        else:
            encode_deltas(record, deltas, None)

    def _report_shared_end(self, run: SharedRun) -> None:
        """Report what a trace's shared values are in the end: all its requests are over."""
        tracker, record = run.tracker, FinishRecord(run.name, 0, NO_DELTAS, steps=run.steps)
        try:
            with tracker.guard():
                # A dict of its own: it may be compared on another thread, later.
                ending = tracker.ending(dict(run.values), 0, 0)
                ending.passed = not tracker.large
                record.save_errors = tracker.errors
                if tracker.broken is not None:
                    name, raised = tracker.broken
                    record.error = failure_of(raised, None, hint=f" (while the shared value {name!r} was read)")
                if self.tracewire_blobs is not None and (tracker.large or tracker.late):
                    self.tracewire_blobs.finish(record, ending, unchecked)
                    return
                deltas, record.manifest, _ = ending.compare()
                record.deltas = msgspec.Raw(encoder.encode(deltas))
        except Exception as exception:
            logger.exception("could not report the shared values of %s", run.name)
            record.error = failure_of(exception, None, hint=" (while the shared values were read)")
        self.tracewire_unsent.report.finishes.append(record)

    @staticmethod
    def _is_over(request: Request) -> bool:
        """Whether this request's blocks have run to their ends, whatever those were."""
        return all(mediator.worker is None or mediator.worker.dead for mediator in request.workers())

    def _changes(self, tensor: Any) -> bool:
        """Whether a tensor is KV cache, which a block can reach and later steps write to."""
        address = tensor.untyped_storage().data_ptr()
        return any(
            cache.untyped_storage().data_ptr() == address
            for cache in getattr(self, "kv_caches", ())
            if isinstance(cache, torch.Tensor)
        )

    @staticmethod
    def _ended(request: Request, traced: TracedRequest) -> str:
        """Whether this request's block ended it early: `"stop"`, `"error"` or `""`."""
        if request.error is not None or traced.failure is not None:
            return "error"
        exception = None if request.mediator is None else request.mediator.exception
        if exception is None:
            return ""
        return "stop" if is_stop(exception) else "error"

    def _finish_requests(self, finished: set[str], tokens: dict[str, int]) -> None:
        """Wind up the blocks of requests that the scheduler has ended after so many tokens, report and forget them."""
        requests = self.nnsight_requests
        for request_id in finished:
            traced = requests.traced.pop(request_id, None)
            request = requests.requests.get(request_id) or Request(request_id)
            declaration = self.tracewire_declared.pop(request_id)
            requests.leave(request_id)
            if self.tracewire_pipeline is not None:
                self.tracewire_pipeline.forget(request_id)
            if self.tracewire_ranks is not None and request_id not in requests.requests:
                self.tracewire_ranks.forget(request_id)
            if traced is None:
                failure = None if declaration is None else declaration.failure
                record = FinishRecord(request.engine_id, request.index, NO_DELTAS, error=failure)
                self.tracewire_unsent.report.finishes.append(record)
                self._leave_share(request)
                continue
            if declaration is not None and declaration.failure is not None:
                request.error = request.error or declaration.failure
                if declaration.failed_at is not None and traced.ended_at is None:
                    traced.ended_at = declaration.failed_at
            traced.tokens = tokens.get(request_id)
            del requests.requests[request_id]
            told = traced.tells_end or traced.asks_result
            waits = traced.tells_end or (traced.asks_result and waits_for_result(request))
            if waits and not requests.results.there(request.engine_id):
                requests.results.waiting.setdefault(request.engine_id, []).append((request, traced))
                continue
            self._wind_up(request, traced)
            if told and not any(other.engine_id == request.engine_id for other in requests.requests.values()):
                requests.results.forget(request.engine_id)

    def _wind_up(self, request: Request, traced: TracedRequest) -> None:
        """End the block of a request that is over, and report it."""
        requests = self.nnsight_requests
        mediator: BlockMediator | None = request.mediator
        covered = self._covered(request, traced)
        counted = self._rewind(request, traced, covered)
        if mediator is not None:
            with warnings.catch_warnings():
                # A loop that outran its request has ended as loops do here: nothing to warn an operator of.
                warnings.simplefilter("ignore")
                with watchdog.turn():
                    if traced.asks_result and isinstance(mediator, BlockMediator):
                        result = requests.results.of(request.engine_id)
                        if result is not None:
                            mediator.give(result)
                    requests.finish_dangling(mediator, self.nnsight_model.interleaver.taps)
            requests.record(mediator)
        if isinstance(request, EditedRequest):
            for _, copy in request.mediators():
                with watchdog.turn():
                    requests.finish_dangling(copy, self.nnsight_model.interleaver.taps, quiet=True)
                requests.record(copy)
            request.settle()
        if self.tracewire_link is not None:
            self._report_finish(request, traced, covered, counted)
        if isinstance(request, EditedRequest):
            request.dispose()
        if mediator is not None:
            marks.release(mediator)
            if isinstance(mediator, BlockMediator):
                mediator.dispose()
        self._leave_share(request)
        if self.tracewire_ranks is not None:
            self.tracewire_ranks.forget(request.id)

    def _covered(self, request: Request, traced: TracedRequest) -> int | None:
        """How many tokens a request has that is over: of all that end it, what comes first counts."""
        told = self.nnsight_requests.results.tokens(request.engine_id, request.index)
        ended = None if traced.ended_at is None else traced.ended_at + 1
        counts = [count for count in (traced.tokens, told, ended) if count is not None]
        return min(counts, default=None)

    def _rewind(self, request: Request, traced: TracedRequest, covered: int | None) -> _Counted:
        """Undo what the blocks of a request saved in steps of tokens that it does not have; returns how to read what
        they have saved in the end.
        """
        if covered is None or covered > traced.last or self.tracewire_link is None:
            return dict
        counted = traced.tracker.rewind(saves_of(request), covered)
        for mediator in request.workers():
            if isinstance(mediator, BlockMediator):
                trim(mediator.made)
        return counted

    def _leave_share(self, request: Request) -> None:
        run = self.nnsight_requests.shares.leave(request.engine_id, request.index)
        if run is not None:
            if self.tracewire_link is not None:
                self._report_shared_end(run)
            run.dispose()

    def _collected(self, request: Request) -> dict[str, Any]:
        """What nnsight's own collect returns for a finished request, by its own way: wound up, pickled, unpickled."""
        # By the scheduler's id, which names this choice alone; nnsight then files it under the id's stem.
        ids, book = [request.id], self.nnsight_requests.requests
        book[request.id] = request
        payload = self.collect_nnsight(ids, ids)
        book.pop(request.id, None)
        sequences = pickle.loads(payload)[request.stem]["sequences"] if payload else {}  # noqa: S301
        saves: dict[str, Any] = sequences[0]["saves"]
        return saves

    def _report_finish(self, request: Request, traced: TracedRequest, covered: int | None, counted: _Counted) -> None:
        own = saves_of(request)
        saves = counted(own)
        encoded = NO_DELTAS
        manifest: list[Manifest] = []
        ending: Ending | None = None
        later = False
        collected: dict[str, Any] = {}

        def check(manifest: list[Manifest]) -> None:
            made: dict[int, tuple[Any, Any]] = {}
            for entry in manifest if collected else ():
                if saves[entry.name] is own.get(entry.name):
                    entry.digest = digest(HostCopy()(plain(collected[entry.name], made)))

        error: Any = request.error or traced.failure
        if isinstance(error, dict):  # nnsight's own form
            error = Failure(type=error["type_name"], message=error["message"], field="block")
        stopped = False
        try:
            with traced.tracker.guard():
                ending = traced.tracker.ending(saves, 0, request.index)
                # What goes by another way than the link's is not in order for whoever takes digests as it passes.
                ending.passed = not traced.tracker.large
                # On a GPU, what is to be compared is still on its way to the host: not on the model's time.
                later = traced.tracker.large or (traced.tracker.late and not self.tracewire_check_collect)
                if not later:
                    deltas, manifest, _ = ending.compare()
                    encoded = msgspec.Raw(encoder.encode(deltas))
                traced.take_failure()
                error = error or traced.failure
                # nnsight would read a save that cannot be read, too.
                if self.tracewire_check_collect and traced.tracker.broken is None:
                    collected = self._collected(request)
                    check(manifest)
        except Exception as exception:  # a save of a hostile type: the trace fails, the engine does not
            logger.exception("could not report the saves of %s", request.engine_id)
            error = error or failure_of(exception, None, hint=" (while its saves were read)")
        mediator = request.mediator
        if covered is not None and traced.ended_at is not None and traced.ended_at >= covered:
            # What ended it, did so in a step of a token that it does not have.
            error = mediator = None
        if error is None and mediator is not None:
            if mediator.exception is not None:
                stopped = is_stop(mediator.exception)
                if not stopped:
                    error = failure_of(mediator.exception, mediator.compiled, hint=self._hint(mediator.exception))
            elif getattr(mediator, "nnsight_error", None) is not None and mediator.raised is not None:
                # Still waiting, when its request ended, for something that the model had run past.
                error = failure_of(mediator.raised, mediator.compiled)
        record = FinishRecord(
            request=request.engine_id,
            choice=request.index,
            deltas=encoded,
            manifest=manifest,
            save_errors=traced.tracker.errors,
            error=error,
            stopped=stopped,
            steps=traced.steps,
            edit_errors=request.edit_errors if isinstance(request, EditedRequest) else {},
            tokens=-1 if covered is None else covered,
            warnings=mediator.warnings(traced.last + 1)
            if error is None and isinstance(mediator, BlockMediator)
            else [],
        )
        if later and self.tracewire_blobs is not None:
            self.tracewire_blobs.finish(record, ending, check)
        else:
            self.tracewire_unsent.report.finishes.append(record)

    def _hint(self, exception: BaseException) -> str:
        """For a module path that does not exist: the nearest one that does."""
        if not isinstance(exception, AttributeError) or not exception.name:
            return ""
        owner = exception.obj if isinstance(exception.obj, Envoy) else None
        if owner is None:
            return ""
        children = [name for name, _ in owner._module.named_children()]
        near = difflib.get_close_matches(exception.name, children, 1, 0.4)
        where = owner.path or "the model"
        return f" ({where} has no {exception.name!r}" + (f"; did you mean {near[0]!r}?)" if near else ")")

    def _send(self, *, wait: bool = False) -> None:
        """Send what there is to report, in order, as far as its bytes are there; or all of it."""
        unsent, behind = self.tracewire_unsent, self.tracewire_behind
        report = unsent.report
        if report.steps or report.finishes or report.applied or report.batch is not None:
            self.tracewire_unsent = PendingReport(Report())
            if self.tracewire_link is not None:
                behind.append(unsent)
        ready = 0
        now = time.time()
        for waiting in behind:
            if not waiting.report.time:
                copy = waiting.copy
                if not wait and len(behind) - ready <= BEHIND and copy is not None and not copy.there:
                    break
                waiting.report.time = now
            ready += 1
        if not ready or self.tracewire_link is None:
            return
        first = behind[0]
        soon = 0 <= now - self.tracewire_sent < PACE
        if ready == 1 and soon and not wait and first.copy is not None and not first.urgent:
            return
        self.tracewire_sent = now
        sent = [behind.popleft() for _ in range(ready)]
        self.tracewire_link.send(*[one.complete() for one in sent])
        for one in sent:
            one.release()

    def tracewire_steer(self, changes: bytes) -> None:
        """Take changes of live parameters, which hold from the next step on; by RPC, between two steps."""
        for name in self.nnsight_requests.live.steer(changes):
            self.nnsight_requests.shares.forget(name)

    @torch.inference_mode()
    def tracewire_result(self, generated: bytes) -> None:
        """Take what a request put out in all, and wind up its blocks that wait for it; by RPC, between two steps."""
        requests = self.nnsight_requests
        name, waiting = requests.results.take(generated)
        # In the mode in which vLLM's workers run steps, on any device: blocks may change in place what they read there.
        for request, traced in waiting:
            self._wind_up(request, traced)
        if not any(other.engine_id == name for other in requests.requests.values()):
            requests.results.forget(name)
        self._send(wait=True)

    def tracewire_untapped(self) -> list[str]:
        """CUDA graphs that were captured without any tap, though this worker's part of the model has some; by RPC."""
        taps = self.nnsight_model.interleaver.taps
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            taps = [tap for tap in taps if pipeline.topology.owner(tap) in (None, pipeline.index)]
        return without_taps(vars(self)["model"]) if taps else []

    def tracewire_request_count(self) -> int:
        """How many requests this worker still holds anything for: 0 when the engine is idle. A leak gauge, by RPC."""
        book = self.nnsight_requests
        ranks = () if self.tracewire_ranks is None else self.tracewire_ranks.requests
        held = (
            book.requests,
            book.traced,
            book.declared.live,
            book.live.runs,
            book.runs,
            self.tracewire_kept or (),
            ranks,
        )
        most = max(map(len, (*held, book.shares.runs, book.results.waiting)))
        return most if self.tracewire_pipeline is None else max(most, self.tracewire_pipeline.count)
