"""Tracewire's runner on vLLM's second model runner, `vllm.v1.worker.gpu.model_runner`.

The second runner differs from the first in what matters here:

- It forgets a preempted request, which comes back as a new one. So this module remembers the requests.
- It decides on the order of the batch in `prepare_inputs`, and does not come there in a step without tokens.
- It has no step between the logits and the sampling. So `compute_logits` is replaced meanwhile.
- With speculative decoding it keeps the drafts on the device, the scheduler gets placeholders, and behind the ids that
  count of a step any ids follow.
- It warms up by requests of its own, so the core takes no part before the worker says that the engine serves.
- It replays whole CUDA graphs itself, without a wrapper around the model (`declared/managed_graphs.py`).
"""

from __future__ import annotations

import pickle  # noqa: TID251 (a check of saves, within this process)
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from nnsight.modeling.vllm.collect import dumps_compact
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, EDITS_ARG, FORCED_ARG, RUN_ARG

from .blocks.request import Request
from .declared.hooks import DeclaredInterleaver
from .declared.managed_graphs import tap_graphs, untapped
from .requests import extra_arguments
from .runner import TracewireRunner
from .sampler_states import RememberedRows, changes_with_requests_alone
from .step_states import RequestState, StepStates

__all__ = ["SecondRunner"]

#: The arguments of a request whose state the core asks for.
_TRACED = frozenset((BLOCK_ARG, DECLARED_ARG, EDITS_ARG, FORCED_ARG, RUN_ARG))


class _Rows(NamedTuple):
    """A step's requests, in the order of the batch; and where vLLM keeps each, and how many tokens its prompt has."""

    order: list[str]
    places: np.ndarray[Any, Any]
    prompts: list[int]


