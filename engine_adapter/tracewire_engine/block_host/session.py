"""The blocks of a host: the same registry, mediators and trackers as a worker's, fed by the worker.

A worker runs blocks between the model's modules. A host has no model: it is told what the model has reached, and serves
the rows of its own requests to its blocks as a worker would serve them. All that a block can do is done here by the
code that does it in a worker (`worker/blocks`): nnsight's interleaver and mediators, live parameters, shared values,
barriers, caches, the finding of new saves, and the end of requests.
"""

from __future__ import annotations

import types
from array import array
from collections.abc import Callable
from typing import Any

import torch
from nnsight.intervention.batching import SkipParts
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Event
from nnsight.intervention.source import Compiled, Source, SourceEnvoy
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.tracing import tracer as nnsight_tracer

from tracewire_engine.protocol.block_host import (
    SOURCE,
    Began,
    Finished,
    HostSettings,
    Wait,
)
from tracewire_engine.protocol.permits import CheckedPermits
from tracewire_engine.worker.block_host.accounts import known_leaves
from tracewire_engine.worker.block_host.edit_runs import EditRuns
from tracewire_engine.worker.blocks import time_limit
from tracewire_engine.worker.blocks.batched_serving import BlockServing, RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRuns
from tracewire_engine.worker.blocks.mediator import RESULT, SAMPLES, BlockMediator, in_vocabulary
from tracewire_engine.worker.finishing import RequestFinisher
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.reporting import StepReporter
from tracewire_engine.worker.requests import TracedRequests
from tracewire_engine.worker.traced_model import TracedModel

from .expected_value import ExpectedValue
from .stand_ins import is_stand_in

__all__ = ["HostInterleaver", "HostedModel", "Session"]

#: A host has the text of the worker's functions alone.
_NO_CODE = compile("", "<worker>", "exec")

#: Locations that are the session's own: the model never reaches them.
_OURS = (LIVE, RESULT, None)


class HostedOperation(SourceEnvoy):
    """An operation inside a module that the worker holds."""

    @property
    def source(self) -> Any:
        """Refused: a host does not have the code that the operation calls."""
        raise NotImplementedError(
            f"{self.path.removeprefix('model.')}.source: operations inside a function that a module calls are not "
            "served to blocks in a process of their own (--blocks host); its .input and .output are"
        )


class HostedSource(Source):
    """The operations inside a module that the worker holds."""

    def node(self, name: str) -> HostedOperation:
        """One of the operations."""
        compiled = self.compiled
        return HostedOperation(self.envoy, name, f"{self.prefix}.{name}", compiled.source, compiled.lines[name])


class HostedEnvoy(Envoy):
    """An envoy of a module that the worker holds: calling it calls the worker's module.

    A module that a block has attached to the tree is the block's own, and runs here.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        attached = isinstance(value, torch.nn.Module) and not name.startswith("_")
        held = self._module._modules.get(name) if attached else None
        if held is not None and is_stand_in(held):
            raise NotImplementedError(
                f"{self.path}.{name} is a module of the model: a block in a process of its own (--blocks host) cannot "
                "put another one in its place; assign to its output instead"
            )
        Envoy.__setattr__(self, name, value)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        if not is_stand_in(self._module):
            return Envoy.__call__(self, *args, hook=hook, **kwargs)
        if hook:
            raise NotImplementedError(
                "hook=True is not supported for the model's modules by blocks in a process of their own (--blocks "
                "host): the modules inside run in the engine's worker; call each of them in turn to see its value"
            )
        return self.interleaver.call(self.path, (args, kwargs))

    @property
    def source(self) -> Source:
        """The operations inside the module, as the worker names them."""
        if not is_stand_in(self._module):
            found: Source = Envoy.source.__get__(self)
            return found
        names, lines, text = self._module.fetch(self._module.outline.path, SOURCE)
        return HostedSource(self, self.path, Compiled(_NO_CODE, tuple(names), lines, text))


class HostedModel(TracedModel):
    """The `model` of a block in a host: a tree of stand-ins."""

    def __init__(self, module: torch.nn.Module, interleaver: HostInterleaver, settings: HostSettings) -> None:
        self.vllm_entrypoint = None
        Envoy.__init__(self, module, interleaver=interleaver, envoys=HostedEnvoy)
        self.__dict__["_tracewire_layers"] = settings.layers
        self.__dict__["_tracewire_sums"] = settings.sums

    @property
    def tokenizer(self) -> Any:
        """The worker's tokenizer, as a copy."""
        return self._module.tokenizer

    __setattr__ = HostedEnvoy.__setattr__
    __call__ = HostedEnvoy.__call__
    source = HostedEnvoy.source


