"""What a block may take of a step: time, reads, and turns that ask for nothing. No engine: the runner's steps.

Tracewire's runner steps over the made-up model of `benchmarks/blocks.py`, as it does in `test_failures.py`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

import tracewire
from benchmarks.blocks import _Runner, _scheduled
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, Set
from tracewire_engine.link.step_link import encode_reports
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.worker.blocks import mediator as blocks_module
from tracewire_engine.worker.blocks import time_limit as watchdog

#: The signals are the watchdog's.
pytestmark = pytest.mark.timeout(120, method="thread")


END = 10**12


_deltas = msgspec.msgpack.Decoder(list[Append | Set])


class _Link:
    def __init__(self) -> None:
        self.steps: dict[str, list[StepRecord]] = {}
        self.finishes: dict[str, FinishRecord] = {}

    def send(self, *reports: Report) -> None:
        encode_reports(reports, bytearray())
        for report in reports:
            for step in report.steps:
                self.steps.setdefault(step.request, []).append(step)
            for finish in report.finishes:
                self.finishes[finish.request] = finish


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    runner: Any = _Runner(16)
    with mock.patch("tracewire_engine.worker.runner_parts.cached_tokenizer_from_config", return_value=None):
        runner.load_model()
    yield runner
    watchdog.limit_turns(0)


@pytest.fixture
def runner(made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The runner, whose blocks have 0.3 s for each step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)}
    before = watchdog._limit_s
    monkeypatch.setattr(watchdog, "_terminate", None)
    watchdog.limit_turns(0.3)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    watchdog._limit_s = before
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Rounds:
    """Blocks from their first step to their end, one a request."""

    def __init__(self, runner: Any, **blocks: Any) -> None:
        self.runner, self.link = runner, _Link()
        runner.tracewire_reporter.link = self.link
        self.names = {name: f"{name}-{index:08x}" for index, name in enumerate(blocks)}
        self.fresh = []
        for name, block in blocks.items():
            arguments = {BLOCK_ARG: msgspec.msgpack.encode(block.block())}
            self.fresh.append(mock.Mock(req_id=self.names[name], sampling_params=mock.Mock(extra_args=arguments)))

    def step(self) -> None:
        counts = dict.fromkeys(self.names.values(), 16 if self.fresh else 1)
        with torch.inference_mode():
            fresh, self.fresh = self.fresh, []
            self.runner.execute_model(_scheduled(counts, fresh, set()))
            self.runner.sample_tokens()

    def end(self) -> None:
        with torch.inference_mode():
            self.runner.execute_model(_scheduled({}, [], set(self.names.values())))
            self.runner.tracewire_reporter.send(wait=True)

    def run(self, steps: int) -> dict[str, FinishRecord]:
        for _ in range(steps):
            self.step()
        self.end()
        return self.link.finishes

    def saved(self, name: str) -> list[list[Any]]:
        """The deltas of each step, and of the end."""
        records = [*self.link.steps.get(name, []), self.link.finishes[name]]
        return [_deltas.decode(record.deltas) for record in records]


@tracewire.intervention
def innocent(model, tracer, live):
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(float(model.model.layers[2].output[0][-1].sum()))


def innocent_saved(rounds: Rounds, steps: int) -> None:
    assert rounds.link.finishes["innocent"].error is None
    assert rounds.link.finishes["innocent"].manifest[0].length == steps


def test_a_loop_that_asks_for_something_at_its_first_step_only_waits_for_the_others(runner: Any) -> None:
    @tracewire.intervention
    def first_only(model, tracer, live):
        turns = [].save()
        for step in tracer.iter[:]:
            turns.append(step)
            if step == 0:
                first = float(model.model.layers[2].output[0][-1].sum()).save()

    rounds = Rounds(runner, first=first_only, innocent=innocent)
    finishes = rounds.run(6)
    assert finishes["first"].error is None
    assert {entry.name: entry.length for entry in finishes["first"].manifest} == {"turns": 6, "first": 1}
    innocent_saved(rounds, 6)


def test_a_loop_that_asks_for_nothing_has_a_turn_a_step(runner: Any) -> None:
    @tracewire.intervention
    def nothing(model, tracer, live):
        turns = [].save()
        for step in tracer.all():
            turns.append(step)

    @tracewire.intervention
    def late(model, tracer, live):
        for step in tracer.iter[:]:
            if step == 4:
                value = float(model.model.layers[2].output[0][-1].sum()).save()
                at = [step].save()
                break

    rounds = Rounds(runner, nothing=nothing, late=late, innocent=innocent)
    finishes = rounds.run(6)
    assert finishes["nothing"].error is None
    assert finishes["nothing"].manifest[0].length == 6
    assert finishes["late"].error is None
    # It has its value in the step that it asked it of.
    assert [len(deltas) for deltas in rounds.saved("late")] == [0, 0, 0, 0, 2, 0, 0]
    innocent_saved(rounds, 6)


def test_a_loop_with_an_end_does_not_spin_for_long(runner: Any) -> None:
    @tracewire.intervention
    def bounded(model, tracer, live):
        for step in tracer.iter[:END]:
            pass

    rounds = Rounds(runner, bounded=bounded, innocent=innocent)
    error = rounds.run(3)["bounded"].error
    assert error is not None
    assert error.type == "SameStep"
    assert "tracer.iter[0:1]" in error.message
    assert error.source == "for step in tracer.iter[:END]:"
    innocent_saved(rounds, 3)


def test_one_location_is_not_asked_for_without_end(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_REQUESTS", 500)

    @tracewire.intervention
    def same(model, tracer, live):
        while True:
            model.model.layers[2].output

    @tracewire.intervention
    def same_later(model, tracer, live):
        for step in tracer.iter[:]:
            while step == 2:
                model.model.layers[2].output

    rounds = Rounds(runner, same=same, later=same_later, innocent=innocent)
    finishes = rounds.run(4)
    for name in ("same", "later"):
        error = finishes[name].error
        assert error is not None
        assert (error.type, error.source) == ("SameStep", "model.model.layers[2].output")
        assert "asked for 'model.layers.2.output'" in error.message
    assert rounds.link.steps["later"][-1].index == 2
    innocent_saved(rounds, 4)


def test_a_loop_over_numbers_that_stays_in_its_step_is_told_of(runner: Any) -> None:
    @tracewire.intervention
    def numbers(model, tracer, live):
        seen = [].save()
        for step in range(5):
            seen.append(float(model.model.layers[2].output[0][-1].sum()))

    @tracewire.intervention
    def by_step(model, tracer, live):
        seen = {}.save()
        for step in range(2):
            seen[step] = float(model.model.layers[2].output[0][-1].sum())

    @tracewire.intervention
    def positions(model, tracer, live):
        seen = [].save()
        for place in range(3):
            seen.append(float(model.model.layers[2].output[0][place].sum()))

    @tracewire.intervention
    def several(model, tracer, live):
        first = float(model.model.layers[2].output[0][0].sum()).save()
        model.model.layers[2].output[0][:] *= 2
        rows = [float(row.sum()) for row in model.model.layers[2].output[0]].save()

    @tracewire.intervention
    def within_steps(model, tracer, live):
        seen = [].save()
        for step in tracer.iter[:]:
            for again in range(2):
                seen.append(float(model.model.layers[2].output[0][-1].sum()))

    blocks = {
        "numbers": numbers,
        "by_step": by_step,
        "positions": positions,
        "several": several,
        "within_steps": within_steps,
        "innocent": innocent,
    }
    finishes = Rounds(runner, **blocks).run(4)
    assert all(finish.error is None for finish in finishes.values())
    told = {name: finish.warnings for name, finish in finishes.items() if finish.warnings}
    assert told.keys() == {"numbers", "by_step"}
    (first,), (second,) = told["numbers"], told["by_step"]
    assert "'model.layers.2.output' 5 times, all within the first of 4 steps" in first
    assert "2 times" in second
    assert "test_time_limit.py:" in first
    # With one token there are no other steps.
    assert not Rounds(runner, numbers=numbers).run(1)["numbers"].warnings


def test_a_block_s_turns_share_the_time_of_a_step(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is short; the whole is not."""
    monkeypatch.setattr(blocks_module, "MOST_REQUESTS", 10**9)

    @tracewire.intervention
    def many_turns(model, tracer, live):
        import time

        turns = [].save()
        while True:
            model.model.layers[2].output
            turns.append(1)
            time.sleep(0.05)

    rounds = Rounds(runner, many=many_turns, innocent=innocent)
    error = rounds.run(2)["many"].error
    assert error is not None
    assert error.type == "BlockTimeout"
    assert "0.3 s within one step" in error.message
    assert rounds.link.finishes["many"].manifest[0].length < 10
    innocent_saved(rounds, 2)


