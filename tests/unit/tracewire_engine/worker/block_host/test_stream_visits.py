"""A stream waits for the hosts of blocks that write: a thread stands for the stream."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hosted_model import HostedModel
from tracewire_engine.link import shared_rows
from tracewire_engine.protocol.block_host import Began, Reply, Shape, Shared
from tracewire_engine.worker.block_host import stream_visits
from tracewire_engine.worker.block_host.host import BlockHost, LateTurn
from tracewire_engine.worker.block_host.host_replies import Patience
from tracewire_engine.worker.block_host.reading import Account
from tracewire_engine.worker.block_host.rows import NoRoom, StepRows
from tracewire_engine.worker.block_host.staged_step import StagedStep, StageLayout
from tracewire_engine.worker.block_host.stream_visits import StreamVisits, Visit

EACH = "kept = [].save()\nfor step in tracer.iter[:]:\n    "
IN_PLACE = EACH + "h = model.model.layers[1].output[0]\n    h[:] *= 2\n    kept.append(h.clone())\n"
ASSIGNS = EACH + "o = model.model.layers[1].output\n    model.model.layers[1].output = (o[0] * 3, o[1])\n"
#: Its source may be anything.
UNKNOWN = EACH + "exec('model.model.layers[1].output[0][:] *= 2')\n"
#: The value is more than tensors.
INPUTS = EACH + "model.model.layers[2].input[:] = 0.5\n    kept.append(model.model.layers[2].output[0].clone())\n"


class Model(HostedModel):
    """Notes the numbers of the visits."""

    def __init__(self) -> None:
        super().__init__(visits=True, step_s=5.0)
        self.held: list[int] = []
        hold = self.flags.hold

        def noting(number: int) -> None:
            self.held.append(number)
            hold(number)

        self.flags.hold = noting  # type: ignore[method-assign]

    def visits_in(self, *sources: str, steps: int = 4) -> tuple[int, list[Any]]:
        """How often the stream waits for these blocks, and what they come to."""
        self.held.clear()
        found = self.run({f"{len(self.outcomes)}.{place}": one for place, one in enumerate(sources)}, steps=steps)
        return len(self.held), list(found.values())


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    before = sys.getswitchinterval()
    found = Model()
    yield found
    assert not len(found.hosts)
    found.close()
    assert sys.getswitchinterval() == before


@pytest.fixture(scope="module")
def waiting() -> Iterator[HostedModel]:
    found = HostedModel()
    yield found
    found.close()


def saves(outcomes: list[Any]) -> list[list[Any]]:
    assert [one.finish.error for one in outcomes] == [None] * len(outcomes)
    return [[np.asarray(one).tolist() for one in outcome.saves["kept"]] for outcome in outcomes]


def test_a_stream_waits_once_for_all_hosts_of_a_location(model: Model, waiting: HostedModel) -> None:
    count, found = model.visits_in(IN_PLACE, IN_PLACE, ASSIGNS + "    kept.append(model.logits.clone())\n")
    # The logits are the third one's.
    assert count == 8
    names = ("one", "two", "three")
    plain = waiting.run(
        dict(zip(names, (IN_PLACE, IN_PLACE, ASSIGNS + "    kept.append(model.logits.clone())\n"), strict=True)), 4
    )
    assert saves(found) == saves([plain[name] for name in names])


def test_what_blocks_assign_leaves_the_model_s_own_tensors_as_they_are(model: Model) -> None:
    seen = []
    visit = model.visits.visit  # type: ignore[union-attr]

    def noting(one: Visit, value: Any) -> Any:
        before = [tensor.clone() for tensor in value]
        left = visit(one, value)
        seen.append((before, value, left))
        return left

    model.visits.visit = noting  # type: ignore[union-attr, method-assign]
    model.visits_in(ASSIGNS, steps=1)
    model.visits_in(IN_PLACE, steps=1)
    model.visits.visit = visit  # type: ignore[union-attr, method-assign]
    (before, value, left), (changed, mine, same) = seen
    assert torch.equal(before[0], value[0])
    assert torch.equal(left[0], before[0] * 3)
    assert mine[0] is same[0]
    assert torch.equal(mine[0], changed[0] * 2)


def test_a_trace_of_which_nothing_is_certain_makes_the_thread_wait_for_its_host(model: Model) -> None:
    count, found = model.visits_in(UNKNOWN, IN_PLACE)
    assert [one.finish.error for one in found] == [None, None]
    # The second trace's host is another one.
    assert count == 4


def test_a_host_that_must_be_waited_for_later_on_is(model: Model) -> None:
    """A later request of its trace skips a module."""
    skips = (
        "i = model.model.layers[1].input\nmodel.model.layers[1].skip((i * 0.5, i))\nx = model.logits.clone().save()\n"
    )
    model.held.clear()
    model.open("stays", IN_PLACE, trace="both", choices=2)
    model.step({"stays": 2}, 0)
    model.step({"stays": 1}, 1)
    assert len(model.held) == 2
    model.open("skips", skips, trace="both", choices=2)
    model.step({"stays": 1, "skips": 2}, 2)
    for name, steps in (("skips", 1), ("stays", 3)):
        model.finish(name, steps)
    model.wait("skips", "stays")
    assert len(model.held) == 2
    assert model.outcomes["skips"].finish is not None
    assert model.outcomes["skips"].finish.error is None
    assert len(saves([model.outcomes["stays"]])[0]) == 3


def test_a_value_that_is_more_than_tensors_is_waited_for_by_the_thread(model: Model) -> None:
    count, found = model.visits_in(INPUTS)
    # That is found at the first of them.
    assert count <= 1
    assert len(saves(found)[0]) == 4
    assert model.visits_in(INPUTS)[0] == 0


def test_a_block_that_asks_for_what_its_source_does_not_name_is_ended(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = model.hosts._accounts.of
    wrong = frozenset({"model.model.layers.0.output"})
    monkeypatch.setattr(model.hosts._accounts, "of", lambda arguments, room, live: replace(of(arguments), edits=wrong))
    _, (found,) = model.visits_in(IN_PLACE)
    assert found.finish.error.type == "BlockHostLost"
    assert "asks for 'model.model.layers.1.output', of which its source says nothing" in found.finish.error.message


def test_a_block_that_assigns_although_its_source_does_not_is_ended(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = model.hosts._accounts
    of = accounts.of
    monkeypatch.setattr(accounts, "of", lambda arguments, room, live: replace(of(arguments), assigns=False))
    _, (found,) = model.visits_in(ASSIGNS)
    assert "a value is replaced, of which the block's source says nothing" in found.finish.error.message


def test_a_host_that_ends_while_the_stream_waits_costs_its_traces_alone(model: Model) -> None:
    model.open("lost", IN_PLACE, tenant="another")
    model.open("stays", IN_PLACE)
    model.step({"lost": 2, "stays": 2}, 0)
    process = model.hosts.traces["lost"].host.process
    process.kill()
    for index in (1, 2):
        model.step({"lost": 1, "stays": 1}, index)
    for name in ("lost", "stays"):
        model.finish(name, 3)
    model.wait("lost", "stays")
    assert model.outcomes["lost"].finish is not None
    assert model.outcomes["lost"].finish.error is not None
    assert len(saves([model.outcomes["stays"]])[0]) == 3


def test_a_stream_that_waits_in_vain_goes_on_and_none_waits_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vain = Model()
    vain.flags._limit_s = 0.2
    arrived = vain.flags.has_arrived
    monkeypatch.setattr(vain.flags, "has_arrived", lambda number: arrived(number) and vain.flags.expired(number))
    _, (found,) = vain.visits_in(IN_PLACE)
    assert found.finish.error.type == "BlockHostLost"
    assert "the model has gone on without it" in found.finish.error.message
    count, again = vain.visits_in(IN_PLACE)
    assert count == 0
    assert len(saves(again)[0]) == 4
    vain.close()


def test_what_a_stream_that_waits_in_vain_goes_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of others, between those of hosts, are as they were, whatever was in the memory before."""
    vain = Model()
    vain.open("first", ASSIGNS, tenant="one")
    vain.open("second", IN_PLACE, tenant="two")
    vain.flags._limit_s = 0.2
    arrived = vain.flags.has_arrived
    monkeypatch.setattr(vain.flags, "has_arrived", lambda number: arrived(number) and vain.flags.expired(number))
    begin, put_back, seen = Visit.begin, Visit.put_back, []

    def filled(visit: Visit, value: Any) -> None:
        for buffer in visit._assigned.values():
            buffer.array[:] = 0x11
        begin(visit, value)

    def noting(visit: Visit, value: Any) -> Any:
        before = [tensor.clone() for tensor in value]
        seen.append((before, put_back(visit, value)))
        return seen[-1][1]

    monkeypatch.setattr(Visit, "begin", filled)
    monkeypatch.setattr(Visit, "put_back", noting)
    reach = vain._begin({"first-00000000": 2, "bystander": 2, "second-00000000": 2}, 0)
    with torch.inference_mode():
        vain._layers(torch.linspace(-1, 1, 24).view(6, 4), reach)
    vain._end()
    for name in ("first", "second"):
        vain.finish(name, 1)
    vain.wait("first", "second")
    ((before, left),) = seen
    assert torch.equal(before[0], left[0])
    assert all(vain.outcomes[name].finish.error is not None for name in ("first", "second"))  # type: ignore[union-attr]
    vain.close()


