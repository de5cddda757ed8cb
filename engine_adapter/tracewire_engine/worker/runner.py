"""The core of Tracewire's model runners: it runs blocks beside the model and reports their saves step by step.

A block arrives as source text in its request's `extra_args` (`blocks/compiler.py`). It runs on the thread that runs the
model. The same thread sends the saves of all live requests over the link, in one message a step (`reporting.py`). If
the worker has a process of its own, the thread does so after it has answered `sample_tokens`. The core frees a
request's state when the scheduler says that the request is over (`finishing.py`). None of this takes an RPC. Another
thread digests large arrays, and sends the reports of requests that have any (`large_arrays.py`, `blob_sender.py`).

vLLM has two model runners. `first_runner.py` and `second_runner.py` each put the core into one of them: a subclass of
vLLM's runner calls the methods below at these points of a step, in this order.

* `prepare_tracing`, once vLLM has loaded the model: the envoy tree, the registry of requests and the reporter are made.
* `interleave`, around the whole step up to the end of the forward pass, whose hooks serve blocks and declared
  interventions.
* `leave_step`, before vLLM updates its requests: ended requests are reported, live parameters change.
* `take_requests`, when vLLM has its new requests. Preempted requests that go on get their KV back
  (`tracewire_preempted`), when vLLM has zeroed the KV blocks that it zeroes.
* `begin_rows`, when the order of the batch is known: blocks get their rows, declared interventions are planned.
* `begin_sampling`, `serve_logits` and `serve_samples`: blocks see the logits and the samples.
* `end_step`: the step is reported.

With speculative decoding, a drafted request can have several rows of logits and several samples in a step. No block
runs on it. The requests beside it have one row of each all the same, and blocks are served these rows. When the model
has sampled, declared interventions are told how many drafts it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import msgspec
import torch
from nnsight.tracing import tracer as nnsight_tracer

from tracewire_bus.wire.messages import Failure
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG
from tracewire_engine.protocol.messages import Applied
from tracewire_engine.worker.blocks import time_limit
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRun
from tracewire_engine.worker.blocks.mediator import SAMPLES, in_vocabulary
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, BlockKey, Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, StageState, stage_state

from .block_host.forwarded_blocks import ForwardedBlocks
from .block_host.hosted_blocks import valid_samples
from .kv_offload import KVBlocks, PreemptedKVCache
from .request_book import token_index
from .requests import extra_arguments
from .runner_parts import RunnerParts

__all__ = ["TracewireRunner"]


class TracewireRunner(RunnerParts):
    """Runs blocks beside the model and reports their saves. Mixed into one of vLLM's model runners."""

    def interleave(self, scheduler_output: Any, forward: Callable[[], Any]) -> Any:
        """Run vLLM's part of a step up to the end of the forward pass, with the hooks that serve interventions.

        Args:
            scheduler_output: the step as the scheduler planned it.
            forward: vLLM's method, which calls `leave_step`, `take_requests` and `begin_rows` on its way.
        """
        self.tracewire_deferred.run()
        book, interleaver = self.tracewire_requests, self.nnsight_model.interleaver
        if book.traced or book.results.waiting or scheduler_output.scheduled_new_reqs:
            # Code of blocks may run in this step.
            time_limit.begin_step()
        # nnsight allows `save` at a depth of 1 and more.
        if not getattr(nnsight_tracer._local, "depth", 0):
            nnsight_tracer.inc()
        if not book.requests:
            nnsight_tracer._saves().clear()
        # `begin_rows` starts the blocks, when it is known which requests run.
        interleaver.mediators = []
        with interleaver:
            output = forward()
            book.unflatten(self.nnsight_model)
        pipeline = self.tracewire_pipeline
        if pipeline is not None and pipeline.index < pipeline.topology.last:
            self.tracewire_declared.check_reached()
            self._send_to_stages(pipeline)
            if self.tracewire_hosts is not None:
                self.tracewire_hosts.end()
        return output

    def record_graphs(self, capture: Callable[[], Any]) -> Any:
        """Let vLLM capture its CUDA graphs, with the hooks that put the taps into them."""
        interleaver = self.nnsight_model.interleaver
        with interleaver:
            # No block runs, but the modules must hand their values over all the same.
            interleaver.busy = True
            return capture()

    def leave_step(self, scheduler_output: Any) -> None:
        """Leave the last step: report ended requests, and change live parameters. Before vLLM's update of its states.

        Args:
            scheduler_output: of the step that begins.
        """
        self._leave_blocks(scheduler_output)
        book, ranks = self.tracewire_requests, self.tracewire_ranks
        if ranks is not None:
            ranks.begin()
            self._end_differing(ranks)
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            book.exclude_missed_steps(self.nnsight_model)
            involved = scheduler_output.finished_req_ids | scheduler_output.num_scheduled_tokens.keys()
            pipeline.catch_up(book.with_sharers(involved), book)
        if scheduler_output.finished_req_ids:
            self.tracewire_drafted.forget(scheduler_output.finished_req_ids)
            ends: dict[str, int] = getattr(scheduler_output, "tracewire_ends", {})
            self.tracewire_finisher.finish_requests(scheduler_output.finished_req_ids, ends)
        self.tracewire_changed = book.live.apply()
        for run in self.tracewire_changed:
            self.tracewire_declared.update_live(run)

    def begin_ahead(self, scheduler_output: Any) -> None:
        """Let blocks in hosts take part in the earlier stages' part of a step, if this is the last one of several.

        Called before vLLM waits for what the earlier stages compute.
        """
        pipeline, hosts = self.tracewire_pipeline, self.tracewire_hosts
        if pipeline is None or hosts is None or isinstance(hosts, ForwardedBlocks):
            return
        if not scheduler_output.total_num_scheduled_tokens:
            return
        with torch.inference_mode():
            fresh = self.fresh_requests(scheduler_output)
            if any(not {BLOCK_ARG, EDITS_ARG}.isdisjoint(extra_arguments(data)) for data in fresh):
                self.take_requests(fresh)
                self.tracewire_taken = True
            hosts.begin_ahead(scheduler_output.num_scheduled_tokens)

    def fresh_requests(self, scheduler_output: Any) -> list[Any]:
        """The requests of a step that no step has had, as the scheduler describes them."""
        fresh: list[Any] = scheduler_output.scheduled_new_reqs
        return fresh

    def take_requests(self, fresh: list[Any]) -> None:
        """Take the interventions of new requests. The argument has them as the scheduler describes them."""
        if self.tracewire_taken:
            self.tracewire_taken = False
        elif fresh:
            self.tracewire_requests.add(fresh)

    def begin_rows(self, scheduler_output: Any, order: list[str]) -> None:
        """Begin the step: give blocks their rows, and plan the declared interventions.

        Args:
            scheduler_output: the step as the scheduler planned it.
            order: the requests of the step, in the order of the batch.
        """
        book, states, model = self.tracewire_requests, self.request_states(), self.nnsight_model
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        pipeline = self.tracewire_pipeline
        drafts: dict[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        self.tracewire_logit_rows = _last_rows(drafts, order) if drafts else []
        # How many tokens each request has of its own, which come before its drafts.
        own = {one: count - len(drafts.get(one, ())) for one, count in scheduled.items()} if drafts else scheduled
        self._follow_plans(own, order, states)
        self.tracewire_drafted.begin(order, scheduled, drafts, states, self.tracewire_declared.live)
        if book.requests:
            book.refuse_cut(scheduled, states)
            book.scope(model, [(request_id, scheduled[request_id]) for request_id in order])
        else:
            model.interleaver.batcher.total = scheduler_output.total_num_scheduled_tokens
        if pipeline is not None:
            self._begin_shared(pipeline, scheduled)
        if book.requests:
            # Blocks that wait for the step's beginning, to read live parameters, run on.
            model.interleaver.handle(LIVE, None)
        if self.tracewire_hosts is not None and self.tracewire_hosts.begin_for(states, scheduled, order):
            model.interleaver.busy = True
        for request_id, progress in book.traced.items():
            progress.index = token_index(states[request_id], scheduled[request_id]) if request_id in scheduled else -1
        ranks = self.tracewire_ranks
        if ranks is not None:
            ranks.traced = not ranks.requests.isdisjoint(scheduled)
        if self.tracewire_changed:
            self.tracewire_reporter.applied([self._applied(run, own) for run in self.tracewire_changed])
        declared = self.tracewire_declared
        if declared.pending:
            declared.begin(order, scheduled, scheduler_output.total_num_scheduled_tokens, states, drafts)
            model.interleaver.arm(declared.hooks)
        if pipeline is not None:
            for message in pipeline.take_earlier(book):
                declared.fail_with(message.failures)
                declared.supply(message.read)
            if pipeline.sharing:
                model.interleaver.reindex()
        # vLLM runs a step without tokens when no request is left, so no later step would send the waiting reports.
        self.tracewire_reporter.send(wait=not scheduler_output.total_num_scheduled_tokens)

    def _follow_plans(self, own: dict[str, int], order: list[str], states: Mapping[str, Any]) -> None:
        """Put the scheduled changes of the step into effect, and find the rows whose tokens are given.

        A request whose tokens are given can have drafts that no one takes. `own` is how many tokens of each request the
        step has, without drafts.
        """
        book = self.tracewire_requests
        self.tracewire_forced = []
        if not book.scheduled and not book.forced:
            return
        planned = book.scheduled.keys() | book.forced.keys()
        # Of the first token that each samples.
        indices = {name: token_index(states[name], own[name]) for name in order if name in planned}
        book.advance(indices)
        self.tracewire_forced = [
            (row, tokens[indices[name]])
            for row, name in enumerate(order)
            if (tokens := book.forced.get(name)) is not None and 0 <= indices[name] < len(tokens)
        ]

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
        states = self.request_states() if leaving else {}
        for request_id, blocks in leaving.items():
            if request_id in states and request_id not in finished and kept is not None:
                kept.save(request_id, blocks)
        if unclean and self.tracewire_blocks is not None:
            self.tracewire_blocks.zero(unclean)

    def _applied(self, run: LiveRun, scheduled: dict[str, int]) -> Applied:
        """The first token of each choice of a run that is computed with the run's changed live parameters.

        `scheduled` is how many tokens of each request the step has, without drafts.
        """
        first, states = [], self.request_states()
        for request_id, (request, choice) in run.requests.items():
            state = states.get(request_id)
            if state is None:
                continue
            # One that is not in this step, such as a preempted one, samples its next token in a later one.
            if request_id in scheduled:
                index = token_index(state, scheduled[request_id])
            else:
                known = self.tracewire_drafted.generated(request_id, state.num_prompt_tokens)
                index = self.generated(request_id) if known is None else known
            first.append((request, choice, max(0, index)))
        return Applied(run.name, run.version, first, self.tracewire_requests.live.late)

    def _begin_shared(self, pipeline: Pipeline, scheduled: dict[str, int]) -> None:
        """Begin a step: note the blocks that exchange logs with other pipeline stages in it."""
        pipeline.begin(scheduled)
        for request_id in pipeline.sharing:
            for mediator in self.tracewire_requests.copies(request_id).values():
                mediator.begin_step()

    def _send_to_stages(self, pipeline: Pipeline) -> None:
        """Send the other stages the values that this one served in its part of the step."""
        book, declared = self.tracewire_requests, self.tracewire_declared

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

    def begin_sampling(self, *, stepped: bool) -> None:
        """Begin a step's sampling.

        Args:
            stepped: whether logits were computed here: not on the earlier stages of a pipeline.
        """
        self.tracewire_unwatched = stepped and not self.tracewire_forced and self._skip_sampling_phases()

    def serve_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Serve the logits `[rows, vocabulary]` to blocks, and return those from which the model shall sample.

        There is a row for each request, or of a step with drafts `tracewire_logit_rows` of them are served.
        """
        if self.tracewire_unwatched:
            return logits
        rows = torch.tensor(self.tracewire_logit_rows, device=logits.device) if self.tracewire_logit_rows else None
        served = given = logits if rows is None else logits[rows]
        # A block that stops in its turn leaves this context early, and the logits stay as they were.
        with self._still_running():
            served = type(self.nnsight_model).logits.provide(self.nnsight_model, given)
        if rows is not None:
            return logits.index_copy(0, rows, served)
        # A copy, since the sampler scales logits in place and blocks may have saved views of these.
        return served.clone() if self.tracewire_requests.requests else served

    def serve_samples(self, drawn: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Serve the sampled token ids to blocks, and return those with which the model goes on.

        Args:
            drawn: one id for each request, `[requests, 1]`. In a step with drafts there are more columns, and the
                first is served.
            counts: how many of each request's ids count, `[requests]`. If it is left out, those that do not are
                negative.
        """
        if drawn.shape[1] == 1:
            return self._serve_first(drawn)
        served = torch.cat((self._serve_first(drawn[:, :1]), drawn[:, 1:]), dim=1)
        if self.tracewire_drafted.waiting:
            sampled = ((served >= 0).sum(1) if counts is None else counts).tolist()
            self.tracewire_drafted.accept(sampled)
            plan = self.tracewire_declared.plan
            if plan is not None and plan.drafted:
                plan.accept(sampled)
        return served

    def _serve_first(self, drawn: torch.Tensor) -> torch.Tensor:
        """Serve the sampled token ids `[requests, 1]` to blocks, and return those that count.

        Where a request's submission gives the token of this step, blocks are served that one.
        """
        if self.tracewire_forced:
            rows, tokens = zip(*self.tracewire_forced, strict=True)
            given = torch.tensor(tokens, dtype=drawn.dtype, device=drawn.device)
            drawn = drawn.index_copy(0, torch.tensor(rows, device=drawn.device), given.unsqueeze(1))
        result = drawn
        if self.tracewire_unwatched:
            return result
        with self._still_running() as interleaver:
            # Blocks that wait for the samples, or for another block that does.
            parked = [one for one in interleaver.mediators if one.pending is not None]
            asked = [(one, one.asked_samples) for one in parked if one.pending.provider in (SAMPLES, None)]
            # Blocks get a copy: they may keep it and write to it later, when the model uses the original.
            hosted = self.tracewire_hosts is not None and self.tracewire_hosts.wants(SAMPLES)
            copied = drawn.clone() if asked or hosted else drawn
            served = type(self.nnsight_model).samples.provide(self.nnsight_model, copied)
            size = self.model_config.get_vocab_size()
            result = valid_samples(served, drawn, size) if hosted else drawn
            if asked:
                result = in_vocabulary(served.clone(), result, asked, size)
        return result

    def end_step(self, *, stepped: bool) -> None:
        """End a step behind its sampling: note the blocks' saves, and report them.

        Args:
            stepped: as for `begin_sampling`.
        """
        self.tracewire_requests.record_saves()
        if stepped and self.tracewire_hosts is not None:
            self.tracewire_hosts.end()
        pipeline = self.tracewire_pipeline
        if stepped and pipeline is None and self.tracewire_reporter.link is not None:
            ranks = self.tracewire_ranks
            if (ranks is not None and ranks.traced) or self.tracewire_reporter.pending():
                self.tracewire_deferred.defer(self._report)
        elif stepped:
            self._report()
            if pipeline is not None:
                self._send_to_stages(pipeline)
        elif pipeline is not None:
            # Nothing is reported here; this drops the marks of saves that the blocks no longer hold.
            self.tracewire_reporter.report_step()

    def _still_running(self) -> Any:
        """The interleaver, with those blocks of the step that have not ended."""
        interleaver = self.nnsight_model.interleaver
        interleaver.mediators = [one for one in interleaver.mediators if one.alive]
        interleaver.reindex()
        return interleaver

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

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        # vLLM calls it in inference mode, unless the report was deferred. To begin that mode takes 15 microseconds.
        if torch.is_inference_mode_enabled():
            self._report_step()
        else:
            with torch.inference_mode():
                self._report_step()

    def _report_step(self) -> None:
        """Report a step: the saves of blocks, then the reads of declared interventions."""
        ranks = self.tracewire_ranks
        if ranks is not None and ranks.traced:
            self._compare_ranks(ranks)
        reporter = self.tracewire_reporter
        reporter.report_step()
        reporter.report_declared()
        reporter.send()

    def _compare_ranks(self, ranks: Ranks) -> None:
        """Compare the blocks that have ended in this step with those on the other ranks. The first rank reports."""
        ended: dict[BlockKey, str] = {}
        for request_id in ranks.requests:
            for name, mediator in self.tracewire_requests.copies(request_id).items():
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
        book = self.tracewire_requests
        for key, error, sure in ranks.differing():
            failure = Failure(type=type(error).__name__, message=str(error), field="block")
            if key.name == DECLARED:
                self.tracewire_declared.fail_with(
                    {key.request: msgspec.structs.replace(failure, field="interventions")}
                )
                continue
            if self.tracewire_hosts is not None and self.tracewire_hosts.fail(key.request, failure):
                continue
            request, mediator = book.requests.get(key.request), book.copies(key.request).get(key.name)
            if mediator is not None and (not mediator.ended or (sure and mediator.ended != "failed")):
                mediator.halt(error)
            if mediator is None and request is not None and not key.name:
                request.error = request.error or failure


def _last_rows(drafts: Mapping[str, list[int]], order: list[str]) -> list[int]:
    """The last row of each request among the logits of a step with drafts: a row for each draft, and one more."""
    return list(accumulate((1 + len(drafts.get(name, ())) for name in order), initial=-1))[1:]
