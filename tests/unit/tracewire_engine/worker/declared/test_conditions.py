"""Conditions on the device: slots, hysteresis, windows of token ids, and masks of rows."""

from __future__ import annotations

import numpy as np
import torch

from tracewire_bus.wire.messages import When
from tracewire_engine.worker.declared.conditions import RowCondition, Signals, Watch, Windows, condition_key, filled

CPU = torch.device("cpu")


def test_a_condition_holds_from_one_threshold_to_the_other() -> None:
    signals = Signals(CPU)
    both = [signals.take(), signals.take(), signals.take()]
    conditions = [
        When(probe="p", above=2.0, release=1.0),
        When(probe="p", below=0.0, release=1.5),
        When(probe="p", above=3.0, below=-1.0),
    ]
    watch = Watch(signals, [(1, slot, when) for slot, when in zip(both, conditions, strict=True)])
    seen = []
    for value in (1.5, 2.5, 1.2, float("nan"), 1.0, -0.5, 1.2, 1.5, 3.5, -2.0):
        watch.write(torch.tensor([[99.0, value]]))
        seen.append([bool(one) for one in signals.states[both, 0]])
    high, low, outside = map(list, zip(*seen, strict=True))
    # Where the probe was left out, a condition stays as it was.
    assert high == [False, True, True, True, False, False, False, False, True, False]
    assert low == [False, False, False, False, False, True, True, False, False, True]
    assert outside == [False] * 8 + [True, True]


def test_a_controller_gets_the_number_and_keeps_its_state() -> None:
    signals = Signals(CPU)
    value, state = signals.take(), signals.take()
    signals.states[state] = torch.tensor([5.0, 6.0])
    Watch(signals, [(0, value, None)]).write(torch.tensor([0.25]))
    assert float(signals.values[value]) == 0.25
    assert signals.states[state].tolist() == [5.0, 6.0]


def test_slots_are_cleared_and_used_again() -> None:
    signals = Signals(CPU)
    first = signals.take()
    signals.states[first] = 1.0
    signals.give_back([first])
    taken = [signals.take() for _ in range(40)]
    assert len(set(taken)) == 40
    assert first in taken
    assert not signals.states[taken].any()
    assert signals.values[taken].isnan().all()


def test_windows_have_the_last_ids_of_their_own_request() -> None:
    signals = Signals(CPU)
    slots = [signals.take(), signals.take()]
    step = torch.tensor([7, 1, 2, 3, 9, 0, 0])
    windows = Windows(signals, [(slots[0], 1, 3), (slots[1], 4, 1)], 5, lambda: step)
    rows = windows.take()
    assert rows[3, -3:].tolist() == [1, 2, 3]
    assert rows[1, -1] == 1
    assert (rows[1, :-1] < 0).all()
    assert rows[4, -1] == 9
    # A row that is nobody's matches nothing.
    assert (rows[0] < 0).all()
    windows.end_step()
    step = torch.tensor([4, 5])
    later = Windows(signals, [(slots[1], 0, 1), (slots[0], 1, 1)], 2, lambda: step).take()
    assert later[0, -2:].tolist() == [9, 4]
    assert later[1, -4:].tolist() == [1, 2, 3, 5]
    signals.forget_tokens(slots[0])
    assert (signals.tokens[slots[0]] < 0).all()


def test_ids_of_drafts_that_were_not_taken_are_forgotten() -> None:
    signals = Signals(CPU)
    slots = [signals.take(), signals.take()]
    windows = Windows(signals, [(slots[0], 0, 3), (slots[1], 3, 2)], 5, lambda: torch.tensor([1, 2, 3, 8, 9]))
    # While it is not known which drafts are taken, a row's window has the drafts before it.
    assert windows.take()[2, -3:].tolist() == [1, 2, 3]
    windows.shorten({slots[0]: 2, None: 1})
    windows.end_step()
    later = Windows(signals, [(slots[0], 0, 1), (slots[1], 1, 1)], 2, lambda: torch.tensor([5, 6])).take()
    assert later[0, -2:].tolist() == [1, 5]
    assert later[1, -3:].tolist() == [8, 9, 6]


def test_a_mask_takes_all_parts_of_a_condition_and_the_tick() -> None:
    signals = Signals(CPU)
    slot = signals.take()
    # Three rows of a prompt of three, and one row of a request that has generated.
    members = [(slot, When(start=1, stop=3, every=2), -2, 3, 3), (slot, When(start=0, stop=9, every=3), 4, 0, 1)]
    condition = RowCondition(signals, members, None, np.arange(4))
    found = []
    for step in range(6):
        signals.tick.fill_(step)
        found.append(condition.mask().tolist())
    # The index of the third row is the tick, of the first two less; of the last, four more.
    assert [row[2] for row in found] == [False, True, False, False, False, False]
    assert [row[3] for row in found] == [False, False, True, False, False, False]
    part = RowCondition(signals, [(slot, When(part="prompt"), -1, 2, 3)], None, np.arange(3))
    assert part.mask().tolist() == [True, True, False]
    probe = RowCondition(signals, [(slot, When(probe="p", above=0.0), -1, 2, 3)], None, np.arange(3))
    assert not probe.mask().any()
    signals.states[slot, 0] = 1.0
    assert probe.mask().tolist() == [False, True, True]


def test_the_greatest_index_is_no_early_one() -> None:
    """Also from the rows of a prompt, which are further away from it than a number of 32 bits can say."""
    signals, most = Signals(CPU), 2**31 - 1
    for when, holds in ((When(start=most), 0), (When(stop=most), 2), (When(start=most - 2, every=most), 0)):
        condition = RowCondition(signals, [(0, when, -3, 3, 5)], None, np.arange(5))
        assert int(condition.mask().sum()) == holds, when
    # Every so many tokens, from the first.
    every = RowCondition(signals, [(0, When(every=most), -3, 3, 5)], None, np.arange(5))
    for tick in (0, 1, 100):
        signals.tick.fill_(tick)
        assert every.mask().tolist() == [tick + index == 0 for index in range(-3, 2)]
    late = RowCondition(signals, [(0, When(start=0, every=most), 5, 0, 1)], None, np.arange(1))
    signals.tick.fill_(most)
    assert late.mask().tolist() == [False]


def test_conditions_of_one_form_share_a_group() -> None:
    assert condition_key(None) == ()
    assert condition_key(When(start=1)) == condition_key(When(stop=9, every=3))
    different = [
        When(start=1),
        When(tokens=[[1]]),
        When(part="prompt"),
        When(part="answer"),
        When(probe="p", above=1.0),
    ]
    assert len({condition_key(when) for when in different}) == 5


def test_what_is_left_out_is_nan_or_minus_one() -> None:
    mask = torch.tensor([True, False])
    assert filled(torch.ones(2, 3, dtype=torch.bfloat16), mask)[1].isnan().all()
    assert filled(torch.ones(2, 3, dtype=torch.int32), mask).tolist() == [[1, 1, 1], [-1, -1, -1]]