def test_hosts_of_another_visit_of_the_step_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    vain = Model()
    vain.open("first", IN_PLACE.replace("layers[1]", "layers[0]"), tenant="one")
    vain.open("second", IN_PLACE, tenant="two")
    vain.flags._limit_s = 1.0
    arrived, expired = vain.flags.has_arrived, vain.flags.expired
    monkeypatch.setattr(vain.flags, "has_arrived", lambda number: arrived(number) and (number == 1 or expired(number)))
    for index in (0, 1):
        vain.step({"first": 2 - index, "second": 2 - index}, index)
    for name in ("first", "second"):
        vain.finish(name, 2)
    vain.wait("first", "second")
    errors = [vain.outcomes[name].finish.error for name in ("first", "second")]  # type: ignore[union-attr]
    assert [error is None for error in errors] == [True, False]
    vain.close()


# In one host, the calm one has 50 ms when the other has used the step's time: too few on a machine that is very busy.
@pytest.mark.parametrize("tenant", ["another", pytest.param("", marks=pytest.mark.full)])
def test_a_block_that_is_slow_before_it_asks_for_anything_ends_alone(model: Model, tenant: str) -> None:
    slow = "n = 0\nfor i in range(10**12):\n    n = i + 1\n" + IN_PLACE
    model.open("calm", IN_PLACE)
    model.open("slow", slow, tenant=tenant)
    for index in (0, 1):
        model.step({"calm": 2 - index, "slow": 2 - index}, index)
    for name in ("calm", "slow"):
        model.finish(name, 2)
    model.wait("calm", "slow")
    late = model.outcomes["slow"].finish
    assert len(saves([model.outcomes["calm"]])[0]) == 2
    assert late is not None
    assert late.error is not None
    assert late.error.type == "BlockTimeout"
    assert late.error.line in (2, 3)


