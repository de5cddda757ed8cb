"""Plans and runs the declared interventions of a step in the worker, for all requests at once.

A request brings a list of interventions instead of code. The worker makes a `_Plan` for each composition of the batch.
At each location, a plan has groups of interventions of any requests that can run together, with their rows of the flat
batch and their vectors stacked on the device. While the batch stays the same, a step costs a few kernels a group and no
Python per request. The reads of a step leave as one buffer. Its `Layout`, which assigns the bytes to requests, was sent
when the plan was made.

Interventions of a request keep their order: only those at the same place in their lists share a group, and groups run
in that order. They run before a block is served at the same location.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tracewire_bus.wire.messages import Failure, Reading
from tracewire_engine.protocol.messages import Batch, Layout
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, BlockKey, Ranks
from tracewire_engine.worker.step_states import computed_tokens

from .attention import AttentionSite, SiteGroup
from .conditions import Signals, Windows
from .connections import connect, made_windows
from .drafted_rows import Served
from .gathering import Gathering
from .graph_proof import BothGraphs, GraphProof, put_back, tensors_in
from .groups import Arrangement, Collector, Group, LocationValues, ReadGroup, Results, raw, tensors_of
from .joined_probes import JoinedProbes, join_probes, read_joined
from .key_pool import KeyPools
from .kinds import group_kind
from .later_groups import FeatureGroup
from .layouts import made_layout
from .members import Member
from .ops import Declaration, DecodedCache
from .patches import KeepGroup
from .recorded_plans import KernelRecorder, RecordedKernels
from .served_requests import ServedRequests
from .tap_buffers import StepTable, TapBuffers

__all__ = ["DeclaredRequests", "LocationHook"]

logger = logging.getLogger("vllm.tracewire")

#: After how many steps a plan is recorded. Recording costs about as much as it saves in that many steps.
RECORD_AFTER = 8


class LocationHook:
    """All groups at one location, in order."""

    def __init__(self, location: str, owner: DeclaredRequests) -> None:
        self.location = location
        self.side = location.rpartition(".")[2]
        self.groups: list[Group] = []
        #: Whether the forward pass has reached the location.
        self.reached = False
        self._owner = owner
        self._recorded: RecordedKernels | None = None
        #: The addresses of the values at the recording, and the tensors that the groups read then. Each replay writes
        #: these tensors anew.
        self._addresses: tuple[int, ...] = ()
        self._found: list[tuple[Collector, int, torch.Tensor | None]] = []

    @property
    def edits(self) -> bool:
        """Whether any group changes the value."""
        return any(group.edits for group in self.groups)

    def replay(self, value: Any) -> None:
        """Like `run`, for a value at the same address in all of the plan's steps, as in CUDA graphs.

        Once a plan has held for `RECORD_AFTER` steps, its kernels are recorded as a CUDA graph, and launched together.
        """
        plan = self._owner.plan
        if plan is None or (self._recorded is None and not (plan.recordable and plan.steps >= RECORD_AFTER)):
            return self.run(value)
        addresses = tuple([item.data_ptr() for item in tensors_of(value, self.side)])
        if self._recorded is None:
            plan.recordable = not self._owner.stale and self._record(value)
            self._addresses = addresses
        if self._recorded is None or addresses != self._addresses:
            return self.run(value)
        self._recorded.replay()
        for collector, site, found in self._found:
            collector.found[site] = found
        plan.replayed += 1
        return None

    def _record(self, value: Any) -> bool:
        """Record the kernels of `run` for values at these addresses. Returns whether recording worked."""

        def serve() -> None:
            values = LocationValues(value, self.side, self._owner.total, self._owner.sums)
            for group in self.groups:
                group.serve(values)

        try:
            for group in self.groups:
                group.prepare()
        except Exception:  # they then fail by themselves
            logger.exception("the interventions at %s could not be prepared for a CUDA graph", self.location)
            return False
        self._recorded = self._owner.recorders[False].record(serve)
        if self._recorded is None and self._owner.plan is not None:
            self._owner.plan.again()
        self._found = [
            (group.collector, group.site, group.collector.found[group.site])
            for group in self.groups
            if group.collector is not None
        ]
        return self._recorded is not None

    @property
    def by_head(self) -> bool:
        """Whether each rank can serve its own part of the value: all groups edit attention heads."""
        return all(group.by_head for group in self.groups)

    def run(self, value: Any, shard: int = -1) -> None:
        """Serve the location's value to the groups; edits land in it, in place. Raises nothing.

        `shard`: the number of the rank whose part of the features the value is; -1 if it is whole.
        """
        self.reached = True
        try:
            values = LocationValues(value, self.side, self._owner.total, self._owner.sums, shard=shard)
        except Exception as error:
            for group in self.groups:
                self._owner.fail(group.members, error)
            self.groups = []
            return
        self._run(values, self.groups)

    def read(self, rows: torch.Tensor, done: Container[int], *, lasting: bool) -> None:
        """Serve the reads alone, of the rows that a tap's kernel has copied. Raises nothing.

        `done`: the ids of groups that have been served. `lasting`: the rows stay as they are until the step's reads
        have left the device.
        """
        values = LocationValues(rows, "output", self._owner.total, lasting=lasting)
        self._run(values, [one for one in self.groups if isinstance(one, ReadGroup) and id(one) not in done])

    def _run(self, values: LocationValues, groups: list[Group]) -> None:
        for group in list(groups):
            try:
                group.serve(values)
            except Exception as error:
                self.groups.remove(group)
                self._owner.fail(group.members, error)


class _Join:
    """How a plan's reads become one tensor, in steps that reach the locations in one way."""

    def __init__(self) -> None:
        #: Whether the plan has tried to record the joining.
        self.tried = False
        #: The reads joined into one tensor, which each launch writes anew; and the recorded kernels that join them.
        self.flat: torch.Tensor | None = None
        self.kernels: RecordedKernels | None = None


