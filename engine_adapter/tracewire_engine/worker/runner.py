"""Tracewire's model runner: nnsight's runner, but blocks arrive as source text and saves are sent step by step.

nnsight's runner interleaves blocks with the forward pass, the logits and the samples. This one differs in two ways. A
block arrives as source text in its request's `extra_args` (`blocks/compiler.py`), instead of as a pickled mediator. And
the thread that runs the blocks sends the saves of all live requests over the link, in one message a step
(`reporting.py`). If the worker has a process of its own, the thread does so after it has answered `sample_tokens`. The
runner frees a request's state when the scheduler says that the request is over (`finishing.py`). None of this takes an
RPC. Another thread digests large arrays, and sends the reports of requests that have any (`large_arrays.py`,
`blob_sender.py`).

It overrides these methods of vLLM's runner:

* `load_model`: after vLLM has loaded the model, the envoy tree, the registry of requests and the reporter are made.
* `_update_states`: the scheduler has decided upon a step. Ended requests are reported, new ones join, changes of live
  parameters take effect, and declared interventions are planned.
* `execute_model`: the forward pass, whose hooks serve blocks and declared interventions.
* `sample_tokens` and `_sample`: blocks see the logits and the samples; then the step is reported.

`TracewireRunner` is mixed into vLLM's runner for the platform at hand; see `worker.py`.
"""

from __future__ import annotations

import pickle  # noqa: TID251 (nnsight's own collect, within this process)
from functools import partial
from typing import Any

import msgspec
import torch
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner, Request
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.adapter_links import link_to
from tracewire_engine.model_layout import find_layers, find_norm, takes_residual
from tracewire_engine.protocol.keys import (
    ADAPTERS,
    BLOB_THRESHOLD,
    BLOCK_ARG,
    BLOCK_TIMEOUT,
    CHECK_COLLECT,
    CODE_IMPORTS,
    EDITS_ARG,
    LINK_ADDRESS,
    PERMIT_KEY,
)
from tracewire_engine.protocol.messages import Applied
from tracewire_engine.protocol.permits import Permits
from tracewire_engine.worker.blocks import save_marks, time_limit
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.encoder_guard import encoder_locations
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRun, LiveRuns
from tracewire_engine.worker.blocks.mediator import SAMPLES, BlockMediator
from tracewire_engine.worker.declared.cuda_graphs import breakable_throughout, without_taps
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.tap_buffers import made_buffers
from tracewire_engine.worker.parallel.merged_columns import ColumnFragments
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, BlockKey, Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, StageState, stage_state
from tracewire_engine.worker.parallel.staged_mediator import StagedMediator

from .blob_sender import BlobSender
from .block_host.hosted_blocks import valid_samples
from .block_host.setup import hosted_blocks
from .deferred_report import DeferredReport
from .finishing import RequestFinisher
from .kv_offload import KVBlocks, PreemptedKVCache
from .large_arrays import LargeArrayBudget
from .remote_inputs import inputs_at
from .reporting import StepReporter
from .requests import TracedRequests, extra_arguments
from .traced_model import TracedModel

__all__ = ["TracewireRunner"]

#: The arguments that a request with a block has: Tracewire's, or nnsight's own.
_BLOCKS = {BLOCK_ARG, EDITS_ARG, "nnsight_mediator", "nnsight_edits"}


