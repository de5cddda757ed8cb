"""Runs the blocks of all traces in hosts: tells the hosts what the model reaches, and waits for them where it must.

A host belongs to one trace. So a block that takes its host down, or that does not answer in time, costs its own trace
and no other.
"""

from __future__ import annotations

import logging
import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tracewire_bus.wire.messages import Block, Failure
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.link.host_channel import ChannelClosed, ChannelTimeout
from tracewire_engine.link.shared_rows import pack_value, unpack_value
from tracewire_engine.protocol.block_host import (
    Answer,
    Arrived,
    Finished,
    Generated,
    Reply,
    Request,
    Shape,
    Shared,
    Steered,
)
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG, SHARED_ARG
from tracewire_engine.protocol.messages import EditBlock

from .hosted_trace import HostedRequest, HostedTrace
from .late_copies import LateCopies
from .pool import HostPool
from .reading import ModelPaths, reads_of, union
from .report_thread import ReportThread, lost, too_slow
from .rows import NoRoom, StepRows

if TYPE_CHECKING:
    from tracewire_engine.worker.remote_inputs import RemoteInputs

__all__ = ["HostedBlocks", "valid_samples"]

logger = logging.getLogger("vllm.tracewire")

_WAITED = "within one step, while every request waited for it"

#: For how long a trace of which no request is left keeps its host, if the worker has not seen all of its requests.
_IDLE_S = 120.0

_block = msgspec.msgpack.Decoder(Block)
#: The names of files of large variables (`input_path`).
_INPUT = re.compile("input-[0-9a-f]{1,128}")

_share: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)
_edits = msgspec.msgpack.Decoder(list[EditBlock])
_encode = msgspec.msgpack.Encoder().encode
_changes: msgspec.msgpack.Decoder[tuple[float, dict[str, msgspec.Raw], list[str]]] = msgspec.msgpack.Decoder(
    tuple[float, dict[str, msgspec.Raw], list[str]]
)
_said: msgspec.msgpack.Decoder[Reply | Request] = msgspec.msgpack.Decoder(Reply | Request)
_generated: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)


