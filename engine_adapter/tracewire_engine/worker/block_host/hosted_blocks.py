"""Runs the blocks of all traces in hosts: tells the hosts what the model reaches, and waits for them where it must.

A host belongs to one trace, or to several of one tenant whose blocks only compute (`tenant_hosts.py`). So a block that
takes its host down, or that does not answer in time, costs no trace of another tenant, and the tenant's other traces in
the host an attempt.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes
from tracewire_engine.protocol.block_host import Arrived, EditsFailed, Finished, Generated, Reply, Steered
from tracewire_engine.protocol.keys import SHARED_ARG
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.step_states import token_index_of

from .accounts import Accounts, has_files, known_leaves
from .earlier_stages import EarlierStages
from .edit_runs import EditRuns
from .host import BlockHost, HostedRequest, HostedTrace
from .host_turns import HostTurns
from .left_values import Left, merged
from .pool import HostPool
from .rank_link import RankLink, Served, StepBegan, StepWatch
from .reading import ModelPaths
from .report_thread import ReportThread
from .rows import StepRows
from .staged_reads import StagedReads
from .stream_visits import StreamVisits
from .tenant_hosts import TenantHosts

__all__ = ["HostedBlocks", "valid_samples"]

#: For how long a trace of which no request is left keeps its host, if the worker has not seen all of its requests.
_IDLE_S = 120.0

#: How many bytes a step has at least whose rows the thread that passes on reports copies to the hosts, so that the
#: model's thread does not.
_COPIED_LATER = 1 << 20

_share: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)
_encode = msgspec.msgpack.Encoder().encode
_changes: msgspec.msgpack.Decoder[tuple[float, dict[str, msgspec.Raw], list[str]]] = msgspec.msgpack.Decoder(
    tuple[float, dict[str, msgspec.Raw], list[str]]
)
_generated: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)


class HostedBlocks:
    """The traces with blocks of this worker.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
        paths: of the model's modules.
        pool: of hosts.
        reports: passes on what hosts report.
        step_s: how long the model waits for all blocks of a step, in seconds.
        others: under tensor parallelism, the connection to the other ranks.
        earlier: under pipeline parallelism, the connection to the earlier stages.
        visits: if a stream can wait for hosts, without other ranks and stages.
    """

    def __init__(
        self,
        model: Any,
        paths: ModelPaths,
        pool: HostPool,
        reports: ReportThread,
        step_s: float,
        others: RankLink | None = None,
        earlier: EarlierStages | None = None,
        visits: StreamVisits | None = None,
    ) -> None:
        alone = others is None and earlier is None
        self._accounts, self._reports, self._on_gpu = Accounts(paths, edits=alone), reports, model.device.type == "cuda"
        self._hosts = TenantHosts(pool, reports, visits=visits is not None)
        #: Waits until hosts can be started, so that the model waits for no start later.
        self.wait_ready = pool.wait_ready
        self._turns = HostTurns(model, reports, step_s, visits)
        #: Answers what hosts ask for.
        self.answers = self._turns.answers
        self._others = self.answers.others = others
        self._earlier = self.answers.earlier = earlier
        #: Whether the step has begun before this stage came to it.
        self._ahead = False
        #: Where hosts want something, and what the other ranks were told of that. All ranks count what the model passes
        #: in the latter.
        self._watch_now, self._told = StepWatch(), StepWatch()
        self.traces: dict[str, HostedTrace] = {}
        self._of: dict[str, HostedTrace] = {}
        self._by_request: dict[str, HostedTrace] = {}
        #: Traces of which no request is left, although the worker may still see others of theirs.
        self._idle: dict[str, HostedTrace] = {}
        #: The hosts of the step, and by location those that want something there.
        self._layout: _Layout | None = None
        self._active: list[BlockHost] = []
        self._watching: dict[str, list[BlockHost]] = {}
        #: What the step has reached that hosts read which the model does not wait for; and what their blocks write.
        self._staged = StagedReads(self._turns, reports, pinned=self._on_gpu)
        sums = model.__dict__.get("_tracewire_sums", True)
        self._edits = EditRuns(model.device, sums=sums, exact=not self._on_gpu)

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        request: Any,
        arguments: dict[str, Any],
        trace: tuple[str, int, str | None],
        reserved: Iterable[str],
        live: LiveRun,
    ) -> None:
        """Take a new request with blocks.

        Args:
            request_id: the scheduler's id.
            request: the worker's record of the request.
            arguments: those of its `extra_args` for blocks.
            trace: the name of its trace's attempt, how many choices all requests of it have together, and its tenant
                (`None`: it shares no host).
            reserved: the names under which declared interventions of the request save.
            live: the live parameters of its run.

        Raises:
            OSError: no host could be started.
        """
        self.expect(request_id, arguments)
        name, choices, tenant = trace
        self._purge()
        known = self.traces.get(name)
        account = self._accounts.of(arguments, self._edits.room, live.values)
        while known is None or known.complete:
            found = HostedTrace(name, self._hosts.of(tenant, account), choices)
            if found.host.add(found):
                known = self.traces[name] = found
        self._idle.pop(name, None)
        self._layout = None
        taken = HostedRequest(known, request_id, request.engine_id, request.index)
        arrived = Arrived(request_id, arguments, list(reserved), list(account.known or ()))
        known.host.take_request(taken, arrived, account)
        if account.known:
            leaves = known_leaves(arguments, account.known, live.values)
            self._edits.open(request_id, account.known, leaves, live)
        if SHARED_ARG in arguments:
            known.host.share(known, _share.decode(arguments[SHARED_ARG])[0])
        self._of[request_id] = self._by_request[request.engine_id] = known

    def expect(self, request_id: str, arguments: dict[str, Any]) -> None:
        """Note that a new request has blocks: all ranks and stages know it, whether it can be taken or not."""
        if self._others is not None:
            self._others.requests.add(request_id)
        if self._earlier is not None:
            self._earlier.open(request_id, self._accounts.of(arguments))

    def finish(self, request_id: str, tokens: int | None, failure: Failure | None, failed_at: int | None) -> bool:
        """End a request that the scheduler has ended. Returns whether its blocks ran in a host.

        The host is told with `tell_ends`.
        """
        if self._others is not None:
            self._others.requests.discard(request_id)
        if self._earlier is not None:
            self._earlier.discard(request_id)
        trace = self._of.pop(request_id, None)
        if trace is None:
            return False
        self._edits.discard(request_id)
        self._layout = None
        host = trace.host
        if host.failure is None:
            if any(one.id == request_id for one in host.new):
                # It never was in a step.
                host.begin([], None)
            host.tell(Finished(request_id, tokens, failure, failed_at, trace.keeps))
            self._turns.ending.add(host)
        self._reports.finish(trace.requests[request_id])
        if not any(one in self._of for one in trace.requests):
            trace.idle_since = time.monotonic()
            self._idle[trace.name] = trace
            if len(trace.requests) >= trace.choices:
                trace.complete = True
                self._reports.forget(trace)
        return True

    def tell_ends(self) -> None:
        """Tell the hosts which of their requests have ended since the last call: the model may come to rest now."""
        self._turns.tell_ends()

    def _purge(self) -> None:
        """Forget traces whose hosts are gone, and give up the hosts of those of which no request comes any more."""
        for trace in list(self._idle.values()):
            if trace.closed:
                for one in trace.requests.values():
                    self._by_request.pop(one.request, None)
                if self.traces.get(trace.name) is trace:
                    del self.traces[trace.name]
                self._idle.pop(trace.name, None)
            elif not trace.complete and time.monotonic() - trace.idle_since > _IDLE_S:
                trace.complete = True
                self._reports.forget(trace)

    def steer(self, encoded: bytes) -> None:
        """Tell the hosts that live parameters change, each of its own trace's.

        Args:
            encoded: as `encode_changes` of `link/step_link.py` returns it.
        """
        for name, steered in _steered(encoded):
            trace = self.traces.get(name)
            if trace is not None and trace.failure is None:
                trace.host.tell(steered)

    def fail(self, request_id: str, failure: Failure) -> bool:
        """End the host of a request for which another rank could not do its part. Returns whether it has one."""
        trace = self._of.get(request_id)
        if trace is not None:
            self._turns.fail(trace.host, failure)
        return trace is not None

    def take_result(self, generated: bytes) -> bool:
        """Pass on the adapter's message about an ended request. Returns whether its blocks run in a host."""
        trace = self._by_request.get(_generated.decode(generated)[0])
        if trace is not None and trace.failure is None and not trace.closed:
            trace.host.tell(Generated(generated))
            self._turns.send(trace.host)
        return trace is not None

    def __len__(self) -> int:
        self._purge()
        return sum(trace.name not in self._idle or trace.complete for trace in self.traces.values())

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(
        self, scheduled: dict[str, int], order: Iterable[str], index_of: Callable[[str], int], *, waited: bool = False
    ) -> bool:
        """Begin a step. Returns whether blocks in hosts take part in it, or other ranks are told that some do.

        Args:
            scheduled: the number of tokens of each request of the step.
            order: the scheduler's ids, in the order of the rows.
            index_of: gives the index of the token that a request samples in this step.
            waited: whether earlier stages wait for blocks. Then the caller tells the other ranks, later.
        """
        self._active = []
        self._staged.drop()
        self._turns.begin_step()
        self._purge()
        told = self._others is not None and self._others.takes_part(scheduled)
        if self._earlier is None and not self._of and not told:
            return False
        present = [request_id for request_id in order if request_id in scheduled]
        if self._earlier is not None:
            self._earlier.begin(scheduled, present)
        if not self._of and not told:
            return False
        self._reports.between_steps()
        if self._layout is None or not self._layout.is_of(scheduled, present):
            self._layout = _Layout(scheduled, present, self._of)
            self._turns.lay_out()
        layout = self._layout
        self._edits.begin(layout, lambda: [(request_id, scheduled[request_id]) for request_id in present])
        self._active = [host for host in layout.requests if host.failure is None]
        waiting, ahead = list[BlockHost](), list[BlockHost]()
        # If no earlier stage waits, no block of the step may write, whatever others of its host do.
        reads = None if self._earlier is None else self._earlier.reads_in(scheduled)
        for host in self._active:
            before, new = host.present, host.new
            spans = [(request_id, count, index_of(request_id)) for request_id, count in layout.requests[host]]
            host.begin(spans, layout.rows[host], layout.present[host])
            if host.reads is None and reads is None:
                if self._turns.is_visited(host):
                    continue
                # The last reply said nothing of requests that were not in its step.
                if host.begins or not host.present <= before:
                    waiting.append(host)
                elif 0 in host.waits.values():
                    ahead.append(host)
            elif host.kind is None and any(has_files(one.arguments) for one in new):
                waiting.append(host)
        if ahead:
            self._turns.tell_ahead(ahead)
        if waiting:
            self._turns.ask(waiting)
        for host in self._active if reads is not None else ():
            host.only_read(reads or frozenset())
        self._watch()
        if not waited:
            self._tell_began(scheduled)
        # All ranks run the step by the same CUDA graph.
        return told or bool(self._active)

    def _tell_began(self, scheduled: Collection[str]) -> None:
        if self._others is not None and self._others.takes_part(scheduled):
            self._others.tell(StepBegan(self._news()))

    def begin_ahead(self, scheduled: Collection[str]) -> None:
        """Serve the hosts what earlier stages reach in a step with these requests, if these stages wait for it.

        Called before this stage waits for the model's values of the step.
        """
        if self._earlier is None or not self._earlier.wait_in(scheduled):
            return
        requests = self._earlier.began()
        indices = {request_id: index for request_id, _, index in requests}
        counts = {request_id: count for request_id, count, _ in requests}
        self.begin(counts, list(counts), indices.__getitem__, waited=True)
        self._earlier.tell_began(self._watch_now)
        self._take_earlier()
        self._watch()
        self._tell_began(counts)
        self._ahead = True

    def begin_for(self, states: Mapping[str, Any], scheduled: dict[str, int], order: list[str]) -> bool:
        """Begin a step. Returns what `begin` does.

        Args:
            states: vLLM's requests, each with `num_computed_tokens` and `num_prompt_tokens`, by the scheduler's id.
            scheduled: how many tokens the step has of each request.
            order: the requests of the step, in the order of the batch.
        """
        if self._ahead:
            self._ahead = False
            return self.active or (self._others is not None and self._others.takes_part(scheduled))
        return self.begin(scheduled, order, token_index_of(states, order, scheduled))

    def pass_by(self, locations: Collection[str]) -> bool:
        """Count these locations as passed, if no block wants anything there. Returns whether none does."""
        if not self.active:
            return True
        # All ranks decide it alike.
        watched = self._watching if self._others is None else self._told
        if any(location in watched for location in locations):
            return False
        self._turns.passed.extend(map(self._turns.number, locations))
        return True

    def wants(self, location: str) -> bool:
        """Whether hosts are given the value at a location when the model passes it the next time."""
        if self._others is not None:
            return self.active and self._told.due(location)
        return location in self._watching

    @property
    def active(self) -> bool:
        """Whether blocks in hosts take part in the step."""
        return bool(self._active)

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> Any:
        """Serve a location to the blocks that want it. Returns the value as they leave it."""
        number, watching = self._turns.number(location), list(self._watching.get(location, ()))
        told = self._others is not None and self._told.passes(location)
        if not watching and not told:
            self._turns.passed.append(number)
            return value
        self._take_earlier()
        value, watching = self._turns.visit(watching, location, value, pinned=self._on_gpu, by_request=by_request)
        waiting = self._share(location, value, watching, by_request=by_request)
        self._turns.passed.append(number)
        # A change that the other ranks are not told of would part them.
        assert told or not waiting or self._others is None
        if waiting or told:
            value = merged(value, self._left_by(self._turns.ask(waiting), told=told), self._turns.misfit)
        return value

    def _share(self, location: str, value: Any, watching: Sequence[BlockHost], *, by_request: bool) -> list[BlockHost]:
        """Share a value with these hosts. Returns those for which the model waits."""
        readers = [host for host in watching if host.reads is not None]
        if readers:
            self._staged.reach(location, value, readers, self._active, by_request=by_request)
            self._edit(location, value, by_request=by_request)
            watching = [host for host in watching if host.reads is None]
        if not watching:
            return []
        return self._turns.share_with(watching, location, value, pinned=self._on_gpu, by_request=by_request)

    def _edit(self, location: str, value: Any, *, by_request: bool) -> None:
        """Write what blocks of hosts for which the model does not wait write at a location."""
        try:
            self._edits.apply(location, value, by_request=by_request)
        except Exception as error:  # it costs the hosts, not the engine
            self._accounts.leave(location)
            for host in {self._of[name].host for name in self._edits.due(location)}:
                self._turns.misshared(host, location, error)

    def end(self) -> None:
        """End the step: the hosts report it."""
        self._take_earlier()
        self._staged.give(self._active)
        failed = self._edits.take_failed()
        for host in self._active:
            if host.failure is None:
                host.end(self._turns.passed)
                if own := [name for name in failed if name in self._of and self._of[name].host is host]:
                    host.tell(EditsFailed(own))
                # It is told of the next step soon, or another thread copies its rows.
                copied = host.reads is not None and self._staged.expected >= _COPIED_LATER
                self._turns.send(host, later=self._reports.short or copied)
            else:
                host.drop_untold()
        self._active, self._watching = [], {}

    def _take_earlier(self) -> None:
        """Give the hosts what the earlier stages have reached in the step, unless they have it."""
        if self._earlier is None or not self._earlier.due:
            return
        passed, self._turns.passed = self._turns.passed, array("H")
        for one in self._earlier.take():
            for request_id, failure in one.failures.items():
                self.fail(request_id, failure)
            for location in one.passed:
                for host in self._watching.get(location, ()):
                    host.passes(location)
                self._turns.passed.append(self._turns.number(location))
            if not one.location:
                continue
            watching = self._watching.get(one.location, ())
            waiting = self._turns.share_with(watching, one.location, one.value, pinned=False, by_request=False)
            self._turns.passed.append(self._turns.number(one.location))
            if one.waits:
                _, edits, data = self._turns.copied(self._turns.ask(waiting))
                self._watch()
                self._earlier.serve(Served(edits, self._watch_now), data)
        self._turns.passed += passed

    def _watch(self) -> None:
        """Note where hosts want something from now on."""
        told = self._others or self._earlier
        self._watching, self._watch_now = _watched_by(self._active, told=told is not None)

    def _news(self) -> StepWatch | None:
        """Where the other ranks do something from now on; `None` if it is what they know."""
        if self._watch_now == self._told:
            return None
        self._told = self._watch_now
        return self._told

    def _left_by(self, replies: list[tuple[BlockHost, Reply]], *, told: bool) -> list[Left[BlockHost]]:
        """What hosts leave at a location, in copies of which the other ranks are told if they wait for that."""
        found = [(host, reply) for host, reply in replies if reply.edited or reply.replaced is not None]
        if self._others is None or not told:
            self._watch()
            return [Left(host, host.shared, reply, host.process.returned) for host, reply in found if host.shared]
        left, edits, data = self._turns.copied(found)
        self._watch()
        self._others.tell(Served(edits, self._news()), data)
        return [Left(host, host.shared, reply, RowBytes(data)) for host, reply in left if host.shared]


