"""Tracewire's runner on vLLM's first model runner, `vllm.v1.worker.gpu_model_runner`."""

from __future__ import annotations

import pickle  # noqa: TID251 (nnsight's own collect, within this process)
from collections import ChainMap
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from nnsight.modeling.vllm.model_runners import GPUModelRunner as nnsight_runner

from .blocks.request import Request
from .declared.cuda_graphs import breakable_throughout, without_taps
from .declared.hooks import DeclaredInterleaver
from .runner import TracewireRunner

__all__ = ["FirstRunner"]


class FirstRunner(TracewireRunner, nnsight_runner.GPUModelRunner):
    """vLLM's first model runner with the core's calls in its steps. In the bases it comes before the platform's."""

    model: Any
    execute_model_state: Any
    input_ids: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        #: The states of the step's requests of which vLLM counts too many tokens.
        self.tracewire_corrected: dict[str, Any] = {}
        self.prepare_tracing()

    def capture_model(self) -> Any:
        return self.record_graphs(super().capture_model)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        forward = super().execute_model
        return self.interleave(scheduler_output, lambda: forward(scheduler_output, intermediate_tensors))

    def _update_states(self, scheduler_output: Any) -> Any:
        self.leave_step(scheduler_output)
        corrections = super()._update_states(scheduler_output)
        self.take_requests(scheduler_output.scheduled_new_reqs)
        if self.tracewire_preempted:
            cached = scheduler_output.scheduled_cached_reqs
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if request_id in cached.resumed_req_ids:
                    self.tracewire_preempted.restore(request_id, blocks)
        scheduled = scheduler_output.num_scheduled_tokens
        # The scheduler has another order.
        order = [one for one in self.input_batch.req_ids if one in scheduled]
        self.tracewire_corrected = self.tracewire_drafted.states(order, self.requests) if self.tracewire_drafted else {}
        self.begin_rows(scheduler_output, order)
        return corrections

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self.execute_model_state
        self.begin_sampling(stepped=state is not None)
        if state is not None and not self.tracewire_unwatched:
            self.execute_model_state = state._replace(logits=self.serve_logits(state.logits))
        output = super().sample_tokens(*args, **kwargs)
        self.end_step(stepped=state is not None)
        return output

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super()._sample(*args, **kwargs)
        output.sampled_token_ids = self.serve_samples(output.sampled_token_ids)
        return output

    # --- for the core -----------------------------------------------------------------------------------------------

    def request_states(self) -> Mapping[str, Any]:
        states: Mapping[str, Any] = self.requests
        return ChainMap(self.tracewire_corrected, self.requests) if self.tracewire_corrected else states

    def generated(self, request_id: str) -> int:
        return len(self.requests[request_id].output_token_ids)

    def step_ids(self) -> torch.Tensor:
        ids: torch.Tensor = self.input_ids.gpu
        return ids

    def put_taps(self, interleaver: DeclaredInterleaver) -> None:
        self.model = breakable_throughout(self.model, self.vllm_config, interleaver)

    def untapped_graphs(self) -> list[str]:
        return without_taps(vars(self)["model"])

    def collected(self, request: Request) -> dict[str, Any]:
        """The saves of a request that is over as nnsight's own collect returns them: gathered, pickled, unpickled."""
        theirs, book = _Collected(request), nnsight_runner.Requests()
        book.requests[request.id] = theirs
        runner = SimpleNamespace(nnsight_requests=book, nnsight_model=self.nnsight_model)
        # Collected by the scheduler's id, which names this choice alone. nnsight files it under the id's stem.
        payload = nnsight_runner.NNsightGPUModelRunner.collect_nnsight(runner, [request.id], [request.id])
        sequences = pickle.loads(payload)[theirs.stem]["sequences"] if payload else {}  # noqa: S301  # nosec B301
        saves: dict[str, Any] = sequences[0]["saves"]
        return saves


class _Collected(nnsight_runner.Request):
    """nnsight's record of a request of ours."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.id)
        self.mediator = request.mediator or SimpleNamespace(alive=False)
        self.saves = request.saves