class HostedBlocks:
    """The traces with blocks of this worker.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
        paths: of the model's modules.
        pool: of hosts.
        reports: passes on what hosts report.
        step_s: how long the model waits for all blocks of a step, in seconds.
    """

    def __init__(self, model: Any, paths: ModelPaths, pool: HostPool, reports: ReportThread, step_s: float) -> None:
        self._model, self._paths, self._pool, self._reports = model, paths, pool, reports
        self._step_s = step_s
        #: Where the files of large variables lie.
        self.inputs: Path | RemoteInputs = Path()
        self.traces: dict[str, HostedTrace] = {}
        self._of: dict[str, HostedTrace] = {}
        self._by_request: dict[str, HostedTrace] = {}
        #: The traces of the step, and by location those that want something there.
        self._active: list[HostedTrace] = []
        #: Traces of which no request is left, although the worker may still see others of theirs.
        self._idle: dict[str, HostedTrace] = {}
        self._watching: dict[str, list[HostedTrace]] = {}
        #: The locations that the model has passed in the step, by their numbers; and all locations by number.
        self._passed: array[int] = array("H")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._left_s = 0.0
        self._rows_by_request = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(
        self, request_id: str, request: Any, arguments: dict[str, Any], trace: tuple[str, int], reserved: Iterable[str]
    ) -> None:
        """Take a new request with blocks.

        Args:
            request_id: the scheduler's id.
            request: the worker's record of the request.
            arguments: those of its `extra_args` for blocks.
            trace: the name of its trace's attempt, and how many choices all requests of it have together.
            reserved: the names under which declared interventions of the request save.

        Raises:
            OSError: no host could be started.
        """
        name, choices = trace
        self._purge()
        known = self.traces.get(name)
        reads = self._reads(arguments)
        if known is None:
            known = self.traces[name] = HostedTrace(name, self._pool.take(), reads, choices)
            self._reports.watch(known)
        else:
            known.join(reads)
            self._idle.pop(name, None)
        arrived = Arrived(request_id, arguments, list(reserved))
        known.asks = known.asks or _has_files(arguments)
        known.add(arrived, HostedRequest(request_id, request.engine_id, request.index))
        if SHARED_ARG in arguments:
            known.shared_names.add(_share.decode(arguments[SHARED_ARG])[0])
        self._of[request_id] = self._by_request[request.engine_id] = known

    def _reads(self, arguments: dict[str, Any]) -> frozenset[str] | None:
        """The locations that a request's blocks may ask for, if it is certain that they only read."""
        try:
            blocks = [_edits.decode(arguments[EDITS_ARG])] if EDITS_ARG in arguments else []
            encoded = [bytes(edit.block) for edits in blocks for edit in edits]
            encoded += [arguments[BLOCK_ARG]] if BLOCK_ARG in arguments else []
            return union(reads_of(_block.decode(one), self._paths) for one in encoded)
        except msgspec.DecodeError:
            # The host finds the same, and reports it.
            return None

    def finish(self, request_id: str, tokens: int | None, failure: Failure | None, failed_at: int | None) -> bool:
        """End a request that the scheduler has ended. Returns whether its blocks ran in a host."""
        trace = self._of.pop(request_id, None)
        if trace is None:
            return False
        if trace.failure is None:
            if trace.new:
                # It never was in a step.
                trace.begin([], StepRows([], [], 0, 0))
            trace.tell(Finished(request_id, tokens, failure, failed_at))
            self._send(trace)
        self._reports.finish(trace, request_id)
        if not any(one in self._of for one in trace.requests):
            trace.idle_since = time.monotonic()
            self._idle[trace.name] = trace
            if len(trace.requests) >= trace.choices:
                trace.complete = True
                self._reports.forget(trace)
        return True

    def _purge(self) -> None:
        """Forget traces whose hosts are gone, and give up the hosts of those of which no request comes any more."""
        for trace in list(self._idle.values()):
            if trace.closed:
                for one in trace.requests.values():
                    self._by_request.pop(one.request, None)
                self.traces.pop(trace.name, None)
                self._idle.pop(trace.name, None)
            elif not trace.complete and time.monotonic() - trace.idle_since > _IDLE_S:
                trace.complete = True
                self._reports.forget(trace)

    def steer(self, encoded: bytes) -> None:
        """Tell the hosts that live parameters change, each of its own trace's.

        Args:
            encoded: as `encode_changes` of `link/step_link.py` returns it.
        """
        sent, changes, over = _changes.decode(encoded)
        for name in changes.keys() | set(over):
            trace = self.traces.get(name)
            if trace is not None and trace.failure is None:
                own = {name: changes[name]} if name in changes else {}
                trace.tell(Steered(_encode((sent, own, [name] if name in over else []))))

    def take_result(self, generated: bytes) -> bool:
        """Pass on the adapter's message about an ended request. Returns whether its blocks run in a host."""
        trace = self._by_request.get(_generated.decode(generated)[0])
        if trace is None:
            return False
        if trace.failure is None:
            trace.tell(Generated(generated))
            self._send(trace)
        return True

    def __len__(self) -> int:
        self._purge()
        return sum(trace.name not in self._idle or trace.complete for trace in self.traces.values())

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, scheduled: dict[str, int], order: Iterable[str], index_of: Callable[[str], int]) -> bool:
        """Begin a step. Returns whether blocks in hosts take part in it.

        Args:
            scheduled: the number of tokens of each request of the step.
            order: the scheduler's ids, in the order of the rows.
            index_of: gives the index of the token that a request samples in this step.
        """
        self._active = []
        self._left_s = self._step_s
        self._rows_by_request = False
        self._passed = array("H")
        self._purge()
        if not self._of:
            return False
        spans: dict[HostedTrace, list[tuple[str, int, int]]] = {}
        rows: dict[HostedTrace, list[tuple[int, int]]] = {}
        places: dict[HostedTrace, list[int]] = {}
        start = 0
        present = [request_id for request_id in order if request_id in scheduled]
        for place, request_id in enumerate(present):
            count = scheduled[request_id]
            trace = self._of.get(request_id)
            if trace is not None and trace.failure is None:
                spans.setdefault(trace, []).append((request_id, count, index_of(request_id)))
                rows.setdefault(trace, []).append((start, count))
                places.setdefault(trace, []).append(place)
            start += count
        self._active = list(spans)
        waiting = []
        for trace in self._active:
            fresh = bool(trace.new)
            trace.begin(spans[trace], StepRows(rows[trace], places[trace], start, len(present)))
            if (trace.reads is None and (fresh or trace.begins)) or (fresh and trace.asks):
                waiting.append(trace)
        self._ask(waiting)
        self._watch()
        return bool(self._active)

    def begin_for(self, states: Mapping[str, Any], scheduled: dict[str, int], order: list[str]) -> bool:
        """Begin a step. Returns whether blocks in hosts take part in it.

        Args:
            states: vLLM's requests, each with `num_computed_tokens` and `num_prompt_tokens`, by the scheduler's id.
            scheduled: how many tokens the step has of each request.
            order: the requests of the step, in the order of the batch.
        """

        def index_of(request_id: str) -> int:
            state = states[request_id]
            index: int = state.num_computed_tokens + scheduled[request_id] - state.num_prompt_tokens
            return index

        return self.begin(scheduled, order, index_of)

    def pass_by(self, locations: Collection[str]) -> bool:
        """Count these locations as passed, if no block wants anything there. Returns whether none does."""
        if any(map(self.wants, locations)):
            return False
        if self.active:
            self._passed.extend(map(self._number, locations))
        return True

    def wants(self, location: str) -> bool:
        """Whether a block in a host wants something at a location in this step."""
        return location in self._watching

    @property
    def active(self) -> bool:
        """Whether blocks in hosts take part in the step."""
        return bool(self._active)

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> Any:
        """Serve a location to the blocks that want it. Returns the value as they leave it."""
        number = self._number(location)
        watching = self._watching.get(location)
        if watching is None:
            self._passed.append(number)
            return value
        waiting = []
        copies = LateCopies() if self._model.device.type == "cuda" else None
        for trace in watching:
            waits = trace.passes(location)
            if waits or location in trace.observed:
                self._share(trace, location, value, copies, by_request=by_request)
            if waits and trace.failure is None:
                waiting.append(trace)
        self._passed.append(number)
        if waiting:
            replies = self._ask(waiting)
            value = self._edited(value, replies)
            self._watch()
        return value

    def end(self) -> None:
        """End the step: the hosts report it."""
        for trace in self._active:
            if trace.failure is None:
                trace.end(self._passed)
                self._send(trace)
        self._active, self._watching = [], {}

    # --- with hosts ---------------------------------------------------------------------------------------------------

    def _number(self, location: str) -> int:
        number = self._numbers.get(location)
        if number is None:
            number = self._numbers[location] = len(self._names)
            self._names.append(location)
        return number

    def _watch(self) -> None:
        watching: dict[str, list[HostedTrace]] = {}
        for trace in self._active:
            if trace.failure is None:
                for location in trace.wanted:
                    watching.setdefault(location, []).append(trace)
        self._watching = watching

    def _share(
        self, trace: HostedTrace, location: str, value: Any, copies: LateCopies | None, *, by_request: bool
    ) -> None:
        began = time.monotonic()
        while trace.failure is None:
            try:
                trace.reach(location, value, self._passed, by_request=by_request, copies=copies)
                return
            except NoRoom:
                left = self._left_s - (time.monotonic() - began)
                if left <= 0:
                    self._fail(trace, too_slow(self._step_s, _WAITED))
                else:
                    with self._reports.returned:
                        self._reports.returned.wait(min(left, 0.05))
            except Exception as error:  # it costs the trace, not the engine
                self._fail(trace, lost(f"{location} cannot be shared: {type(error).__name__}: {error}"))
        self._left_s -= time.monotonic() - began

    def _send(self, trace: HostedTrace, *, waits: bool = False) -> bool:
        if waits:
            self._reports.wait_for(trace)
        try:
            later = trace.send(self._names, waits=waits)
        except ChannelClosed:
            self._fail(trace, lost(""))
            return False
        if later is not None:
            self._reports.send_later(trace, later)
        return True

    def _ask(self, traces: list[HostedTrace]) -> list[tuple[HostedTrace, Reply]]:
        """Send the hosts of these traces what they have not been told, and wait for their replies."""
        asked = [trace for trace in traces if self._send(trace, waits=True)]
        began = time.monotonic()
        replies = []
        for trace in asked:
            try:
                reply = self._reply(trace, began)
                if trace.reads is None:
                    trace.take(reply)
                replies.append((trace, reply))
            except ChannelTimeout:
                self._fail(trace, too_slow(self._step_s, _WAITED))
            except ChannelClosed:
                self._fail(trace, lost(""))
            except Exception as error:  # it costs the trace, not the engine
                self._fail(trace, lost(f"{type(error).__name__}: {error}"))
        self._left_s -= time.monotonic() - began
        return replies

    def _reply(self, trace: HostedTrace, began: float) -> Reply:
        while True:
            left = self._left_s - (time.monotonic() - began)
            said = _said.decode(trace.calls.receive(max(left, 0.001)))
            if isinstance(said, Reply):
                return said
            trace.calls.send(_encode(self._answered(trace, said)))

    def _fail(self, trace: HostedTrace, failure: Failure) -> None:
        """End a trace whose host is gone, or is of no use any more."""
        if trace.failure is None:
            trace.failure = failure
            logger.warning("the host of the blocks of %s has ended: %s", trace.name, failure.message)
        trace.host.kill()
        self._reports.lose(trace)

    def _edited(self, value: Any, replies: list[tuple[HostedTrace, Reply]]) -> Any:
        fresh: dict[int, torch.Tensor] = {}
        for trace, reply in replies:
            shared, memory = trace.shared, trace.host.returned
            try:
                if reply.edited and shared is not None:
                    shared.write_back(reply, memory)
            except Exception as error:  # such as rows that do not fit
                self._fail(trace, lost(str(error)))
        for trace, reply in replies:
            shared, memory = trace.shared, trace.host.returned
            try:
                if reply.replaced is not None and shared is not None and trace.failure is None:
                    value = shared.replace(value, reply, memory, fresh)
            except Exception as error:  # such as rows that do not fit
                self._fail(trace, lost(str(error)))
        return value

    # --- for blocks ---------------------------------------------------------------------------------------------------

    def _answered(self, trace: HostedTrace, request: Request) -> Answer:
        """Do what a block has asked of the model."""
        try:
            if not request.path:
                return Answer(self._given(trace, self._input(request.attribute)))
            path = request.path.removeprefix("model").removeprefix(".")
            envoy = self._model.get(path) if path else self._model
            if request.attribute:
                return Answer(self._given(trace, getattr(envoy._module, request.attribute)))
            assert request.value is not None
            taken = unpack_value(request.value, lambda _, shape: self._taken(trace, shape), self._module)
            args, kwargs = taken
            return Answer(self._given(trace, envoy(*args, **kwargs)))
        except Exception as error:
            return Answer(error=(type(error).__name__, str(error)[:10_000]))

    def _input(self, name: str) -> torch.Tensor:
        """The bytes of the file of a large variable."""
        if not _INPUT.fullmatch(name):
            raise ValueError(f"no large variable has the name {name!r}")
        path = str(self.inputs / name)
        return torch.from_file(path, shared=False, size=os.stat(path).st_size, dtype=torch.uint8)

    def _module(self, given: Any) -> Any:
        """A module of the model that a block passes to another one, by its path."""
        if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
            raise ValueError("no module of the model")
        return self._model.get(given[0].removeprefix("model."))

    def _taken(self, trace: HostedTrace, shape: Shape) -> torch.Tensor:
        device = self._model.device
        return trace.host.returned.read(shape).to(device)

    def _given(self, trace: HostedTrace, value: Any) -> Shared:
        memory = trace.host.given

        def write(tensor: torch.Tensor) -> Shape:
            start = memory.room(tensor.nbytes)
            if start is None:
                raise ValueError(f"it takes more than the {memory.size} bytes of memory that a block shares")
            memory.write(tensor.detach(), start)
            return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

        return pack_value(value, write, _refuse)


def _has_files(arguments: dict[str, Any]) -> bool:
    """Whether a block has a large variable, for which its host asks the worker when it takes the block."""
    encoded = arguments.get(BLOCK_ARG)
    if encoded is None:
        return False
    try:
        waiting = [unpack(_block.decode(encoded).variables)]
    except ValueError:
        return False
    while waiting:
        one = waiting.pop()
        if isinstance(one, ArrayRef):
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return False


def valid_samples(served: torch.Tensor, drawn: torch.Tensor, size: int) -> torch.Tensor:
    """The token ids `[requests, 1]` that blocks have left, and the drawn ones where those are none of the model's."""
    return torch.where(((served >= 0) & (served < size)).all(-1, keepdim=True), served, drawn)


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be given to a block in a process of its own (--blocks host)")