class _Plan:
    """The operations at each location for one composition of the batch."""

    def __init__(self) -> None:
        self.hooks: dict[str, LocationHook] = {}
        self.collectors: list[Collector] = []
        self.declarations: list[Served] = []
        self.req_ids: list[str] = []
        self.computed: list[int] = []
        #: How many tokens each has in the step, and the places of those with declared interventions.
        self.counts: list[int] = []
        self.places: list[int] = []
        #: Whether any request of the step reads.
        self.reads = False
        #: Whether the next step may have the same plan: every request with declared interventions generates.
        self.steady = False
        self.steps = 0
        #: The layout of the reads, and the collectors of which it is.
        self.layout: Layout | None = None
        self.read: list[Collector] = []
        #: Whether its hooks can be recorded as CUDA graphs; how many recordings were launched in the step under way.
        self.recordable = True
        self.replayed = 0
        #: What the taps' kernels do, if the plan fits; whether that was asked; whether they serve the step under way,
        #: and its reads are still in the buffers.
        self.table: StepTable | None = None
        self.tabled = False
        self.buffered = False
        self.unread = False
        #: The recorded kernels that restrict the edits with conditions; whether the plan has tried to record them.
        self.restriction: RecordedKernels | None = None
        self.restricted = False
        #: The last token ids of each row, if a condition needs them; whether there is any condition or controller.
        self.windows: Windows | None = None
        self.conditional = False
        #: Whether the step has begun whose end is to be noted.
        self.under_way = False
        #: The probes that are read together from the buffers; `None` until that was asked.
        self.joined: list[JoinedProbes] | None = None
        #: By `buffered`.
        self.joins = {False: _Join(), True: _Join()}

    @property
    def groups(self) -> Iterator[Group]:
        """Its groups at all locations."""
        return (group for hook in self.hooks.values() for group in hook.groups)

    @property
    def readers(self) -> Iterator[tuple[Collector, int]]:
        """The collectors of its groups that read, each with the place of what the group reads."""
        return ((group.collector, group.site) for group in self.groups if group.collector is not None)

    def read_buffers(self, buffers: TapBuffers | None, *, lasting: bool) -> None:
        """Take the step's reads from the buffers, unless that was done.

        `lasting`: whether they are used before the next step begins, which writes to the buffers.
        """
        if self.unread and buffers is not None:
            self.unread = False
            done = read_joined(self._joined_in(buffers), buffers)
            for location, hook in self.hooks.items():
                hook.read(buffers.values(location), done, lasting=lasting)

    def prepare_reads(self, buffers: TapBuffers | None) -> bool:
        """Put on the device what reads need: what is made while kernels are recorded is there when they have run.

        Returns whether that worked. If not, each read fails by itself.
        """
        try:
            for group in self.groups:
                if isinstance(group, ReadGroup):
                    group.prepare()
            for one in self._joined_in(buffers) if buffers is not None else ():
                one.prepare()
        except Exception:  # such as out of memory
            logger.exception("the reads of a step could not be prepared for a CUDA graph")
            return False
        return True

    def _joined_in(self, buffers: TapBuffers) -> list[JoinedProbes]:
        if self.joined is None:
            self.joined = join_probes(self.groups, buffers)
        return self.joined

    def leave_buffers(self) -> None:
        """Serve the step under way at its locations."""
        self.buffered = self.unread = False
        for hook in self.hooks.values():
            hook.reached = False

    def take(self, group: Group | Gathering) -> None:
        """Take what a group, or what gathered the groups, says of the plan's later steps."""
        self.steady &= group.steady
        self.recordable &= group.recordable

    @cached_property
    def ranged(self) -> bool:
        """Whether a condition asks for the number of the plan's step."""
        return any(group.condition is not None and group.condition.ranged for group in self.groups)

    @cached_property
    def head_rows(self) -> int:
        """Of how many rows the step's reads need the logits."""
        return sum(sum(one.counts) * len(one.found) for one in self.collectors if one.wants_head)

    @property
    def drafted(self) -> bool:
        """Whether a request with declared interventions has drafts in the step, whose plan no other step has."""
        return any(one.drafts for one in self.declarations)

    def accept(self, sampled: Sequence[int]) -> None:
        """Take how many tokens each request of the batch has got by a step with drafts, in the order of the batch."""
        found = dict(zip(self.req_ids, sampled, strict=True))
        for one in self.declarations:
            one.taken = min(one.drafts, max(0, found[one.declaration.id] - 1))
        if self.windows is not None:
            self.windows.shorten({one.declaration.tokens: one.rejected for one in self.declarations})

    def drop_rejected(self) -> None:
        """Drop the reads of drafts that the model did not take."""
        taken = {id(one.declaration): one.taken for one in self.declarations if one.drafts}
        if not taken:
            return
        for collector in self.collectors:
            collector.keep([one.draft <= taken.get(id(one.declaration), 0) for one in collector.members])
        self.collectors = [one for one in self.collectors if one.members]

    def again(self) -> None:
        """Make what the step has made so far anew when it is needed: it was recorded, and not run."""
        if self.windows is not None:
            self.windows.again()