def test_only_what_blocks_do_as_a_step_begins_has_the_time_of_a_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves are read when it ends. The model does not wait for that."""
    send, sent = LateTurn.send, []

    def noting(turn: LateTurn) -> None:
        sent.append((turn._turn.limited, {type(event) for event in turn._turn.events}))
        send(turn)

    monkeypatch.setattr(LateTurn, "send", noting)
    model.visits_in(IN_PLACE, steps=3)
    assert sent
    assert all(limited == (Began in events) for limited, events in sent)
    assert any(limited for limited, _ in sent)


def test_a_stream_waits_for_no_block_that_has_ended(model: Model) -> None:
    once = "h = model.model.layers[1].output[0]\nh[:] *= 2\nkept = [h.clone()].save()\n"
    count, found = model.visits_in(once, once, steps=6)
    assert count == 1
    assert [len(one) for one in saves(found)] == [1, 1]
    # A new request of the host is served again, and so is one that was not in the step of the reply.
    model.held.clear()
    model.open("first", once)
    model.step({"first": 2}, 0)
    model.step({"first": 1}, 1)
    assert len(model.held) == 1
    model.open("second", IN_PLACE)
    model.step({"second": 2}, 0)
    model.step({"first": 1, "second": 1}, 1)
    assert len(model.held) == 3
    for name, steps in (("first", 3), ("second", 2)):
        model.finish(name, steps)
    model.wait("first", "second")
    assert len(saves([model.outcomes["second"]])[0]) == 2


def test_a_host_without_room_has_what_came_before_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the model's thread is ahead: a host's memory may be full of rows to which the stream has not come."""
    assert model.visits is not None
    settle, read, done = model.visits.settle, BlockHost.read, []

    def full(host: BlockHost, share: Any, readings: Any, passed: Any) -> None:
        if readings[0].location.endswith(".1.output") and "settled" not in done[-1:]:
            done.append("full")
            raise NoRoom
        read(host, share, readings, passed)

    monkeypatch.setattr(BlockHost, "read", full)
    monkeypatch.setattr(model.visits, "settle", lambda: done.append("settled") or settle())
    layers = "".join(f"    model.model.layers[{layer}].output[0][:] *= 2\n" for layer in range(3))
    _, (found,) = model.visits_in("for step in tracer.iter[:]:\n" + layers, steps=1)
    assert found.finish.error is None
    assert done == ["full", "settled"]