class TracewireRunner(NNsightGPUModelRunner):
    """A vLLM model runner that runs blocks and reports their saves, step by step."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        config = self.vllm_config.additional_config
        address: str = config.get(LINK_ADDRESS) or ""
        self.tracewire_inputs = inputs_at(address, config.get(ADAPTERS, 1))
        pipeline: Pipeline | None = getattr(self, "tracewire_pipeline", None)
        self.tracewire_pipeline = pipeline
        save_marks.install()
        time_limit.keep_modules(("nnsight", "tracewire"), save_marks.remount)
        time_limit.limit_turns(config.get(BLOCK_TIMEOUT, 0.0))
        self._prepare_model(pipeline)
        self._prepare_requests(pipeline, LargeArrayBudget(config.get(BLOB_THRESHOLD, 0)))
        self.tracewire_ranks: Ranks | None = None
        #: Whether the current step has blocks or declared interventions. The same on all ranks.
        self.tracewire_traced_step = False
        if get_tp_group().world_size > 1:
            self.tracewire_ranks = Ranks(get_tp_group(), address, config.get(BLOCK_TIMEOUT, 0.0))
            self.tracewire_ranks.watch_calls()
        self.nnsight_model.interleaver.ranks = self.tracewire_declared.ranks = self.tracewire_ranks
        self.nnsight_requests.ranks = self.tracewire_ranks
        self.tracewire_deferred = DeferredReport()
        self.tracewire_unwatched = False
        self.tracewire_preempted: PreemptedKVCache | None = None
        self.tracewire_blocks: KVBlocks | None = None
        self._prepare_reports(address, check_collect=bool(config.get(CHECK_COLLECT)))
        self.tracewire_hosts = self.nnsight_model.interleaver.hosts = self.nnsight_requests.hosts = hosted_blocks(self)

    def _prepare_model(self, pipeline: Pipeline | None) -> None:
        """Extend nnsight's model of vLLM's module: the residual stream, the interleaver and the batcher."""
        module, model = self.get_model(), self.nnsight_model
        model.__class__ = TracedModel
        interleaver = model.interleaver
        layer_count = getattr(self.model_config.hf_text_config, "num_hidden_layers", 0)
        model.__dict__["_tracewire_layers"] = layers = find_layers(module.named_modules(), layer_count)
        decoder: Any = module.get_submodule(layers) if layers else ()
        model.__dict__["_tracewire_sums"] = sums = takes_residual(decoder)
        self.tracewire_norm = find_norm(module, layers)
        self.tracewire_declared = DeclaredRequests(self.device, sums=sums)
        self.tracewire_declared.decoded.vectors.folder = self.tracewire_inputs
        DeclaredInterleaver.install(interleaver, self.tracewire_declared, module)
        interleaver.batcher = RowBatcher(None)
        interleaver.fragments.__class__ = ColumnFragments
        if interleaver.taps:
            vllm_runner: Any = self
            vllm_runner.model = breakable_throughout(vllm_runner.model, self.vllm_config, interleaver)
            self.tracewire_declared.buffers = made_buffers(
                interleaver.taps, self.vllm_config, self.device, sums=sums, sharded=interleaver.is_sharded
            )
        if pipeline is not None:
            topology = interleaver.topology = pipeline.topology
            interleaver.elsewhere = topology.elsewhere
            self.tracewire_declared.here = lambda location: topology.owner(location) in (None, topology.index)
            topology.adopt(model)
        kind: Any = type(model)
        self.tracewire_phases = frozenset(value._location(model) for value in (kind.logits, kind.samples))

    def _prepare_requests(self, pipeline: Pipeline | None, budget: LargeArrayBudget) -> None:
        """Replace nnsight's registry of requests by Tracewire's."""
        budget.changes = self._changes
        model, kind = self.nnsight_model, BlockMediator if pipeline is None else StagedMediator
        config = self.vllm_config.additional_config
        permits = Permits(bytes.fromhex(config.get(PERMIT_KEY, "")))
        imports = config.get(CODE_IMPORTS) or ()
        blocks = BlockCache(model, self.device, self.tracewire_inputs, kind=kind, permits=permits, imports=imports)
        self.nnsight_requests = TracedRequests(blocks, self.tracewire_declared, LiveRuns(), budget, pipeline)
        model.interleaver.encoders = self.nnsight_requests.encoders = encoder_locations(self.get_model())

    def _prepare_reports(self, address: str, *, check_collect: bool) -> None:
        """Open the links to the adapter on the rank that reports."""
        # Every rank runs every block and gathers the values that the block reads, so one rank's values are enough. Of
        # a pipeline's stages, the last has them in the step that they belong to.
        reports = bool(address) and get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank
        adapters: int = self.vllm_config.additional_config.get(ADAPTERS, 1)
        link, blobs = (link_to(address, adapters), BlobSender(address, adapters)) if reports else (None, None)
        requests = self.nnsight_requests
        reporter = self.tracewire_reporter = StepReporter(link, blobs, requests, self._lens)
        collect = partial(_collected, self) if check_collect else None
        self.tracewire_finisher = RequestFinisher(requests, reporter, self.nnsight_model.interleaver, collect)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.tracewire_deferred.run()
        book = self.nnsight_requests
        if book.traced or book.results.waiting or scheduler_output.scheduled_new_reqs:
            # Code of blocks may run in this step.
            time_limit.begin_step()
        output = super().execute_model(scheduler_output, intermediate_tensors)
        pipeline = self.tracewire_pipeline
        if pipeline is not None and pipeline.index < pipeline.topology.last:
            self.tracewire_declared.check_reached()
            self._send_to_stages(pipeline)
        return output

    def _update_states(self, scheduler_output: Any) -> Any:
        self._leave_blocks(scheduler_output)
        ranks = self.tracewire_ranks
        if ranks is not None:
            ranks.begin()
            self._end_differing(ranks)
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            self.nnsight_requests.exclude_missed_steps(self.nnsight_model)
            involved = scheduler_output.finished_req_ids | scheduler_output.num_scheduled_tokens.keys()
            pipeline.catch_up(self.nnsight_requests.with_sharers(involved), self.nnsight_requests)
        if scheduler_output.finished_req_ids:
            ends: dict[str, int] = getattr(scheduler_output, "tracewire_ends", {})
            self.tracewire_finisher.finish_requests(scheduler_output.finished_req_ids, ends)
        changed = self.nnsight_requests.live.apply()
        for run in changed:
            self.tracewire_declared.update_live(run)
        corrections = self._scope_step(scheduler_output)
        if self.tracewire_hosts is not None and self.tracewire_hosts.begin_for(self, scheduler_output):
            self.nnsight_model.interleaver.busy = True
        if self.tracewire_preempted:
            cached = scheduler_output.scheduled_cached_reqs
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if request_id in cached.resumed_req_ids:
                    self.tracewire_preempted.restore(request_id, blocks)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, progress in self.nnsight_requests.traced.items():
            state = self.requests.get(request_id)
            if state is not None and request_id in scheduled:
                # The index of the token that this step samples; negative while a prompt is only partly computed.
                progress.index = state.num_computed_tokens + scheduled[request_id] - state.num_prompt_tokens
            else:
                progress.index = -1
        self.tracewire_traced_step = ranks is not None and not ranks.requests.isdisjoint(scheduled)
        if changed:
            self.tracewire_reporter.applied([self._applied(run, scheduled) for run in changed])
        declared = self.tracewire_declared
        if declared.live:
            ids = [request_id for request_id in self.input_batch.req_ids if request_id in scheduled]
            declared.begin(ids, scheduled, scheduler_output.total_num_scheduled_tokens, self.requests)
            self.nnsight_model.interleaver.arm(declared.hooks)
        elif declared.hooks:
            declared.begin([], {}, 0, {})
        if pipeline is not None:
            for message in pipeline.take_earlier(self.nnsight_requests):
                declared.fail_with(message.failures)
                declared.supply(message.read)
            if pipeline.sharing:
                self.nnsight_model.interleaver.reindex()
        # vLLM runs a step without tokens when no request is left, so no later step would send the waiting reports.
        self.tracewire_reporter.send(wait=not scheduler_output.total_num_scheduled_tokens)
        return corrections

    def _leave_blocks(self, scheduler_output: Any) -> None:
        """Copy the KV blocks of traced requests that were just preempted, and zero those that traced requests left.

        From this step on, other requests may write to these KV blocks.
        """
        unclean: list[int] = getattr(scheduler_output, "tracewire_unclean", [])
        leaving: dict[str, Any] = getattr(scheduler_output, "tracewire_leaving", {})
        if (unclean or leaving) and self.tracewire_blocks is None:
            self.tracewire_blocks = KVBlocks(self.kv_caches, self.kv_cache_config.num_blocks)
        kept, finished = self.tracewire_preempted, scheduler_output.finished_req_ids
        if kept and finished:
            kept.forget(finished)
        if leaving and kept is None and self.tracewire_blocks is not None:
            kept = self.tracewire_preempted = PreemptedKVCache(self.tracewire_blocks)
        for request_id, blocks in leaving.items():
            if request_id in self.requests and request_id not in finished and kept is not None:
                kept.save(request_id, blocks)
        if unclean and self.tracewire_blocks is not None:
            self.tracewire_blocks.zero(unclean)

    def _applied(self, run: LiveRun, scheduled: dict[str, int]) -> Applied:
        """The first token of each choice of a run that is computed with the run's changed live parameters."""
        first = []
        for request_id, (request, choice) in run.requests.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            if request_id in scheduled:
                index = state.num_computed_tokens + scheduled[request_id] - state.num_prompt_tokens
            else:
                # For example, a preempted request: it samples its next token in a later step.
                index = len(state.output_token_ids)
            first.append((request, choice, max(0, index)))
        return Applied(run.name, run.version, first, self.nnsight_requests.live.late)

    def _scope_step(self, scheduler_output: Any) -> Any:
        """Run vLLM's update of its states, then nnsight's, which is left out if no request of the step has a block."""
        book = self.nnsight_requests
        fresh = scheduler_output.scheduled_new_reqs
        if book.requests or book.templates or any(_BLOCKS & extra_arguments(data).keys() for data in fresh):
            corrections = super()._update_states(scheduler_output)
            if self.tracewire_pipeline is not None:
                self._begin_shared(self.tracewire_pipeline, scheduler_output.num_scheduled_tokens)
            # Blocks that wait for the step's beginning, to read live parameters, run on.
            self.nnsight_model.interleaver.handle(LIVE, None)
            return corrections
        corrections = super(NNsightGPUModelRunner, self)._update_states(scheduler_output)
        if fresh:
            book.add(fresh, self.nnsight_persistent_objects)
            if book.requests:
                # A request that failed on arrival was registered, so that it is reported.
                tokens = scheduler_output.num_scheduled_tokens
                book.scope(self.nnsight_model, [(name, tokens[name]) for name in self.input_batch.req_ids])
        self.nnsight_model.interleaver.batcher.total = scheduler_output.total_num_scheduled_tokens
        if self.tracewire_pipeline is not None:
            self._begin_shared(self.tracewire_pipeline, scheduler_output.num_scheduled_tokens)
        return corrections

    def _begin_shared(self, pipeline: Pipeline, scheduled: dict[str, int]) -> None:
        """Begin a step: note the blocks that exchange logs with other pipeline stages in it."""
        pipeline.begin(scheduled)
        for request_id in pipeline.sharing:
            for mediator in self.nnsight_requests.copies(request_id).values():
                mediator.begin_step()

    def _send_to_stages(self, pipeline: Pipeline) -> None:
        """Send the other stages the values that this one served in its part of the step."""
        book, declared = self.nnsight_requests, self.tracewire_declared

        def share(request_id: str) -> StageState:
            return stage_state(book.copies(request_id), book.requests[request_id].error)

        if pipeline.index == pipeline.topology.last or not pipeline.reads:
            pipeline.send_step(share, [], {})
            return
        failures = declared.failures()
        for request_id in pipeline.early - declared.live.keys():
            # This stage could not decode or place the request's declared interventions.
            if request_id in book.requests and (error := share(request_id).errors.get("")) is not None:
                failures[request_id] = error
        pipeline.send_step(share, declared.read(), failures)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        stepped = self.execute_model_state is not None
        self.tracewire_unwatched = stepped and self._skip_sampling_phases()
        if self.tracewire_unwatched:
            # vLLM's method. nnsight's would scope every block anew and copy the logits, and no block reads them.
            output = super(NNsightGPUModelRunner, self).sample_tokens(*args, **kwargs)
            self.nnsight_requests.record_saves()
        else:
            output = super().sample_tokens(*args, **kwargs)
        if stepped and self.tracewire_hosts is not None:
            self.tracewire_hosts.end()
        pipeline = self.tracewire_pipeline
        if stepped and pipeline is None and self.tracewire_reporter.link is not None:
            if self.tracewire_traced_step or self.tracewire_reporter.pending():
                self.tracewire_deferred.defer(self._report)
        elif stepped:
            self._report()
            if pipeline is not None:
                self._send_to_stages(pipeline)
        elif pipeline is not None:
            # Nothing is reported here; this drops the marks of saves that the blocks no longer hold.
            self.tracewire_reporter.report_step()
        return output

    def _skip_sampling_phases(self) -> bool:
        """Whether no block of this step waits for the logits or the samples. If so, they are counted as passed."""
        interleaver = self.nnsight_model.interleaver
        phases = self.tracewire_phases
        if not interleaver.parked.isdisjoint(phases):
            return False
        hosts = self.tracewire_hosts
        if hosts is not None and not hosts.pass_by(phases):
            return False
        for location in phases:
            interleaver.counts[location] = interleaver.counts.get(location, 0) + 1
        return True

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM's method. The code below does what nnsight's override would add.
        output: Any = super(NNsightGPUModelRunner, self)._sample(*args, **kwargs)
        if not self.tracewire_unwatched:
            with self._still_running() as interleaver:
                drawn = output.sampled_token_ids
                # Blocks that wait for the samples, or for another block that does.
                parked = [one for one in interleaver.mediators if one.pending is not None]
                asking = [one for one in parked if one.pending.provider in (SAMPLES, None)]
                # A mediator of nnsight has no `asked_samples`.
                asked = [(one, getattr(one, "asked_samples", None)) for one in asking]
                # Blocks get a copy: they may keep it and write to it later, when the model uses the original.
                hosted = self.tracewire_hosts is not None and self.tracewire_hosts.wants(SAMPLES)
                copied = drawn.clone() if asked or hosted else drawn
                served = type(self.nnsight_model).samples.provide(self.nnsight_model, copied)
                if hosted:
                    drawn = valid_samples(served, drawn, self.model_config.get_vocab_size())
                output.sampled_token_ids = (
                    _in_vocabulary(served.clone(), drawn, asked, self.model_config.get_vocab_size()) if asked else drawn
                )
        return output

    def _finish_erred(self, sampler_output: Any) -> None:
        """Do nothing. nnsight would force an end token; here the adapter aborts the request of a block that ended."""

    # --- reporting --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _report(self) -> None:
        """Report a step: the saves of blocks, then the reads of declared interventions."""
        if self.tracewire_ranks is not None and self.tracewire_traced_step:
            self._compare_ranks(self.tracewire_ranks)
        reporter = self.tracewire_reporter
        reporter.report_step()
        reporter.report_declared()
        reporter.send()

    def _compare_ranks(self, ranks: Ranks) -> None:
        """Compare the blocks that have ended in this step with those on the other ranks. The first rank reports."""
        ended: dict[BlockKey, str] = {}
        for request_id in ranks.requests:
            for name, mediator in self.nnsight_requests.copies(request_id).items():
                if not mediator.compared and mediator.ended:
                    mediator.compared = True
                    ended[BlockKey(request_id, name)] = mediator.ended
        if ranks.index:
            ranks.send_ended(ended)
        else:
            ranks.compare_ended(ended)
            self._end_differing(ranks)

    def _end_differing(self, ranks: Ranks) -> None:
        """End the blocks and declared interventions here that have failed, or ended differently, on another rank."""
        book = self.nnsight_requests
        for key, error, sure in ranks.differing():
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

    def _lens(self, values: torch.Tensor) -> torch.Tensor | None:
        """Logits `[rows, vocabulary]` of residual streams `[rows, hidden]`; `None` on ranks that vLLM gives none."""
        if self.tracewire_norm is None:
            raise ValueError("no final norm was found in this model")
        normed = self.tracewire_norm(values)
        # Cohere's norm also returns the residual.
        logits: torch.Tensor | None = self.get_model().compute_logits(
            normed[0] if isinstance(normed, tuple) else normed
        )
        return logits

    def _changes(self, tensor: Any) -> bool:
        """Whether a tensor lies in the KV cache, which a block can reach and later steps write to."""
        address = tensor.untyped_storage().data_ptr()
        return any(
            cache.untyped_storage().data_ptr() == address
            for cache in getattr(self, "kv_caches", ())
            if isinstance(cache, torch.Tensor)
        )

    def tracewire_steer(self, changes: bytes) -> None:
        """Take changes of live parameters, which take effect with the next step. Called by RPC, between two steps."""
        self.nnsight_requests.steer(changes)

    @torch.inference_mode()
    def tracewire_result(self, generated: bytes) -> None:
        """Take the adapter's message about an ended request, and end its blocks that waited for the message.

        Called by RPC, between two steps.
        """
        requests = self.nnsight_requests
        if self.tracewire_hosts is not None and self.tracewire_hosts.take_result(generated):
            return
        name, waiting = requests.results.take(generated)
        # In inference mode, as in vLLM's steps: the blocks may change tensors in place that they read there.
        for request, progress in waiting:
            self.tracewire_finisher.wind_up(request, progress)
        if not any(other.engine_id == name for other in requests.requests.values()):
            requests.results.forget(name)
        self.tracewire_reporter.send(wait=True)

    def tracewire_untapped(self) -> list[str]:
        """Descriptions of CUDA graphs that have no tap, if this worker's part of the model has taps. Called by RPC."""
        taps = self.nnsight_model.interleaver.taps
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            taps = [tap for tap in taps if pipeline.topology.owner(tap) in (None, pipeline.index)]
        return without_taps(vars(self)["model"]) if taps else []

    def tracewire_request_count(self) -> int:
        """How many requests this worker still holds state for; 0 when the engine is idle. A check for leaks, by RPC."""
        book = self.nnsight_requests
        ranks = () if self.tracewire_ranks is None else self.tracewire_ranks.requests
        held = (
            book.requests,
            book.traced,
            book.declared.live,
            book.live.runs,
            book.runs,
            self.tracewire_preempted or (),
            ranks,
            self.tracewire_hosts or (),
        )
        most = max(map(len, (*held, book.shared_runs.runs, book.results.waiting)))
        return most if self.tracewire_pipeline is None else max(most, self.tracewire_pipeline.count)


def _collected(runner: Any, request: Request) -> dict[str, Any]:
    """The saves of a finished request as nnsight's own collect returns them: gathered, pickled and unpickled."""
    # Collected by the scheduler's id, which names this choice alone. nnsight files it under the id's stem.
    ids, book = [request.id], runner.nnsight_requests.requests
    book[request.id] = request
    payload = runner.collect_nnsight(ids, ids)
    book.pop(request.id, None)
    sequences = pickle.loads(payload)[request.stem]["sequences"] if payload else {}  # noqa: S301  # nosec B301
    saves: dict[str, Any] = sequences[0]["saves"]
    return saves


def _in_vocabulary(served: torch.Tensor, drawn: torch.Tensor, asked: list[tuple[Any, Any]], size: int) -> torch.Tensor:
    """Check the tokens that blocks left in place of the sampled ones.

    A token id outside the vocabulary would crash the worker in the next step's embedding. So it is replaced by the
    sampled token, and the block that left it is ended with an error.

    Args:
        served: the token ids `[requests, 1]` after the blocks.
        drawn: the token ids `[requests, 1]` that the model sampled.
        asked: the mediators that asked for the samples, each with its `asked_samples`.
        size: the size of the vocabulary.
    """
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