def test_each_step_has_its_own_time(runner: Any) -> None:
    @tracewire.intervention
    def steady(model, tracer, live):
        import time

        turns = [].save()
        for step in tracer.iter[:]:
            model.model.layers[2].output
            time.sleep(0.03)
            turns.append(step)

    rounds = Rounds(runner, steady=steady)
    assert rounds.run(16)["steady"].error is None


def test_what_is_saved_cannot_hold_the_engine_when_it_is_read(runner: Any) -> None:
    @tracewire.intervention
    def iterated(model, tracer, live):
        class Evil(list):
            def __iter__(self):
                while True:
                    pass

        evil = Evil([1])
        model.model.layers[2].output
        held = {"evil": evil}.save()
        for step in tracer.iter[1:]:
            model.model.layers[2].output

    @tracewire.intervention
    def looked_at(model, tracer, live):
        class Evil(list):
            def __getattribute__(self, name):
                while True:
                    pass

        model.model.layers[2].output
        held = {"evil": Evil([1])}.save()

    @tracewire.intervention
    def key(model, tracer, live):
        class Key:
            def __hash__(self):
                return 1

            def __eq__(self, other):
                while True:
                    pass

        model.model.layers[2].output
        held = {}.save()
        held[Key()] = 1
        for step in tracer.iter[1:]:
            model.model.layers[2].output
            held = {Key(): 1, **held}

    @tracewire.intervention
    def exits(model, tracer, live):
        class Evil(list):
            def __iter__(self):
                raise SystemExit(3)

        model.model.layers[2].output
        held = {"evil": Evil([1])}.save()

    rounds = Rounds(runner, iterated=iterated, looked=looked_at, key=key, exits=exits, innocent=innocent)
    finishes = rounds.run(3)
    for name in ("iterated", "looked", "key", "exits"):
        finish = finishes[name]
        assert finish.error is not None or "held" in finish.save_errors, name
    error = finishes["iterated"].error
    assert error is not None
    assert "the save 'held'" in error.message
    innocent_saved(rounds, 3)