def _steered(encoded: bytes) -> Iterator[tuple[str, Steered]]:
    """What the host of each trace is told of changes of live parameters."""
    sent, changes, over = _changes.decode(encoded)
    for name in changes.keys() | set(over):
        own = {name: changes[name]} if name in changes else {}
        yield name, Steered(_encode((sent, own, [name] if name in over else [])))


def _watched_by(hosts: Iterable[BlockHost], *, told: bool) -> tuple[dict[str, list[BlockHost]], StepWatch]:
    """The hosts that want something at each location; and what others are told of that, if there are any to be told."""
    watching: dict[str, list[BlockHost]] = {}
    watch = StepWatch()
    for host in hosts:
        if host.failure is not None:
            continue
        # Once, since another thread may change it.
        observed = host.observed
        for location in {*host.waits, *observed}:
            watching.setdefault(location, []).append(host)
        if told:
            watch.observed |= observed
            for location, after in host.waits.items():
                watch.waits[location] = min(after, watch.waits.get(location, after))
    return watching, watch


class _Layout:
    """Which requests of a step each host has, and where their rows lie.

    Args:
        scheduled: the number of tokens of each request.
        present: the requests of the step, in the order of the rows.
        traces: by the scheduler's id, the trace of each request with blocks.
    """

    def __init__(self, scheduled: dict[str, int], present: list[str], traces: Mapping[str, HostedTrace]) -> None:
        self._key = present, [scheduled[request_id] for request_id in present]
        requests: dict[BlockHost, list[tuple[str, int]]] = {}
        spans: dict[BlockHost, list[tuple[int, int]]] = {}
        places: dict[BlockHost, list[int]] = {}
        start = 0
        for place, (request_id, count) in enumerate(zip(*self._key, strict=True)):
            trace = traces.get(request_id)
            if trace is not None:
                requests.setdefault(trace.host, []).append((request_id, count))
                spans.setdefault(trace.host, []).append((start, count))
                places.setdefault(trace.host, []).append(place)
            start += count
        self.requests = requests
        self.present = {host: frozenset([name for name, _ in own]) for host, own in requests.items()}
        self.rows = {host: StepRows(spans[host], places[host], start, len(present)) for host in requests}

    def is_of(self, scheduled: dict[str, int], present: list[str]) -> bool:
        """Whether a step is laid out so, if the traces are the same."""
        return present == self._key[0] and [scheduled[request_id] for request_id in present] == self._key[1]


def valid_samples(served: torch.Tensor, drawn: torch.Tensor, size: int) -> torch.Tensor:
    """The token ids `[requests, 1]` that blocks have left, and the drawn ones where those are none of the model's."""
    return torch.where(((served >= 0) & (served < size)).all(-1, keepdim=True), served, drawn)