def test_hosts_and_the_memory_of_visits_are_given_back(model: Model) -> None:
    hosts = []
    for number in range(3):
        name = f"own.{number}"
        model.open(name, IN_PLACE, tenant=None)  # type: ignore[arg-type]
        hosts.append(weakref.ref(model.hosts.traces[name].host))
        for index in (0, 1):
            model.step({name: 2 - index}, index)
        model.finish(name, 2)
        model.wait(name)
    model.visits_in(IN_PLACE, ASSIGNS, steps=6)
    model.hosts.begin({}, [], lambda name: 0)
    assert model.visits is not None
    assert not model.visits._held
    gc.collect()
    assert [one() for one in hosts] == [None] * 3


class Clock:
    """Takes the place of `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.00005


def test_a_slow_step_makes_no_later_one_slow(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sees soon that the stream has arrived, without looking all the time."""
    clock = Clock()
    monkeypatch.setattr(stream_visits, "time", clock)
    visits, looks, arrival = StreamVisits.__new__(StreamVisits), 0, 0.0
    visits._usual_s = visits._released_at = 0.0

    class Flags:
        def has_arrived(self, number: int) -> bool:
            nonlocal looks
            looks += 1
            return clock.now >= arrival

    flags: Any = Flags()
    visits._flags = flags
    (visit, _, _) = visit_of((torch.zeros(4, 3),))
    late = []
    for step in [0.005] * 20 + [0.4] + [0.005] * 40 + [0.001] * 40:
        visit.since, arrival, looks = clock.now, clock.now + step, 0
        # Two locations whose kernels are launched at once.
        for _ in range(2):
            visits._await_stream(visit)
            late.append((clock.now - arrival, looks))
            visits._released_at = clock.now
            arrival, looks = clock.now + step, 0
    after, last = late[50:120], late[-40:]
    assert max(one for one, _ in late[20:40]) < 0.001
    assert max(one for one, _ in after) < 0.001
    assert max(one for one, _ in last) < 0.001
    assert sum(count for _, count in after) / len(after) < 40


class Process:
    def __init__(self, returned: Any) -> None:
        self.returned = returned


class Host:
    failure = None
    arrivals = 0
    present = frozenset({"x"})
    account = Account(edits=frozenset({"a"}), assigns=True)

    def __init__(self, returned: Any) -> None:
        self.process = Process(returned)


def visit_of(value: Any, parts: frozenset[int] | None = None) -> tuple[Visit, Any, Any]:
    """A visit of the second and third row of four, its host, and the host's memory."""
    memory = shared_rows.RowMemory.create(1 << 16)
    host: Any = Host(memory)
    step = StagedStep(StageLayout({host: StepRows([(1, 2)], [1], 4, 4)}), pinned=False)
    step.reach("a", value, [host], 0, by_request=False, parts=parts)
    visit = Visit(step, [host], Patience(1.0))
    visit.begin(value)
    return visit, host, memory