def test_what_is_raised_cannot_hold_the_engine_when_it_is_read(runner: Any) -> None:
    @tracewire.intervention
    def silent(model, tracer, live):
        class Silent(Exception):
            def __str__(self):
                while True:
                    pass

        model.model.layers[2].output
        raise Silent

    @tracewire.intervention
    def unnameable(model, tracer, live):
        model.model.layers[2].output
        raise ValueError("\ud800")

    @tracewire.intervention
    def leaves(model, tracer, live):
        from greenlet import GreenletExit

        model.model.layers[2].output
        raise GreenletExit

    rounds = Rounds(runner, silent=silent, unnameable=unnameable, leaves=leaves, innocent=innocent)
    finishes = rounds.run(3)
    errors = {name: finish.error for name, finish in finishes.items()}
    silent_error, unnameable_error, leaves_error = (errors[name] for name in ("silent", "unnameable", "leaves"))
    assert silent_error is not None
    assert (silent_error.type, silent_error.source) == ("Silent", "raise Silent")
    assert "could not be read" in silent_error.message
    assert unnameable_error is not None
    assert unnameable_error.message == "\\ud800"
    assert leaves_error is not None
    assert leaves_error.source == "raise GreenletExit"
    assert "GreenletExit" in leaves_error.message
    innocent_saved(rounds, 3)