class HostInterleaver(VLLMInterleaver, BlockServing):
    """nnsight's interleaver in a host, which is told what the model reaches."""

    #: Calls a module of the model: its path, and `(args, kwargs)`.
    call: Callable[[str, Any], Any]

    def __init__(self, settings: HostSettings, call: Callable[[str, Any], Any]) -> None:
        super().__init__(settings.taps)
        self.call = call
        self.skipped = {}
        self.encoders = tuple(settings.encoders)
        self.defer_exceptions = True
        self.interleaving = True
        self.batcher = RowBatcher(None)

    def instrument(self, envoy: Any) -> None:
        """Have a module serve its values to blocks, if it runs here."""
        if not is_stand_in(envoy._module):
            super().instrument(envoy)

    def handle(self, provider: str, value: Any) -> Any:
        # As `DeclaredInterleaver.handle`, which runs beside a model.
        if self.skipped:
            value = self.put_skipped(provider, value)
        value = super().handle(provider, value)
        return self.keep_skipped(provider, value) if type(value) is SkipParts else value


class _NoDeclared:
    """Stands for a worker's declared interventions, of which a host has none."""

    plan = None

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}

    def update_live(self, run: Any) -> None:
        """No request has any."""

    def pop(self, request: str) -> None:
        """No request has any."""