class SecondRunner(TracewireRunner, GPUModelRunner):
    """vLLM's second model runner with the core's calls in its steps. In the bases it comes before the platform's."""

    model: Any
    execute_model_state: Any
    cudagraph_manager: Any
    is_last_pp_rank: bool
    req_states: Any
    sampler: Any
    input_buffers: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        #: All requests that have come and not ended; those of them that are traced, with their states at the last step
        #: before the newest one that they were in; and the states of all requests of the newest step.
        self.tracewire_come: set[str] = set()
        self.tracewire_known: dict[str, RequestState] = {}
        self.tracewire_states = StepStates([], [], [], {}, self.tracewire_known)
        #: Of the newest step with traced requests, if no request has come since.
        self.tracewire_rows: _Rows | None = None
        self.prepare_tracing()

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        interleaver = self.nnsight_model.interleaver
        if interleaver.taps and self.cudagraph_manager is not None:
            tap_graphs(self.cudagraph_manager, interleaver)
        capture = super().capture_model
        return self.record_graphs(lambda: capture(*args, **kwargs))

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, **options: Any
    ) -> Any:
        execute = super().execute_model

        def forward() -> Any:
            return execute(scheduler_output, intermediate_tensors, dummy_run, **options)

        return self.interleave(scheduler_output, forward) if self.tracewire_serving and not dummy_run else forward()

    @cached_property
    def tracewire_sampler_rests(self) -> bool:
        """Whether vLLM's `add_requests` changes nothing if there are none."""
        return self.sampler is None or changes_with_requests_alone(self.sampler)

    @cached_property
    def tracewire_remembered(self) -> RememberedRows | None:
        """What the sampler need not ask in each step."""
        return RememberedRows(self.sampler) if self.sampler is not None and self.tracewire_sampler_rests else None

    # vLLM calls the next four in this order.

    def finish_requests(self, scheduler_output: Any) -> None:
        if self.tracewire_serving:
            # Before vLLM forgets them, the preempted ones included.
            self.leave_step(scheduler_output)
            for request_id in scheduler_output.finished_req_ids:
                self.tracewire_come.discard(request_id)
                self.tracewire_known.pop(request_id, None)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        if not scheduler_output.scheduled_new_reqs:
            if not self.tracewire_sampler_rests:
                super().add_requests(scheduler_output)
            return
        # vLLM may have removed a request and put it to another place.
        self.tracewire_rows = None
        if self.tracewire_remembered is not None:
            self.tracewire_remembered.forget()
        super().add_requests(scheduler_output)
        if self.tracewire_serving:
            fresh = self.fresh_requests(scheduler_output)
            for data in fresh:
                self.tracewire_come.add(data.req_id)
                if not _TRACED.isdisjoint(extra_arguments(data)):
                    self.tracewire_known[data.req_id] = RequestState(0, 0)
            self.take_requests(fresh)

    def fresh_requests(self, scheduler_output: Any) -> list[Any]:
        # Preempted requests that go on are among vLLM's new ones.
        return [data for data in scheduler_output.scheduled_new_reqs if data.req_id not in self.tracewire_come]

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        if not self.tracewire_serving:
            return
        if self.tracewire_preempted:
            # Preempted requests that go on are among the new ones. vLLM has zeroed the KV blocks that it zeroes.
            for data in scheduler_output.scheduled_new_reqs:
                self.tracewire_preempted.restore(data.req_id, data.block_ids)
        if not scheduler_output.total_num_scheduled_tokens:
            self._note_states([], {})
            self.begin_rows(scheduler_output, [])

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch: Any = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if self.tracewire_serving:
            self._note_states(batch.req_ids, scheduler_output.num_scheduled_tokens)
            self.begin_rows(scheduler_output, batch.req_ids)
        return batch

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tracewire_serving:
            return super().sample_tokens(*args, **kwargs)
        # The earlier stages of a pipeline take the tokens from the last one.
        stepped = self.execute_model_state is not None and self.is_last_pp_rank
        self.begin_sampling(stepped=stepped)
        output = super().sample_tokens(*args, **kwargs)
        self.end_step(stepped=stepped)
        return output

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tracewire_serving:
            return super().sample(*args, **kwargs)
        with nullcontext() if self.tracewire_unwatched else self._logits_served():
            output = super().sample(*args, **kwargs)
        drawn, counts, _ = output
        drawn.sampled_token_ids = self.serve_samples(drawn.sampled_token_ids, counts)
        return output

    @contextmanager
    def _logits_served(self) -> Iterator[None]:
        """A context in which blocks are served the logits that the model computes."""
        model, compute = self.model, self.model.compute_logits
        before = vars(model).get("compute_logits")

        def served(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            return logits if logits is None else self.serve_logits(logits)

        model.compute_logits = served
        try:
            yield
        finally:
            del model.compute_logits
            if before is not None:
                model.compute_logits = before

    def _note_states(self, order: list[str], scheduled: Mapping[str, int]) -> None:
        """Note the states of a step's requests, if any request is traced."""
        known = self.tracewire_known
        for name, state in self.tracewire_states.left(order).items():
            if name in known:
                known[name] = state
        if not known or not order:
            self.tracewire_states, self.tracewire_rows = StepStates([], [], [], {}, known), None
            return
        rows = self.tracewire_rows
        if rows is None or rows.order != order:
            places = np.array([self.req_states.req_id_to_index[request_id] for request_id in order])
            rows = self.tracewire_rows = _Rows([*order], places, self.req_states.prompt_len.np[places].tolist())
        computed = self.req_states.num_computed_tokens_np[rows.places].tolist()
        if self.tracewire_drafted:
            computed = list(map(self.tracewire_drafted.computed, order, computed))
        self.tracewire_states = StepStates(order, computed, rows.prompts, scheduled, known)

    # --- for the core -----------------------------------------------------------------------------------------------

    def request_states(self) -> Mapping[str, RequestState]:
        return self.tracewire_states

    def generated(self, request_id: str) -> int:
        return self.tracewire_states[request_id].generated

    def step_ids(self) -> torch.Tensor:
        ids: torch.Tensor = self.input_buffers.input_ids
        return ids

    def put_taps(self, interleaver: DeclaredInterleaver) -> None:
        """Do nothing yet: `capture_model` puts them into the manager of CUDA graphs, which vLLM makes later."""

    def untapped_graphs(self) -> list[str]:
        return [] if self.cudagraph_manager is None else untapped(self.cudagraph_manager)

    def collected(self, request: Request) -> dict[str, Any]:
        """The saves of a request that is over as nnsight sends them to its callers: pickled compactly, unpickled."""
        saves: dict[str, Any] = pickle.loads(dumps_compact(request.saves()))  # noqa: S301  # nosec B301
        return saves