def shared(memory: Any, rows: torch.Tensor) -> Shape:
    start = memory.room(rows.nbytes)
    memory.write(rows, start)
    return Shape(str(rows.dtype).removeprefix("torch."), tuple(rows.shape), start)


def test_rows_go_where_they_belong() -> None:
    value = (torch.zeros(4, 3), torch.ones(4, 2), torch.full((7,), 5.0))
    visit, host, memory = visit_of(value)
    edited = [(0, shared(memory, torch.full((2, 3), 2.0))), (2, shared(memory, torch.zeros(7)))]
    given = [shared(memory, torch.full(shape, 9.0)) for shape in ((2, 3), (2, 2), (7,))]
    failed: list[Any] = []
    replaced = Shared(visit._reading.skeleton, given)
    visit.put({host: Reply(edited=edited, replaced=replaced)}, lambda *found: failed.append(found))
    left = visit.put_back(value)
    assert not failed
    assert [one[:, 0].tolist() for one in value[:2]] == [[0, 2, 2, 0], [1, 1, 1, 1]]
    assert [one[:, 0].tolist() for one in left[:2]] == [[0, 9, 9, 0], [1, 9, 9, 1]]
    # It is no request's.
    assert left[2] is value[2]
    assert left[2].tolist() == [5.0] * 7


def test_items_that_no_block_uses_stay_as_they_are() -> None:
    value = (torch.zeros(4, 3), torch.ones(4, 2), torch.zeros(4, 1))
    visit, host, memory = visit_of(value, frozenset({1}))
    failed: list[Any] = []
    edited = [(0, shared(memory, torch.full((2, 2), 7.0)))]
    visit.put({host: Reply(edited=edited)}, lambda *found: failed.append(found))
    left = visit.put_back(value)
    assert not failed
    assert [one[:, 0].tolist() for one in left] == [[0] * 4, [1, 7, 7, 1], [0] * 4]
    assert left[0] is value[0]


@pytest.mark.parametrize(
    ("index", "shape", "why"),
    [
        (3, (2, 3), "has no tensor 3"),
        (-1, (2, 3), "has no tensor -1"),
        (0, (2, 4), "rows [2, 3] of float32 are replaced by others"),
        (0, (1, 3), "rows [2, 3] of float32 are replaced by others"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_changed(index: int, shape: Any, why: str) -> None:
    value = (torch.zeros(4, 3), torch.ones(4, 2))
    visit, host, memory = visit_of(value)
    good, bad = shared(memory, torch.full((2, 2), 2.0)), shared(memory, torch.full(shape, 2.0))
    failed: list[Exception] = []
    visit.put({host: Reply(edited=[(1, good), (index, bad)])}, lambda _, error: failed.append(error))
    assert why in str(failed[0])
    assert torch.equal(visit.put_back(value)[1], torch.ones(4, 2))


def test_rows_of_nowhere_and_rows_twice_are_refused() -> None:
    value = (torch.zeros(4, 3),)
    visit, host, memory = visit_of(value)
    failed: list[str] = []
    one = shared(memory, torch.full((2, 3), 2.0))
    other = shared(memory, torch.full((2, 3), 3.0))
    far = Shape("float32", (2, 3), 1 << 16)
    skeleton = [0, 0]
    for reply in (
        Reply(edited=[(0, one), (0, other)]),
        Reply(edited=[(0, far)]),
        Reply(edited=[(0, one), (0, one)]),
        Reply(replaced=Shared(skeleton, [one])),
        Reply(replaced=Shared(visit._reading.skeleton, [])),
    ):
        visit.put({host: reply}, lambda _, error: failed.append(str(error)))
    assert "twice" in failed[0]
    assert "outside" in failed[1]
    assert "share their memory" in failed[2]
    assert "another form" in failed[3]
    assert len(failed) == 5
    assert visit.put_back(value)[0].tolist() == torch.zeros(4, 3).tolist()