class _Step(NamedTuple):
    """A step to plan: its requests in the order of the batch, with how many tokens of each it computes.

    `computed` is how many tokens of each were computed before, `drafts` which of its tokens are drafts.
    """

    req_ids: list[str]
    counts: list[int]
    total: int
    states: Mapping[str, Any]
    computed: list[int]
    drafts: Mapping[str, Sequence[int]]


class DeclaredRequests:
    """The declared interventions of the worker's live requests, and the plan of the step under way."""

    def __init__(self, device: torch.device, *, sums: bool = True) -> None:
        #: Whether the residual stream is the sum of a decoder layer's two results, if there are two.
        self.sums = sums
        self.decoded = DecodedCache(device)
        self.live: dict[str, Declaration] = {}
        #: The hooks of the step under way, by location.
        self.hooks: dict[str, LocationHook] = {}
        self.total = 0
        self.plan: _Plan | None = None
        #: By whether the model's head is among the kernels, which may be one that cannot be recorded; and for how many
        #: rows it is recorded at most.
        self.recorders = {with_head: KernelRecorder(device) for with_head in (False, True)}
        self.head_rows = 0
        #: Of how many rows the model's head computes logits at once; 0: of all.
        self.lens_rows = 0
        #: What steps leave for later ones; and what returns the token ids of the step under way, on the device.
        self.signals = Signals(device)
        self.served = ServedRequests(self.signals)
        self.ids: Callable[[], torch.Tensor] = lambda: torch.zeros(0, dtype=torch.int32)
        self._device = device
        self._layouts = 0
        #: Under pipeline parallelism, whether a location is on this stage.
        self.here: Callable[[str], bool] | None = None
        #: Whether the plan is outdated: a request came or went, or failed.
        self.stale = False
        #: Under tensor parallelism, the other ranks; and on an engine whose CUDA graphs have taps, their buffers.
        self.ranks: Ranks | None = None
        self.buffers: TapBuffers | None = None
        #: The keys that attention patterns need; the module at a location; the number of this rank under tensor
        #: parallelism, and what adds up a tensor of all ranks.
        self.pools = KeyPools()
        self.module_at: Callable[[str], Any] = lambda location: None
        self.shards: tuple[int, Callable[[torch.Tensor], torch.Tensor] | None] = 0, None
        self.proof = GraphProof()
        #: What the kernels at the taps do in the step under way that is not proven yet.
        self.unproven: frozenset[str] = frozenset()

    def add(self, request_id: str, declaration: Declaration) -> None:
        """Add the declared interventions of a new request, by the scheduler's name of the request."""
        self._end_step()
        self.live[request_id] = declaration
        declaration.id = request_id
        declaration.attach(self.signals)
        apart = declaration.split_by(self.here) if self.here is not None else None
        if apart is not None:
            message = f"the probe {apart!r} is on another pipeline stage than what depends on it: move one of them"
            self._failed(declaration, Failure(type="OtherStage", message=message, field="interventions"))
        self.stale = True

    def update_live(self, run: LiveRun) -> None:
        """Take the changed live parameters of `run`, which hold from the next step on."""
        for request_id in run.requests:
            declaration = self.live.get(request_id)
            if declaration is None:
                continue
            try:
                self.stale |= declaration.update_live(self.decoded.vectors)
            except Exception as error:  # such as too large for the device
                self._failed(declaration, Failure(type=type(error).__name__, message=str(error), field="live"))

    def pop(self, request_id: str) -> Declaration | None:
        """Remove and return the declared interventions of a request that is over; `None` if it has none."""
        found = self.live.pop(request_id, None)
        if found is not None:
            self.served.forget(request_id)
            self._end_step()
            found.detach(self.signals)
            self.stale = True
            self.pools.release(id(found))
        return found

    def forget(self, run: str) -> None:
        """Drop what prompts of a run have kept for its other prompts."""
        self.decoded.vectors.kept.forget(run)

    def fail(self, members: Iterable[Member], error: Exception) -> None:
        """End the interventions of these members' requests with an error. Other requests are unaffected."""
        for member in members:
            one = member.op.one
            name = getattr(one, "name", "") or type(one).__name__
            message = f"{name} at {getattr(one, 'at', '')}: {error}"
            failure = Failure(type=type(error).__name__, message=message, field="interventions")
            self._failed(member.declaration, failure)
        self.stale = True

    def _failed(self, declaration: Declaration, failure: Failure) -> None:
        """End a request's interventions with an error, unless they have failed."""
        self.stale = True
        if declaration.failure is None:
            declaration.failure = failure
            if self.ranks is not None:
                self.ranks.fail(BlockKey(declaration.id, DECLARED), lambda: failure)

    def agree(self, what: str, members: Iterable[Member]) -> bool:
        """Whether all ranks will gather the values of these members. `True` without tensor parallelism.

        Interventions on which the ranks differ fail. `what` names the values in that error.
        """
        ranks = self.ranks
        if ranks is None:
            return True
        asking = {BlockKey(one.declaration.id, DECLARED): one.declaration for one in members}
        asking = {key: one for key, one in asking.items() if one.failure is None}
        agreed = ranks.agree(what, asking)
        for key in asking.keys() - agreed:
            self._failed(
                asking[key], Failure(type="RanksDiffer", message=str(ranks.difference(key)), field="interventions")
            )
        return bool(agreed)

    def _end_step(self) -> None:
        """Note what later steps need of the last one, once."""
        plan = self.plan
        if plan is not None and plan.windows is not None and plan.under_way:
            plan.under_way = False
            plan.windows.end_step()

    # --- a step -----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether the next step must begin here: a request is live, or the last one has gone since the step before."""
        return bool(self.live) or self.plan is not None

    def begin(
        self,
        req_ids: list[str],
        scheduled: dict[str, int],
        total: int,
        states: Mapping[str, Any],
        drafts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Plan a step: `req_ids` in the order of the flat batch's rows, and how many tokens of each it computes.

        `drafts`: those of these tokens that are drafts, by request.
        """
        self._end_step()
        if not self.live:
            self.plan, self.hooks = None, {}
            return
        self.total = total
        self.served.step += 1
        plan = self.plan
        computed = computed_tokens(states, req_ids)
        counts = [scheduled.get(request_id, 0) for request_id in req_ids]
        if (
            plan is None
            or self.stale
            or not plan.steady
            or plan.req_ids != req_ids
            # With speculative decoding, a request beside these can have several tokens.
            or plan.counts != counts
            or any(computed[place] != plan.computed[place] + 1 for place in plan.places)
        ):
            # What fails while it is made makes it outdated.
            self.stale = False
            plan = self.plan = self._build(_Step(req_ids, counts, total, states, computed, drafts))
        else:
            plan.computed = computed
            plan.steps += 1
            plan.replayed = 0
            plan.buffered = plan.unread = False
        if plan.conditional:
            plan.under_way = True
            if plan.ranged:
                self.signals.tick.fill_(plan.steps)
        self.hooks = plan.hooks

    def fits_buffers(self, tokens: int = 0) -> bool:
        """Whether the kernels at the taps can serve this step, without a call at any location.

        If so, they are set up for it, and the forward pass must come by them next. `tokens`: how many the graph
        computes, padding included.
        """
        buffers, plan = self.buffers, self.plan
        if buffers is None or plan is None or not plan.hooks:
            return False
        if not plan.tabled:
            plan.tabled = True
            plan.table = buffers.table({name: hook.groups for name, hook in plan.hooks.items()}, self.total)
        if plan.table is None or not buffers.has_room(tokens):
            return False
        buffers.use(plan.table)
        _restrict(plan, plan.table, buffers, self.recorders[False])
        self.unproven = buffers.used(plan.table, self.proof.left(plan.table.uses))
        plan.buffered = plan.unread = True
        for hook in plan.hooks.values():
            hook.reached = True
        return True

    def leave_buffers(self) -> None:
        """Serve the step at its locations, whatever `fits_buffers` has said."""
        if self.plan is not None:
            self.plan.leave_buffers()

    def pass_buffers(self) -> None:
        """Have the kernels at the taps do nothing: this rank serves nothing in the step."""
        self.unproven = frozenset()
        if self.buffers is not None:
            self.buffers.use(self.buffers.nothing)

    def run_both(self, graphs: BothGraphs, total: int) -> Any:
        """Run a step of `total` tokens by both graphs, with their taps set up. Returns the output that counts."""
        plan = self.plan
        mine: list[Any] = []
        with put_back(graphs.inputs()), self.proof.guarded():
            # Only rows of tokens have defined values. Each graph may write its output to memory that the other uses.
            mine += [tensor[:total].clone() for tensor in tensors_in(graphs.whole())]
            mine += [] if plan is None else _taken(plan, self.buffers)
        self.leave_buffers()
        output = graphs.broken()
        with self.proof.guarded():
            theirs: list[Any] = [tensor[:total] for tensor in tensors_in(output)]
            theirs += [] if plan is None else [one.found[site] for one, site in plan.readers]
            self.proof.compare(self.unproven, mine, theirs)
        # All ranks go on with whole graphs, or none.
        self.proof.failed = self.on_any_rank(self.proof.failed)
        if self.proof.failed:
            self.buffers = None
        return output

    def on_any_rank(self, failed: bool) -> bool:
        """Whether something has failed on any tensor-parallel rank. All of them ask."""
        _, add = self.shards
        return failed if add is None else bool(add(torch.tensor([float(failed)], device=self._device)).item())

    def _build(self, step: _Step) -> _Plan:
        """Plan a step. Interventions that cannot be planned fail; other requests are unaffected."""
        try:
            return _planned(self, step, self.live)
        except Exception:
            logger.exception("a step's declared interventions could not be planned")
        planned = [one for name in step.req_ids if (one := self.live.get(name)) is not None and one.failure is None]
        for declaration in planned:
            try:
                _planned(self, step, {declaration.id: declaration})
            except Exception as error:
                self._unplanned(declaration, error)
        try:
            return _planned(self, step, self.live)
        except Exception as error:  # though each can be planned by itself
            for declaration in planned:
                self._unplanned(declaration, error)
        return _planned(self, step, self.live)

    def _unplanned(self, declaration: Declaration, error: Exception) -> None:
        message = f"the interventions cannot be planned: {error}"
        self._failed(declaration, Failure(type=type(error).__name__, message=message, field="interventions"))

    def attention(self, plan: _Plan, location: str) -> AttentionSite:
        """What the attention patterns of a plan need at a location."""
        module, pool = self.module_at(location), self.pools.at(location)
        rank, add = self.shards
        return AttentionSite(
            *(module, self.pools, pool, lambda: plan.steps, self.fail), rank, add, partial(self.agree, location)
        )

    def check_reached(self) -> None:
        """Fail the interventions whose location the forward pass of a plan's first step did not reach."""
        plan = self.plan
        if plan is not None and not plan.steps:
            for hook in plan.hooks.values():
                if not hook.reached:
                    for group in hook.groups:
                        self.fail(group.members, ValueError("the model's forward pass does not reach this location"))

    def read(self) -> list[tuple[int, int, list[tuple[str, int, int]], torch.Tensor]]:
        """Return the reads of this pipeline stage in the step, for the stage that reports, and forget them.

        By intervention (its place in its trace's list) and site: the members (request, choice and their rows of the
        result, in order), and the rows.
        """
        if self.plan is None:
            return []
        self.plan.read_buffers(self.buffers, lasting=self.here is None)
        found = []
        for collector in self.plan.collectors:
            members = collector.described()
            for site, values in enumerate(collector.found):
                if values is not None:
                    found.append((collector.order, site, members, values))
            collector.found = [None] * len(collector.found)
        return found

    def supply(self, read: list[tuple[int, int, list[tuple[str, int, int]], torch.Tensor]]) -> None:
        """Take the reads of another stage in this step, as returned by `read` there."""
        if self.plan is not None and read:
            _supply(self.plan.collectors, read)

    def failures(self) -> dict[str, Failure]:
        """Requests whose interventions have failed on this stage since the last call, by the scheduler's names."""
        found = {}
        for request_id, declaration in self.live.items():
            if declaration.failure is not None and not declaration.sent_to_stages:
                declaration.sent_to_stages = True
                found[request_id] = declaration.failure
        return found

    def fail_with(self, failures: dict[str, Failure]) -> None:
        """End the interventions of requests that have failed on another stage."""
        for request_id, failure in failures.items():
            declaration = self.live.get(request_id)
            if declaration is not None:
                self._failed(declaration, failure)

    def collect(
        self, lens: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> tuple[Layout | None, Batch, torch.Tensor] | None:
        """The reads of the step: a layout, unless it is the last one again, and the bytes (on the device) behind it.

        `None` if no request of this step reads.
        """
        self.check_reached()
        plan = self.plan
        if plan is None or not plan.reads:
            return None
        join = plan.joins[plan.buffered]
        settled = plan.layout is not None and not self.stale
        if settled and (plan.buffered or plan.replayed == len(plan.hooks)):
            if join.flat is not None:
                if join.kernels is not None:
                    join.kernels.replay()
                for collector in plan.collectors:
                    collector.reset()
                return None, _batch(plan, self.served.step), join.flat
            if not join.tried and (not plan.buffered or plan.steps >= RECORD_AFTER):
                join.tried = True
                self._record_join(plan, join, lens)
        plan.read_buffers(self.buffers, lasting=self.here is None)
        plan.drop_rejected()
        found: Results = []
        for collector in plan.collectors:
            results = None
            try:
                if not collector.takes_head or self.agree("the head", collector.members):
                    results = collector.results(lens, self.lens_rows)
            except Exception as error:
                self.fail(collector.members, error)
            if results is None:
                continue
            found.append((collector, results))
            collector.reset()
        arrangement = Arrangement(found)
        changed = None
        # A step may lack what another stage reads.
        read = [collector for collector, _ in found]
        if plan.layout is None or self.stale or plan.read != read:
            plan.read = read
            self._layouts += 1
            changed = plan.layout = made_layout(self._layouts, plan.declarations, arrangement)
        return changed, _batch(plan, self.served.step), arrangement.join()

    def _record_join(self, plan: _Plan, join: _Join, lens: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Record the joining of the reads, which are at the same addresses in every replayed step."""
        if not plan.collectors or plan.head_rows > self.head_rows:
            return
        if len(plan.collectors) == 1 and not plan.head_rows:
            only = (plan.collectors[0].results(lens) or {}).get("")
            if only is not None and only.is_contiguous() and only is plan.collectors[0].found[0]:
                join.flat = raw(only)
                return
        joined: list[torch.Tensor] = []

        def launch() -> None:
            plan.read_buffers(self.buffers, lasting=self.here is None)
            results = [(collector, collector.results(lens, self.lens_rows) or {}) for collector in plan.collectors]
            joined.append(Arrangement(results).join())

        buffered = plan.unread
        if not plan.prepare_reads(self.buffers):
            return
        join.kernels = self.recorders[plan.head_rows > 0].record(launch)
        # The step under way still needs its reads and its windows: recording launches nothing.
        plan.unread = buffered
        plan.again()
        if join.kernels is not None:
            join.flat = joined[0]


def _planned(owner: DeclaredRequests, step: _Step, live: Mapping[str, Declaration]) -> _Plan:
    """Plan a step for these of its requests with declared interventions."""
    plan, device, here = _Plan(), owner.signals.device, owner.here
    plan.req_ids, plan.computed, plan.counts = list(step.req_ids), step.computed, step.counts
    plan.places = [place for place, request_id in enumerate(step.req_ids) if request_id in live]
    gathering, served = Gathering(owner.fail, owner.served.step), owner.served
    order = zip(step.req_ids, step.computed, step.counts, strict=True)
    plan.declarations = served.serve(live, order, step.states, step.drafts, gathering)
    served.settle(owner.plan.declarations if owner.plan is not None else ())
    plan.steady = all(one.generates for one in plan.declarations)
    plan.reads = any(one.declaration.reads for one in plan.declarations)
    for members, rows in gathering.groups(step.total, device):
        op = members[0].op
        collector = None
        if isinstance(op.one, Reading) and not members[0].keys:
            collector = Collector(members, rows, op.one, len(op.sites), op.pattern, members[0].place)
            plan.collectors.append(collector)
        for place, (location, residual) in enumerate(op.sites):
            if here is not None and not here(location):
                # Reads of another stage are at another address in each step.
                for join in plan.joins.values():
                    join.tried |= collector is not None
                continue
            hook = plan.hooks.setdefault(location, LocationHook(location, owner))
            group = group_kind(members[0])(members, rows, residual, device)
            group.location = location
            plan.take(group)
            if collector is not None:
                group.collector, group.site = collector, place
            if isinstance(group, SiteGroup):
                group.begin(owner.attention(plan, location), device)
            elif isinstance(group, KeepGroup):
                group.fail = owner.fail
            elif isinstance(group, FeatureGroup):
                group.across(*owner.shards, partial(owner.agree, location))
            hook.groups.append(group)
    plan.take(gathering)
    declarations = [one.declaration for one in plan.declarations]
    plan.windows = made_windows(owner.signals, declarations, step.total, owner.ids)
    plan.conditional = connect(owner.signals, list(plan.groups), plan.windows, declarations)
    return plan


def _supply(collectors: list[Collector], read: list[tuple[int, int, list[tuple[str, int, int]], torch.Tensor]]) -> None:
    """Give the collectors the reads of another stage."""
    rows: dict[tuple[int, int, str, int], torch.Tensor] = {}
    for order, site, members, values in read:
        pieces = values.split([count for _, _, count in members])
        for (request, choice, _), piece in zip(members, pieces, strict=True):
            rows[order, site, request, choice] = piece
    for collector in collectors:
        for site in range(len(collector.found)):
            keys = [(collector.order, site, request, choice) for request, choice, _ in collector.described()]
            if all(key in rows for key in keys):
                pieces = [rows[key] for key in keys]
                collector.found[site] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _restrict(plan: _Plan, table: StepTable, buffers: TapBuffers, recorder: KernelRecorder) -> None:
    """Have the step's edits with conditions take place where the conditions hold."""
    if not table.restrictions:
        return
    if not plan.restricted and plan.steps >= RECORD_AFTER:
        plan.restricted = True
        plan.restriction = recorder.record(lambda: buffers.restrict(table))
        plan.again()
    if plan.restriction is not None:
        plan.restriction.replay()
    else:
        buffers.restrict(table)


def _taken(plan: _Plan, buffers: TapBuffers | None) -> list[torch.Tensor | None]:
    """Copies of what this stage has read in the step, which is dropped. What earlier stages have read is kept."""
    plan.read_buffers(buffers, lasting=True)
    found: list[torch.Tensor | None] = []
    for collector, site in plan.readers:
        values = collector.found[site]
        found.append(values if values is None else values.clone())
        collector.found[site] = None
    return found


def _batch(plan: _Plan, step: int) -> Batch:
    assert plan.layout is not None
    return Batch(layout=plan.layout.id, step=step)