def test_a_save_is_bound_to_a_name(runner: Any) -> None:
    """Text that cannot be encoded, and keys that are no text: said by name; other saves arrive, others' too."""

    @tracewire.intervention
    def named(model, tracer, live):
        globals()["\ud800"] = [1].save()
        globals()[5] = [2].save()
        good = [].save()
        for step in tracer.iter[:]:
            model.model.layers[2].output
            good.append(step)

    rounds = Rounds(runner, named=named, innocent=innocent)
    finish = rounds.run(3)["named"]
    assert finish.error is None
    assert {name: "name" in why for name, why in finish.save_errors.items()} == {"\\ud800": True, "<int>": True}
    assert [(entry.name, entry.length) for entry in finish.manifest] == [("good", 3)]
    innocent_saved(rounds, 3)


def test_what_is_too_large_for_an_event_is_refused_by_name(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tracewire_engine.worker import save_tracker as saves_module

    monkeypatch.setattr(saves_module, "MOST_TEXT", 1000)

    @tracewire.intervention
    def large(model, tracer, live):
        model.model.layers[2].output
        small = ("x" * 300).save()
        big = (b"x" * 900).save()
        nested = {"rows": [("x" * 2000,)]}.save()

    rounds = Rounds(runner, large=large, innocent=innocent)
    finish = rounds.run(2)["large"]
    assert finish.save_errors.keys() == {"big", "nested"}
    assert "1000 bytes" in finish.save_errors["nested"]
    innocent_saved(rounds, 2)


def test_handlers_that_a_block_changed_are_put_back(runner: Any) -> None:
    @tracewire.intervention
    def changes(model, tracer, live):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        model.model.layers[2].output

    @tracewire.intervention
    def spins(model, tracer, live):
        for step in tracer.iter[2:]:
            model.model.layers[2].output
            while True:
                pass

    rounds = Rounds(runner, changes=changes, spins=spins, innocent=innocent)
    error = rounds.run(4)["spins"].error
    assert error is not None
    assert error.type == "BlockTimeout"
    innocent_saved(rounds, 4)


def test_a_signal_to_end_that_comes_in_a_block_s_turn_ends_the_process_and_not_the_block(runner: Any) -> None:
    class Ended(BaseException):
        pass

    def end(number: int, frame: Any) -> None:
        raise Ended

    @tracewire.intervention
    def told(model, tracer, live):
        import signal

        model.model.layers[2].output
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            reached = 1

    signal.signal(signal.SIGTERM, end)
    watchdog._terminate = None
    watchdog._guard()
    rounds = Rounds(runner, told=told)
    with pytest.raises(Ended):
        rounds.step()
    watchdog._terminate = None
    runner.nnsight_model.interleaver.batcher.end()
    rounds.end()
    assert rounds.link.finishes["told"].error is None


def test_modules_that_a_block_deleted_are_put_back(runner: Any) -> None:
    @tracewire.intervention
    def deletes(model, tracer, live):
        import sys

        model.model.layers[2].output
        for name in [name for name in sys.modules if name.startswith(("nnsight", "tracewire"))]:
            del sys.modules[name]

    Rounds(runner, deletes=deletes).run(2)
    assert "nnsight.tracing.tracer" in sys.modules
    rounds = Rounds(runner, innocent=innocent)
    rounds.run(3)
    innocent_saved(rounds, 3)


def test_a_loop_that_swallows_every_exception_is_ended(runner: Any) -> None:
    @tracewire.intervention
    def swallows(model, tracer, live):
        import time

        swallowed = [].save()
        model.model.layers[2].output
        while True:
            try:
                time.sleep(0.05)
            except BaseException:
                swallowed.append(1)

    rounds = Rounds(runner, swallows=swallows, innocent=innocent)
    finish = rounds.run(4)["swallows"]
    assert finish.error is not None
    assert (finish.error.type, finish.error.source) in (
        ("BlockTimeout", "except BaseException:"),
        ("BlockTimeout", "swallowed.append(1)"),
    )
    # The first one, and no other.
    assert [entry.length for entry in finish.manifest if entry.name == "swallowed"] == [1]
    assert sys.gettrace() is None
    innocent_saved(rounds, 4)


@pytest.mark.parametrize("way", ["ignored", "blocked", "stopped"])
def test_a_block_that_switches_the_timer_off_is_ended(runner: Any, way: str) -> None:
    @tracewire.intervention
    def switches_off(model, tracer, live, way=way):
        import signal

        model.model.layers[2].output
        if way == "ignored":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        elif way == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
        while True:
            pass

    rounds = Rounds(runner, switches_off=switches_off, innocent=innocent)
    error = rounds.run(4)["switches_off"].error
    assert error is not None
    assert (error.type, error.source) in {("BlockTimeout", "pass"), ("BlockTimeout", "while True:")}
    innocent_saved(rounds, 4)
    again = Rounds(runner, endless=switches_off, innocent=innocent)
    assert again.run(4)["endless"].error is not None


def test_what_a_block_sets_for_the_process_is_not_set_for_the_block_behind_it(runner: Any) -> None:
    @tracewire.intervention
    def sets(model, tracer, live):
        import sys

        import torch

        for step in tracer.iter[:]:
            model.model.layers[2].output
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            sys.setrecursionlimit(150)

    @tracewire.intervention
    def reads(model, tracer, live):
        import sys

        import torch

        found = [].save()
        for step in tracer.iter[:]:
            model.model.layers[2].output
            made = torch.zeros(1)
            found.append((str(made.dtype), str(made.device), sys.getrecursionlimit()))

    rounds = Rounds(runner, sets=sets, reads=reads)
    finishes = rounds.run(3)
    assert (finishes["sets"].error, finishes["reads"].error) == (None, None)
    found = [delta.value if isinstance(delta, Set) else delta.items for part in rounds.saved("reads") for delta in part]
    expected = digest([("torch.float32", "cpu", sys.getrecursionlimit())] * 3)
    assert finishes["reads"].manifest[0].digest == expected, found


def test_a_save_whose_finalizer_never_returns_is_freed_within_the_limit(runner: Any) -> None:
    @tracewire.intervention
    def odd(model, tracer, live):
        class Odd(list):
            def __del__(self):
                while True:
                    pass

        model.model.layers[2].output
        kept = {"odd": Odd([1])}.save()

    rounds = Rounds(runner, odd=odd, innocent=innocent)
    rounds.run(3)
    innocent_saved(rounds, 3)


def test_the_timer_is_set_once_for_several_turns(runner: Any) -> None:
    def left() -> float:
        return signal.getitimer(signal.ITIMER_REAL)[0]

    with watchdog.timer_once():
        assert not left()
        with watchdog.turn():
            assert left()
        # What is inside leaves it, too.
        watchdog.start_shared_timer()
        watchdog.stop_shared_timer()
        with watchdog.timer_once():
            pass
        assert left()
        with pytest.raises(watchdog.BlockTimeout), watchdog.turn(building=True):
            while True:
                pass
        with watchdog.turn():
            pass
    assert not left()
    with watchdog.timer_once():
        pass
    assert not left()


def test_a_block_is_interrupted_in_time_although_the_timer_rang_between_two_turns(runner: Any) -> None:
    with watchdog.timer_once():
        with watchdog.turn():
            pass
        # The timer rings, and no block is there to be interrupted. Its next ring is late.
        watchdog._interrupt(signal.SIGALRM, None)
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        with watchdog.turn():
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.3


def test_what_blocks_change_is_put_back_at_each_location(runner: Any) -> None:
    before = sys.getrecursionlimit()
    with watchdog.timer_once():
        for _ in range(2):
            watchdog.start_shared_timer()
            with watchdog.turn():
                sys.setrecursionlimit(before + 100)
            watchdog.stop_shared_timer()
            assert sys.getrecursionlimit() == before
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        watchdog.start_shared_timer()
        assert signal.getsignal(signal.SIGALRM) is watchdog._interrupt
        watchdog.stop_shared_timer()
