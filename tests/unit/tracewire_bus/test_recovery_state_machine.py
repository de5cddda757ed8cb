"""Claims, fences and ends in any order, on a real Redis, beside a model of what must come of each.

Engines here are names: what an adapter would do is a rule each, in any order that several adapters could bring it about
in, stale ones included. Replies get lost, before or after Redis has done what it was asked to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from tracewire_bus.bus import Bus, Fenced, Writer
from tracewire_bus.store.queue_entries import Taken
from tracewire_bus.store.trace_records import Overtaken, TraceEnded
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.transport.link import Link
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.ids import FINAL_ID, parse_id
from tracewire_bus.wire.messages import Failure, Final, Invoke, Restarted, Submission

MODEL = "demo"


ENGINES = ("a", "b", "c")


_numbers = itertools.count()


@dataclass
class Trace:
    """What the model knows of one trace. `holder` is None while it waits, and `given up` when nobody is to have it."""

    id: str
    tries: int
    there: bool = True
    holder: str | None = None
    taken: int = 0
    lost: int = 0
    #: Of its record: the attempt that was begun last, and by whom.
    attempt: int = 0
    engine: str = ""
    ended: bool = False
    last: tuple[int, int] = (0, -1)

    @property
    def suspect(self) -> bool:
        return self.lost > 0 and self.lost + 1 >= self.tries


@dataclass
class Run:
    """A trace in the hands of an engine, which may be the only one to think so."""

    trace: Trace
    engine: str
    attempt: int
    opened: bool = False
    seq: int = 0
    over: bool = False


@dataclass
class Losses:
    """Which of the next calls lose their reply: `before` or `after` Redis has done it."""

    next: list[str] = field(default_factory=list)


_portal: BlockingPortal


_url: str


_losses = Losses()


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    """One Redis, on a loop of its own, and connections that lose what they are told to."""
    global _portal, _url
    ask = Link.execute

    async def losing(self: Link, *commands: Any, **more: Any) -> list[Any]:
        how = _losses.next.pop() if _losses.next else ""
        if how == "before":
            await self.drop()
            raise RedisConnectionError("lost before it was sent")
        replies = await ask(self, *commands, **more)
        if how == "after":
            await self.drop()
            raise RedisConnectionError("lost behind it")
        return replies

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(EmbeddedServer.start()) as server:
        _portal, _url = portal, server.url
        Link.execute = losing  # type: ignore[method-assign]
        try:
            yield
        finally:
            Link.execute = ask  # type: ignore[method-assign]


class Claims(RuleBasedStateMachine):
    """The queue, the records and the streams, as engines and others use them."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        _losses.next.clear()
        self.bus: Bus = self.stack.enter_context(
            _portal.wrap_async_context_manager(Bus.open(_url, prefix=f"m{next(_numbers)}"))
        )
        self.writer: Writer = self.stack.enter_context(_portal.wrap_async_context_manager(self.bus.writer()))
        self.traces: dict[str, Trace] = {}

    def teardown(self) -> None:
        """Whatever has come to pass, all can be brought to an end."""
        _losses.next.clear()
        try:
            self._end_all()
        finally:
            self.stack.close()

    def _end_all(self) -> None:
        for engine in ENGINES:
            self._put_back(engine, lost=False)
        self.bury()
        # A suspect at a time.
        while any(trace.there for trace in self.traces.values()):
            found = self._take("z", 100)
            assert found
            for run in found:
                self.begin(run)
                self.append(run)
                self.end(run)
        self.what_is_there()
        for trace in self.traces.values():
            entries = self._do(self.bus.command, "XRANGE", self.bus.keys.events(trace.id), "-", "+")
            assert trace.ended
            ids = [parse_id(id_.decode()) for id_, _ in entries if id_.decode() != FINAL_ID]
            for attempt in {attempt for attempt, _ in ids}:
                seqs = [seq for of, seq in ids if of == attempt]
                assert seqs == [*range(len(seqs))], f"{trace} has a hole: {ids}"
            assert [id_.decode() == FINAL_ID for id_, _ in entries].count(True) == 1

    def _do(self, ask: Any, *arguments: Any, **more: Any) -> Any:
        async def call() -> Any:
            return await ask(*arguments, **more)

        return _portal.call(call)

    # --- what is asked ------------------------------------------------------------------------------------------------

    @rule(how=st.lists(st.sampled_from(["before", "after", ""]), min_size=1, max_size=3))
    def lose(self, how: list[str]) -> None:
        """Some of the next calls break."""
        _losses.next = how

    @rule(tries=st.integers(1, 3), client=st.sampled_from("xy"))
    def put(self, tries: int, client: str) -> None:
        """A trace is submitted."""
        trace = Trace(f"t{len(self.traces)}", tries)
        self.traces[trace.id] = trace
        self._submit(trace, client)

    @precondition(lambda self: self.traces)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        """And once more."""
        self._submit(data.draw(st.sampled_from([*self.traces.values()])), "x")

    def _submit(self, trace: Trace, client: str) -> None:
        submission = Submission(
            trace=trace.id, model=MODEL, invokes=[Invoke(prompt="")], client=client, max_attempts=trace.tries
        )
        self._do(self.bus.submit, submission)

    @rule(target=runs, engine=st.sampled_from(ENGINES), count=st.integers(1, 4))
    def take(self, engine: str, count: int) -> Any:
        """An engine takes what it can."""
        return multiple(*self._take(engine, count))

    def _take(self, engine: str, count: int) -> list[Run]:
        held_before = {trace.id for trace in self.traces.values() if trace.holder == engine}
        room = sum(trace.there and trace.holder is None and not trace.suspect for trace in self.traces.values())
        broken = bool(_losses.next)
        found: list[Taken] = self._do(self.bus.queue.take, MODEL, engine, count, 0)
        assert len(found) <= count
        runs = []
        for one in found:
            trace = self.traces[one.trace]
            assert trace.there
            if trace.id not in held_before:
                assert trace.holder is None, f"{trace} was taken from {trace.holder}"
                trace.holder = engine
                trace.taken += 1
            assert (one.attempt, one.lost, one.tries) == (trace.taken, trace.lost, trace.tries)
            runs.append(Run(trace, engine, one.attempt))
        if not found:
            # Only where its call broke on the way is something left.
            assert broken or not room
        self._adopt(engine)
        return runs

    def _taken_by(self, engine: str) -> set[str]:
        return {trace for trace, holder in self._holders().items() if holder == engine}

    def _adopt(self, engine: str) -> None:
        """What a broken take has taken and not handed out: it comes again."""
        for name in self._taken_by(engine):
            trace = self.traces[name]
            if trace.holder is None:
                trace.holder = engine
                trace.taken += 1

    @rule(run=runs)
    def begin(self, run: Run) -> None:
        """An engine begins an attempt, if it may."""
        if run.over or run.opened:
            return
        trace = run.trace
        try:
            opened = self._do(self.bus.records.open, trace.id, run.engine, run.attempt)
        except TraceEnded:
            assert trace.ended
            run.over = True
            self._do(self.bus.queue.done, MODEL, trace.id, run.engine)
            self._settled(trace, run.engine)
        except Overtaken:
            assert run.attempt < trace.attempt or (run.attempt == trace.attempt and run.engine != trace.engine)
            run.over = True
            self.bus.queue.note_settled(MODEL, trace.id)
        else:
            assert not trace.ended
            assert opened.attempt == run.attempt >= trace.attempt
            run.opened = True
            trace.attempt, trace.engine = run.attempt, run.engine

    def _settled(self, trace: Trace, holder: str) -> None:
        if trace.holder == holder:
            trace.there, trace.holder = False, None

    @rule(run=runs, tells=st.booleans())
    def append(self, run: Run, tells: bool = False) -> None:
        """An engine writes its attempt's next event, if it may. One that tells of changes asks the record, too."""
        if run.over or not run.opened:
            return
        trace, place = run.trace, (run.attempt, run.seq)
        asks = tells or run.seq == 0
        may = not trace.ended and place > trace.last and not (asks and trace.attempt > run.attempt)
        data = encode(Restarted(attempt=run.attempt, seq=run.seq, reason=run.engine))
        try:
            self._do(self.writer.append, trace.id, run.attempt, run.seq, data, live_version=0 if tells else None)
        except Fenced:
            assert not may
            run.over = True
            if asks:
                self._nothing_behind(run)
            self._fenced(run)
        else:
            assert may, f"{run} wrote behind {trace}"
            trace.last = place
            run.seq += 1

    @rule(run=runs)
    def end(self, run: Run) -> None:
        """An engine writes its trace's final, if it still may."""
        if run.over or not run.opened:
            return
        trace = run.trace
        may = not trace.ended and trace.attempt <= run.attempt
        data = encode(Final(attempt=run.attempt, seq=run.seq, status="finished"))
        run.over = True
        # As an adapter does it.
        done = (MODEL, trace.id, run.engine, run.attempt)
        try:
            self._do(self.writer.append, trace.id, run.attempt, run.seq, data, True, settles=done)
        except Fenced:
            assert not may
            self._nothing_behind(run)
            if trace.ended and trace.taken == run.attempt:
                self._settled(trace, run.engine)
            self._fenced(run)
        else:
            assert may, f"{run} ended {trace}"
            trace.ended = True
            if trace.taken == run.attempt:
                self._settled(trace, run.engine)

    def _nothing_behind(self, run: Run) -> None:
        """Where the record refused an event, the stream takes no other of its attempt either."""
        trace, last = run.trace, (run.attempt, 2**64 - 1)
        if trace.attempt > run.attempt and (0, 0) < trace.last < last and not trace.ended:
            trace.last = last

    def _fenced(self, run: Run) -> None:
        """What an adapter does with an entry when the stream has refused its attempt."""
        trace = run.trace
        if trace.ended:
            self._do(self.bus.queue.done, MODEL, trace.id, run.engine)
            self._settled(trace, run.engine)
        else:
            self._put_back(run.engine, lost=True, only=trace, attempt=run.attempt)
            self.bus.queue.note_settled(MODEL, trace.id)

    @rule(engine=st.sampled_from(ENGINES), lost=st.booleans())
    def put_back(self, engine: str, lost: bool) -> None:
        """What an engine had waits again: it left, or somebody takes it for lost, rightly or not."""
        self._put_back(engine, lost=lost)

    def _put_back(self, engine: str, *, lost: bool, only: Trace | None = None, attempt: int = 0) -> None:
        was, _losses.next = _losses.next, []
        self._adopt(engine)
        _losses.next = was
        self._do(
            self.bus.queue.put_back, MODEL, engine, "why", lost=lost, trace=only.id if only else "", attempt=attempt
        )
        for trace in self.traces.values():
            if trace.holder == engine and (only is None or (trace is only and trace.taken == attempt)):
                trace.lost += lost
                trace.holder = "given up" if lost and trace.lost >= trace.tries else None

    @rule()
    def bury(self) -> None:
        """What was given up is ended."""
        self._do(self.bus.recovery(MODEL).finish_given_up)
        for trace in self.traces.values():
            if trace.holder == "given up":
                trace.there, trace.holder, trace.ended = False, None, True

    @precondition(lambda self: self.traces)
    @rule(data=st.data())
    def end_from_outside(self, data: st.DataObject) -> None:
        """A third party ends a trace, whoever runs it."""
        trace = data.draw(st.sampled_from([*self.traces.values()]))
        failure = Failure(type="Other", message="")
        assert self._do(self.bus.records.end, trace.id, "failed", failure) in (not trace.ended, False)
        trace.ended = True

    @precondition(lambda self: self.traces)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Somebody cancels a trace. No engine of these is in the registry: none is waited for."""
        trace = data.draw(st.sampled_from([*self.traces.values()]))
        try:
            self._do(self.bus.cancel, trace.id, by="somebody")
        except TraceEnded:
            # Or just now: its answer was lost.
            pass
        trace.ended = True
        if trace.there and trace.holder is None and trace.id not in self._entries():
            trace.there = False

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _entries(self) -> set[str]:
        return {name.decode() for name in self._do(self.bus.command, "HKEYS", self.bus.keys.queue(MODEL, "entries"))}

    def _holders(self) -> dict[str, str]:
        flat = self._do(self.bus.command, "HGETALL", self.bus.keys.queue(MODEL, "taken"))
        return {trace.decode(): holder.decode() for trace, holder in zip(flat[::2], flat[1::2], strict=True)}

    @invariant()
    def what_is_there(self) -> None:
        """An entry is there until its trace has ended, and is nobody's or one engine's."""
        was, _losses.next = _losses.next, []
        for engine in ENGINES:
            self._adopt(engine)
        entries, holders = self._entries(), self._holders()
        for trace in self.traces.values():
            assert trace.there == (trace.id in entries), trace
            assert trace.there or trace.ended, f"{trace} is forgotten"
            holder = holders.get(trace.id)
            assert holder == "\1given up" if trace.holder == "given up" else holder == trace.holder, (trace, holder)
        assert self._do(self.bus.queue.waiting, MODEL) == sum(
            trace.there and trace.holder is None for trace in self.traces.values()
        )
        _losses.next = was


@pytest.mark.timeout(300)
def test_any_order_of_claims_fences_and_ends() -> None:
    run_state_machine_as_test(
        Claims,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )
