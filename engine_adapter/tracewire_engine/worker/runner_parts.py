"""What Tracewire's model runner is made of, and what the adapter asks of it between two steps.

`prepare_tracing` makes the parts when vLLM has loaded the model: nnsight's envoys and the interleaver that serves them,
the registry of live requests, the declared interventions, the reporter. The methods without a body here are those that
differ between vLLM's runners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from nnsight.modeling.vllm.fragments import VLLMFragments
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.tokenizers import cached_tokenizer_from_config

from tracewire_engine.link.adapter_links import link_to
from tracewire_engine.model_layout import find_layers, find_norm, takes_residual
from tracewire_engine.protocol.keys import (
    ADAPTERS,
    BLOB_THRESHOLD,
    BLOCK_TIMEOUT,
    CHECK_COLLECT,
    CODE_IMPORTS,
    LINK_ADDRESS,
    PERMIT_KEY,
    SAE_BYTES,
    SAE_HOST_BYTES,
    SAE_SPLIT_BYTES,
    SAES,
)
from tracewire_engine.protocol.permits import Permits
from tracewire_engine.worker.blocks import save_marks, time_limit
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.encoder_guard import encoder_locations
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns
from tracewire_engine.worker.blocks.mediator import BlockMediator
from tracewire_engine.worker.blocks.request import Request
from tracewire_engine.worker.declared.autoencoder_store import BOUND, HOST_BOUND
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.tap_buffers import made_buffers
from tracewire_engine.worker.parallel.merged_columns import ColumnFragments
from tracewire_engine.worker.parallel.rank_agreement import Ranks
from tracewire_engine.worker.parallel.stage_exchange import Pipeline, made_pipeline
from tracewire_engine.worker.parallel.staged_mediator import StagedMediator

from .blob_sender import BlobSender
from .block_host.setup import hosted_blocks
from .compiled_kernels import compile_kernels
from .deferred_report import DeferredReport
from .drafted_tokens import DraftedTokens
from .finishing import RequestFinisher
from .kv_offload import KVBlocks, PreemptedKVCache
from .large_arrays import LargeArrayBudget
from .remote_inputs import inputs_at
from .reporting import StepReporter
from .requests import TracedRequests
from .traced_model import TracedModel

__all__ = ["RunnerParts"]

#: The device memory for logits of recorded lenses, and for those that other lenses compute at once.
_LOGITS_BYTES, _AT_ONCE = 128 << 20, 256 << 20
#: The bytes of one logit: two and four, or with a model in float32 four.
_LOGIT_BYTES = 6


def _module_at(model: torch.nn.Module, location: str) -> torch.nn.Module:
    """The module of a location, such as `model.model.layers.3.self_attn.attn.input`."""
    return model.get_submodule(location.removeprefix("model.").rpartition(".")[0])


def _rows_of_logits(nbytes: int, vocabulary: int) -> int:
    """How many rows of logits take at most so many bytes."""
    return nbytes // (_LOGIT_BYTES * vocabulary)


class RunnerParts:
    """The parts of Tracewire's model runner. Its subclass `TracewireRunner` takes them through the steps."""

    # vLLM's.
    vllm_config: Any
    model_config: Any
    device: torch.device
    kv_caches: Any
    kv_cache_config: Any
    #: Whether the engine has warmed up, so that requests come from clients.
    tracewire_serving = False
    #: Returns vLLM's module, without wrappers.
    get_model: Callable[[], Any]

    def request_states(self) -> Mapping[str, Any]:
        """vLLM's requests, each with `num_computed_tokens` and `num_prompt_tokens`, by the scheduler's id.

        Drafts of earlier steps that were not taken are not counted (`drafted_tokens.py`).
        """
        raise NotImplementedError

    def generated(self, request_id: str) -> int:
        """How many tokens a request that is not in the current step has generated."""
        raise NotImplementedError

    def step_ids(self) -> torch.Tensor:
        """The token ids that the step under way computes `[at least tokens]`, on the device, always at one address."""
        raise NotImplementedError

    def put_taps(self, interleaver: DeclaredInterleaver) -> None:
        """Have the CUDA graphs that vLLM will capture serve the taps."""
        raise NotImplementedError

    def untapped_graphs(self) -> list[str]:
        """Descriptions of the CUDA graphs that have no tap."""
        raise NotImplementedError

    def collected(self, request: Request) -> dict[str, Any]:
        """The saves of a request that is over, as an independent check computes them, by name."""
        raise NotImplementedError

    def prepare_tracing(self) -> None:
        """Set up the interventions. Called once, when vLLM has loaded the model."""
        config = self.vllm_config.additional_config
        address: str = config.get(LINK_ADDRESS) or ""
        self.tracewire_inputs = inputs_at(address, config.get(ADAPTERS, 1))
        pipeline = self.tracewire_pipeline = made_pipeline(self)
        save_marks.install()
        time_limit.keep_modules(("nnsight", "tracewire"), save_marks.remount)
        time_limit.limit_turns(config.get(BLOCK_TIMEOUT, 0.0))
        self._prepare_model(pipeline)
        self._prepare_requests(pipeline, LargeArrayBudget(config.get(BLOB_THRESHOLD, 0)))
        self.tracewire_ranks: Ranks | None = None
        if get_tp_group().world_size > 1:
            self.tracewire_ranks = Ranks(get_tp_group(), address, config.get(BLOCK_TIMEOUT, 0.0))
            self.tracewire_ranks.watch_calls()
        self.nnsight_model.interleaver.ranks = self.tracewire_declared.ranks = self.tracewire_ranks
        self.tracewire_requests.ranks = self.tracewire_ranks
        self.tracewire_deferred = DeferredReport()
        self.tracewire_unwatched = False
        #: Whether the new requests of the step were taken before vLLM took them.
        self.tracewire_taken = False
        #: The runs whose live parameters change with the current step.
        self.tracewire_changed: list[LiveRun] = []
        #: The rows of the step whose tokens submissions give, each with its token.
        self.tracewire_forced: list[tuple[int, int]] = []
        #: How far requests with drafts are.
        self.tracewire_drafted = DraftedTokens()
        #: Of a step with drafts, the row of each request among the logits that is served; else empty.
        self.tracewire_logit_rows: list[int] = []
        self.tracewire_preempted: PreemptedKVCache | None = None
        self.tracewire_blocks: KVBlocks | None = None
        self._prepare_reports(address, check_collect=bool(config.get(CHECK_COLLECT)))
        self.tracewire_hosts = self.nnsight_model.interleaver.hosts = self.tracewire_requests.hosts = hosted_blocks(
            self
        )

    def _prepare_model(self, pipeline: Pipeline | None) -> None:
        """Make nnsight's envoys of vLLM's module, and the interleaver that serves them."""
        module = self.get_model()
        taps = self.vllm_config.additional_config.get("nnsight_taps", ())
        if taps and self.device.type == "cuda" and not self.model_config.enforce_eager:
            compile_kernels(module, serving=lambda: self.tracewire_serving)
        interleaver = VLLMInterleaver(taps, fragments=VLLMFragments())
        model = self.nnsight_model = TracedModel(module, interleaver=interleaver)
        model.tokenizer = cached_tokenizer_from_config(self.model_config)
        # An error of a block ends its own request, and not the step.
        interleaver.defer_exceptions = True
        layer_count = getattr(self.model_config.hf_text_config, "num_hidden_layers", 0)
        model.__dict__["_tracewire_layers"] = layers = find_layers(module.named_modules(), layer_count)
        decoder: Any = module.get_submodule(layers) if layers else ()
        model.__dict__["_tracewire_sums"] = sums = takes_residual(decoder)
        self.tracewire_norm = find_norm(module, layers)
        self.tracewire_declared = DeclaredRequests(self.device, sums=sums)
        vectors = self.tracewire_declared.decoded.vectors
        vectors.folder = self.tracewire_inputs
        config = self.vllm_config.additional_config
        store, group = vectors.autoencoders, get_tp_group()
        store.folders, store.split_above = config.get(SAES) or {}, config.get(SAE_SPLIT_BYTES)
        store.bound, store.host_bound = config.get(SAE_BYTES, BOUND), config.get(SAE_HOST_BYTES, HOST_BOUND)
        store.rank, store.ranks = group.rank_in_group, group.world_size
        self.tracewire_declared.ids = self.step_ids
        self.tracewire_declared.module_at = partial(_module_at, module)
        if group.world_size > 1:
            self.tracewire_declared.shards = group.rank_in_group, tensor_model_parallel_all_reduce
        elif self.device.type == "cuda" and pipeline is None and self.vllm_config.lora_config is None:
            # Ranks exchange parts of the logits, and an adapter's kernels take other arguments in each step.
            self.tracewire_declared.head_rows = _rows_of_logits(_LOGITS_BYTES, self.model_config.get_vocab_size())
        # As many on each rank, which make the same calls.
        self.tracewire_declared.lens_rows = max(1, _rows_of_logits(_AT_ONCE, self.model_config.get_vocab_size()))
        DeclaredInterleaver.install(interleaver, self.tracewire_declared, module)
        interleaver.batcher = RowBatcher(None)
        interleaver.fragments.__class__ = ColumnFragments
        if interleaver.taps:
            self.put_taps(interleaver)
            buffers = made_buffers(
                interleaver.taps, self.vllm_config, self.device, sums=sums, sharded=interleaver.is_sharded
            )
            lacking = self.tracewire_declared.on_any_rank(buffers is None)
            self.tracewire_declared.buffers = None if lacking else buffers
        if pipeline is not None:
            topology = interleaver.topology = pipeline.topology
            interleaver.elsewhere = topology.elsewhere
            self.tracewire_declared.here = store.here = lambda location: (
                topology.owner(location) in (None, topology.index)
            )
            topology.adopt(model)
        kind: Any = type(model)
        self.tracewire_phases = frozenset(value._location(model) for value in (kind.logits, kind.samples))

    def _prepare_requests(self, pipeline: Pipeline | None, budget: LargeArrayBudget) -> None:
        """Make the registry of live requests."""
        budget.changes = self._changes
        model, kind = self.nnsight_model, BlockMediator if pipeline is None else StagedMediator
        config = self.vllm_config.additional_config
        permits = Permits(bytes.fromhex(config.get(PERMIT_KEY, "")))
        imports = config.get(CODE_IMPORTS) or ()
        blocks = BlockCache(model, self.device, self.tracewire_inputs, kind=kind, permits=permits, imports=imports)
        self.tracewire_requests = TracedRequests(blocks, self.tracewire_declared, LiveRuns(), budget, pipeline)
        model.interleaver.encoders = self.tracewire_requests.encoders = encoder_locations(self.get_model())

    def _prepare_reports(self, address: str, *, check_collect: bool) -> None:
        """Open the links to the adapter on the rank that reports."""
        # Every rank runs every block and gathers the values that the block reads, so one rank's values are enough. Of
        # a pipeline's stages, the last has them in the step that they belong to.
        reports = bool(address) and get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank
        adapters: int = self.vllm_config.additional_config.get(ADAPTERS, 1)
        link, blobs = (link_to(address, adapters), BlobSender(address, adapters)) if reports else (None, None)
        requests = self.tracewire_requests
        reporter = self.tracewire_reporter = StepReporter(link, blobs, requests, self._lens)
        collect = self.collected if check_collect else None
        self.tracewire_finisher = RequestFinisher(requests, reporter, collect)

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
        self.tracewire_requests.steer(changes)

    @torch.inference_mode()
    def tracewire_result(self, generated: bytes) -> None:
        """Take the adapter's message about an ended request, and end its blocks that waited for the message.

        Called by RPC, between two steps.
        """
        # In inference mode, as in vLLM's steps: the blocks may change tensors in place that they read there.
        if self.tracewire_hosts is None or not self.tracewire_hosts.take_result(generated):
            self.tracewire_finisher.take_result(generated)

    def tracewire_untapped(self) -> list[str]:
        """Descriptions of CUDA graphs that have no tap, if this worker's part of the model has taps. Called by RPC."""
        taps = self.nnsight_model.interleaver.taps
        pipeline = self.tracewire_pipeline
        if pipeline is not None:
            taps = [tap for tap in taps if pipeline.topology.owner(tap) in (None, pipeline.index)]
        return self.untapped_graphs() if taps else []

    def tracewire_request_count(self) -> int:
        """How many requests this worker still holds state for; 0 when the engine is idle. A check for leaks, by RPC."""
        book = self.tracewire_requests
        ranks = () if self.tracewire_ranks is None else self.tracewire_ranks.requests
        held = (
            book.requests,
            book.traced,
            book.declared.live,
            book.live.runs,
            book.runs,
            book.scheduled,
            book.forced,
            self.tracewire_preempted or (),
            self.tracewire_drafted,
            ranks,
            self.tracewire_hosts or (),
        )
        most = max(map(len, (*held, book.shared_runs.runs, book.results.waiting)))
        return most if self.tracewire_pipeline is None else max(most, self.tracewire_pipeline.count)