class Session:
    """The blocks of a host.

    Args:
        module: the root of a tree of stand-ins.
        settings: of the engine.
        call: calls a module of the model.
        link: takes the reports of steps and of ends (`send`).
        blobs: takes large arrays, as a worker's `BlobSender` does.
        inputs: has the bytes of large variables, by the names of their files (`inputs / name`).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: HostSettings,
        call: Callable[[str, Any], Any],
        link: Any,
        blobs: Any,
        inputs: Any = None,
    ) -> None:
        self._settings = settings
        self.interleaver = HostInterleaver(settings, call)
        self.model = HostedModel(module, self.interleaver, settings)
        cpu = torch.device("cpu")
        self.budget = budget = LargeArrayBudget(settings.blob_threshold)
        declared: Any = _NoDeclared()
        blocks = BlockCache(self.model, cpu, inputs, permits=CheckedPermits(), imports=settings.imports)
        self._requests = TracedRequests(blocks, declared, LiveRuns(), budget, None)
        self._requests.encoders = self.interleaver.encoders
        self._reporter = StepReporter(link, blobs, self._requests, lambda values: None)
        self._finisher = RequestFinisher(self._requests, self._reporter)
        #: What blocks write which the model does not wait for.
        self._edits = EditRuns(cpu, sums=settings.sums)
        #: Whether the step has come to values with a row for each request.
        self._by_request = False

    # --- what the worker tells ----------------------------------------------------------------------------------------

    def begin(self, began: Began) -> None:
        """Begin a step of the model."""
        time_limit.begin_step()
        requests, interleaver = self._requests, self.interleaver
        self._by_request = False
        requests.live.apply()
        if not requests.requests:
            nnsight_tracer._saves().clear()
        interleaver.mediators = []
        interleaver.sourced.clear()
        new = [_new(one.id, one.arguments) for one in began.new]
        requests.add(new)
        for one in began.new:
            if one.edits:
                live = requests.live_of(one.id)
                leaves = known_leaves(one.arguments, one.edits, live.values)
                self._edits.open(one.id, one.edits, leaves, live)
            if one.reserved and one.id in requests.traced:
                requests.traced[one.id].tracker.reserved = frozenset(one.reserved)
        requests.scope(self.model, [(name, tokens) for name, tokens, _ in began.spans])
        indices = {name: index for name, _, index in began.spans}
        requests.advance(indices)
        layout = [(name, tokens) for name, tokens, _ in began.spans]
        self._edits.begin(layout, lambda: layout)
        interleaver.handle(LIVE, None)
        for request_id, progress in requests.traced.items():
            progress.index = indices.get(request_id, -1)

    def expected(self, location: str, value: Any, *, by_request: bool) -> ExpectedValue | None:
        """What the model goes on with behind a location that it has reached, if blocks change its value.

        Args:
            location: where the blocks are about to be served.
            value: which they are served.
            by_request: as for `reach`.
        """
        if not self._edits.due(location):
            return None
        tensors = value if type(value) is tuple else (value,)
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in tensors]
        self._edits.apply(location, tuple(copies) if type(value) is tuple else copies[0], by_request=by_request)
        # Their blocks say so themselves.
        self._edits.take_failed()

        def leave(tensor: torch.Tensor, copy: torch.Tensor) -> None:
            # What a block has come to that has failed, or was interrupted, says nothing.
            left, wanted = (
                self._edits.rows_of(one, by_request=by_request, over=self.is_over) for one in (tensor, copy)
            )
            for rows, ours in zip(left, wanted, strict=True):
                ours.copy_(rows)

        pairs = zip(tensors, copies, strict=True)
        return ExpectedValue([(one, copy) for one, copy in pairs if isinstance(one, torch.Tensor)], leave)

    def is_over(self, name: str) -> bool:
        """Whether a request's block has ended, or has failed."""
        request = self._requests.requests.get(name)
        return request is None or request.mediator is None or not request.mediator.alive

    def reach(self, location: str, value: Any, *, by_request: bool) -> Any:
        """Serve a location that the model has reached. Returns the value as the blocks leave it."""
        if by_request:
            if not self._by_request:
                self._by_request = True
                self._requests.unflatten(self.model)
            self._keep_running()
        if location == SAMPLES:
            return self._reach_samples(location, value)
        return self.interleaver.handle(location, value)

    def _keep_running(self) -> None:
        # As the worker's runner does.
        interleaver = self.interleaver
        interleaver.mediators = [one for one in interleaver.mediators if one.alive]
        interleaver.reindex()

    def _reach_samples(self, location: str, drawn: Any) -> Any:
        # As `TracewireRunner.serve_samples`.
        parked = [one for one in self.interleaver.mediators if one.pending is not None]
        asking = [one for one in parked if one.pending.provider in (SAMPLES, None)]
        asked = [(one, one.asked_samples) for one in asking if isinstance(one, BlockMediator)]
        before = drawn.clone()
        return in_vocabulary(self.interleaver.handle(location, drawn), before, asked, self._settings.vocabulary)

    def end(self) -> None:
        """End the step, and report it."""
        self._requests.record_saves()
        self._reporter.report_step()
        self._reporter.send()

    def finish(self, finished: Finished) -> None:
        """End a request, and report it."""
        requests = self._requests
        request, progress = requests.requests.get(finished.id), requests.traced.get(finished.id)
        if progress is not None:
            progress.tracker.keeps = finished.keeps
        if request is not None and progress is not None and finished.failure is not None:
            request.error = request.error or finished.failure
            if finished.failed_at is not None and progress.ended_at is None:
                progress.ended_at = finished.failed_at
        self._edits.discard(finished.id)
        tokens = {} if finished.tokens is None else {finished.id: finished.tokens}
        self._finisher.finish_requests({finished.id}, tokens)
        self._reporter.send(wait=True)

    def steer(self, changes: bytes) -> None:
        """Take changes of live parameters."""
        self._requests.live.steer(changes)

    def generated(self, message: bytes) -> None:
        """Take the adapter's message about an ended request."""
        self._finisher.take_result(message)

    # --- what the worker asks -----------------------------------------------------------------------------------------

    def waits(self) -> list[Wait]:
        """The locations that the blocks wait for, and how often the model passes each before it matters."""
        counts = self.interleaver.counts
        found: dict[str, int] = dict.fromkeys(self.interleaver.skipped, 0)
        for mediator in self.interleaver.mediators:
            pending = mediator.pending
            if pending is None or pending.provider in _OURS:
                continue
            where = pending.provider
            after = pending.iteration - (counts.get(where, 0) - mediator.counts_at_start.get(where, 0))
            if after >= 0:
                found[where] = min(after, found.get(where, after))
        return [Wait(*one) for one in found.items()]

    def begins(self) -> bool:
        """Whether a block waits for the beginning of a step."""
        return any(
            one.pending is not None and (one.pending.provider == LIVE or one.pending.event is Event.BARRIER)
            for one in self.interleaver.mediators
        )

    def observed(self) -> list[str]:
        """The locations that caches of the blocks record."""
        return list(self.interleaver.observers)

    def count(self, passed: array[int], names: list[str]) -> None:
        """Count locations that the model has passed, by their places in `names`."""
        counts = self.interleaver.counts
        for place in passed:
            name = names[place]
            counts[name] = counts.get(name, 0) + 1

    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._requests.requests and not self._requests.results.waiting


def _new(request_id: str, arguments: dict[str, Any]) -> Any:
    """A request as vLLM's scheduler describes a new one."""
    return types.SimpleNamespace(req_id=request_id, sampling_params=types.SimpleNamespace(extra_args=arguments))
