"""The save tracker: whatever a block does to what it saved, the fold of its deltas ends as exactly that."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import equal
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, DecodedOutput, Delta, Final, Manifest, Set
from tracewire_engine.worker import save_tracker as saves_module
from tracewire_engine.worker.host_copy import HostArray, HostCopy
from tracewire_engine.worker.save_tracker import SaveTracker


def finish(tracker: SaveTracker, saves: dict[str, Any]) -> tuple[list[Delta], list[Manifest]]:
    """The last deltas of a choice's saves, and the manifest."""
    deltas, manifest, _ = tracker.ending(saves, 0, 0).compare()
    return deltas, manifest


class Replay:
    """Feeds a tracker's deltas, over the wire, to a fold."""

    def __init__(self) -> None:
        self.tracker = SaveTracker()
        self.fold = Fold()
        self.seq = 0
        self.saves: dict[str, Any] = {}

    def step(self) -> list[Delta]:
        deltas = self.tracker.step(self.saves)
        event = DecodedOutput(attempt=1, seq=self.seq, index=self.seq, token_ids=[7], deltas=[deltas])
        self.fold.apply(decode_event(encode(event)))
        self.seq += 1
        return deltas

    def finish(self) -> list[Manifest]:
        deltas, manifest = finish(self.tracker, self.saves)
        final = Final(attempt=1, seq=self.seq, status="finished", deltas=[(0, 0, deltas)], manifest=manifest)
        self.fold.apply(decode_event(encode(final)))
        self.fold.verify()
        return manifest

    @property
    def folded(self) -> dict[str, Any]:
        return self.fold.choices[0, 0].saves


def test_saves_that_gain_too_much_together_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves_module, "MOST_ITEMS_TOGETHER", 100)
    replay = Replay()
    replay.saves = {"first": list(range(60)), "second": list(range(60)), "third": {1}}
    replay.step()
    assert list(replay.tracker.errors) == ["second", "third"]
    assert "together" in replay.tracker.errors["second"]


@pytest.mark.parametrize("outer", [dict, list])
def test_lists_that_are_too_much_together_are_refused_before_any_is_copied(
    monkeypatch: pytest.MonkeyPatch, outer: type
) -> None:
    """Copying up to the limit takes a second, which the other blocks of a host would wait."""
    monkeypatch.setattr(saves_module, "MOST_ITEMS_TOGETHER", 100)
    copied: list[Any] = []
    monkeypatch.setattr(saves_module, "wire", lambda value, path: copied.append(value))
    replay = Replay()
    lists = {f"n{number}": [0] * 40 for number in range(3)}
    replay.saves = {"held": lists if outer is dict else list(lists.values())}
    replay.step()
    assert "together" in replay.tracker.errors["held"]
    assert copied == []


@pytest.mark.parametrize("nested", [False, True])
def test_what_gains_too_much_in_one_step_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    """A loop that asks the model for nothing: nobody waits for what it appended. The other saves go on."""
    monkeypatch.setattr(saves_module, "MOST_ITEMS", 100)
    replay = Replay()
    runaway: list[Any] = []
    keys: dict[int, int] = {}
    replay.saves = {"runaway": [runaway] if nested else runaway, "keys": keys, "good": []}
    for step in range(3):
        runaway.extend(range(100))
        keys.update(dict.fromkeys(range(100 * step, 100 * step + 100)))
        replay.saves["good"].append(step)
        replay.step()
    assert not replay.tracker.errors
    runaway.extend(range(101))
    keys.update(dict.fromkeys(range(1000, 1101)))
    replay.saves["good"].append(3)
    replay.step()
    assert set(replay.tracker.errors) == {"runaway", "keys"}
    assert "gained 101 items in one step" in replay.tracker.errors["runaway"]
    found: list[Any] = []
    runaway.append(torch.zeros(1))
    replay.tracker.collect_new(replay.saves, found)
    assert found == []
    replay.finish()
    assert replay.folded == {"good": [0, 1, 2, 3]}


def test_a_growing_list_sends_each_item_once() -> None:
    replay = Replay()
    values: list[Any] = []
    replay.saves["xs"] = values
    sent = []
    for step in range(5):
        values.append(torch.full((3,), float(step), dtype=torch.bfloat16))
        sent.append(replay.step())
    assert isinstance(sent[0][0], Set)
    assert all(len(deltas) == 1 and isinstance(deltas[0], Append) and len(deltas[0].items) == 1 for deltas in sent[1:])
    replay.finish()
    assert equal(replay.folded["xs"], values)


def test_keys_that_are_tuples_stream_one_by_one() -> None:
    replay = Replay()
    probabilities: dict[Any, Any] = {}
    replay.saves["probs"] = probabilities
    for layer in range(3):
        probabilities[layer, "head"] = {(layer, 0): []}
        deltas = replay.step()
        assert len(deltas) == 1
        assert list(replay.folded["probs"]) == list(probabilities)
    probabilities[1, "head"][1, 0].append(5)
    assert [type(delta) for delta in replay.step()] == [Append]
    del probabilities[0, "head"]
    replay.step()
    replay.finish()
    assert replay.folded["probs"] == {(1, "head"): {(1, 0): [5]}, (2, "head"): {(2, 0): []}}


def test_a_set_that_grows_is_sent_as_it_grows_and_a_long_one_in_leaps() -> None:
    replay = Replay()
    seen: set[int] = set()
    inner: set[int] = set()
    replay.saves = {"seen": seen, "nested": [inner]}
    for step in range(3):
        seen.add(step)
        inner.add(-step)
        replay.step()
        assert replay.folded == {"seen": seen, "nested": [inner]}
    count = 0
    for step in range(3, 3000):
        seen.add(step)
        count += bool(replay.step())
    assert 0 < count < 256 + 30
    inner.remove(0)
    inner.add(7)
    seen.remove(0)
    seen.add(-1)
    assert len(replay.step()) == 1, "of a long set only the size is looked at"
    assert replay.folded["nested"] == [{-1, -2, 7}]
    assert replay.folded["seen"] != seen
    replay.finish()
    assert replay.folded == {"seen": seen, "nested": [{-1, -2, 7}]}


def test_what_did_not_change_is_not_sent() -> None:
    replay = Replay()
    replay.saves = {"xs": [1, 2], "d": {"a": [1]}, "s": "text", "t": torch.ones(2)}
    replay.step()
    assert replay.step() == []
    deltas, _ = finish(replay.tracker, replay.saves)
    assert deltas == []


def test_changes_in_place_arrive_with_the_final() -> None:
    replay = Replay()
    total = torch.zeros(2)
    inner = torch.zeros(1)
    replay.saves = {"total": total, "rows": [[inner]], "same": torch.ones(4)}
    replay.step()
    total += 1
    inner += 1
    assert replay.step() == []
    deltas, _ = finish(replay.tracker, replay.saves)
    assert [delta.path for delta in deltas] == [("total",), ("rows", 0, 0)]


def test_a_replaced_item_of_a_long_list_arrives_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves_module, "WINDOW", 4)
    replay = Replay()
    values = [float(n) for n in range(50)]
    replay.saves["xs"] = values
    replay.step()
    values[45] = -1.0
    values[1] = -2.0
    steps = [replay.step() for _ in range(13)]
    assert sum(len(deltas) for deltas in steps) == 2
    values[3] = -3.0
    replay.finish()
    assert replay.folded["xs"] == values


def test_a_long_list_that_gains_tensors_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves_module, "WINDOW", 4)
    tracker, kept = SaveTracker(), [torch.zeros(2)]

    def step() -> list[Delta]:
        new: list[Any] = []
        tracker.collect_new({"kept": kept}, new)
        host = HostCopy()
        host.prime(new)
        return tracker.step({"kept": kept}, host)

    assert isinstance(step()[0], Set)
    with monkeypatch.context() as patched:
        patched.setattr(tracker, "_changes", None)
        for number in range(20):
            kept.append(torch.full((2,), float(number)))
            (delta,) = step()
            assert isinstance(delta, Append)
    kept[3] = torch.ones(2)
    # A window of items is checked in a step.
    found = [delta for _ in range(6) for delta in step()]
    assert [delta.path for delta in found] == [("kept", 3)]


class _Unknown:
    pass


def test_a_save_that_cannot_travel_is_named_and_the_others_arrive() -> None:
    replay = Replay()
    replay.saves = {"good": [1], "bad": [1]}
    replay.step()
    replay.saves["bad"].append(_Unknown())
    replay.saves["good"].append(2)
    replay.step()
    manifest = replay.finish()
    assert [entry.name for entry in manifest] == ["good"]
    assert replay.folded == {"good": [1, 2]}
    assert "_Unknown" in replay.tracker.errors["bad"]


def test_containers_that_contain_themselves_or_nest_too_deep_are_named() -> None:
    replay = Replay()
    loop: list[Any] = [1]
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    late: dict[str, Any] = {"a": []}
    replay.saves = {"deep": deep, "late": late, "loop": loop, "good": 1}
    replay.step()
    assert set(replay.tracker.errors) == {"deep"}
    loop.append(loop)
    late["a"].append(late)
    replay.step()
    replay.finish()
    assert set(replay.tracker.errors) == {"deep", "late", "loop"}
    assert replay.folded == {"good": 1}


def test_a_name_no_longer_saved_leaves_the_fold() -> None:
    replay = Replay()
    replay.saves = {"a": 1, "b": 2}
    replay.step()
    del replay.saves["a"]
    replay.step()
    replay.finish()
    assert replay.folded == {"b": 2}


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.floats(width=32), max_size=3).map(lambda xs: torch.tensor(xs, dtype=torch.float32)),
    st.lists(st.floats(width=16), max_size=3).map(lambda xs: np.array(xs, dtype=np.float16)),
    st.sets(st.integers(0, 9), max_size=3),
    st.frozensets(st.text(max_size=1), max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


_keys = st.one_of(st.text(max_size=2), st.integers(0, 3), st.tuples(st.integers(0, 1), st.text(max_size=1)))


_values = st.recursive(
    _leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(_keys, children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


def _containers(value: Any) -> list[Any]:
    found = []
    if isinstance(value, list):
        found.append(value)
        for item in value:
            found.extend(_containers(item))
    elif isinstance(value, dict):
        found.append(value)
        for item in value.values():
            found.extend(_containers(item))
    return found


def _mutate(data: st.DataObject, saves: dict[str, Any]) -> None:
    """One change of the kind that a block makes: anywhere, of any sort, in place ones included."""
    target = data.draw(st.sampled_from(_containers(saves)))
    value = copy.deepcopy(data.draw(_values))
    if isinstance(target, dict):
        keys = st.sampled_from(["a", "b", "c"]) if target is saves else _keys
        if target and data.draw(st.booleans()):
            target.pop(data.draw(st.sampled_from(list(target))))
        else:
            target[data.draw(keys)] = value
    else:
        action = data.draw(st.sampled_from(["append", "replace", "insert", "pop", "reverse", "clear", "extend"]))
        if action == "append":
            target.append(value)
        elif action == "extend":
            target.extend([value, 1, 2])
        elif action == "insert":
            target.insert(0, value)
        elif action == "reverse":
            target.reverse()
        elif action == "clear":
            target.clear()
        elif target and action == "replace":
            target[data.draw(st.integers(0, len(target) - 1))] = value
        elif target and action == "pop":
            target.pop(data.draw(st.integers(0, len(target) - 1)))
    items = [item for box in _containers(saves) for item in (box.values() if isinstance(box, dict) else box)]
    sets = [item for item in items if isinstance(item, set)]
    if sets and data.draw(st.booleans()):
        data.draw(st.sampled_from(sets)).symmetric_difference_update(data.draw(st.sets(st.integers(0, 9))))
    tensors = [item for item in items if isinstance(item, torch.Tensor) and item.numel()]
    if tensors and data.draw(st.booleans()):
        data.draw(st.sampled_from(tensors)).fill_(1.5)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_changes_folds_to_what_is_held_in_the_end(data: st.DataObject) -> None:
    replay = Replay()
    replay.saves = {"a": [], "b": {}}
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            _mutate(data, replay.saves)
        replay.step()
    _mutate(data, replay.saves)
    replay.finish()
    assert set(replay.folded) == set(replay.saves)
    for name, value in replay.saves.items():
        assert digest(replay.folded[name]) == digest(value)


class Rewound:
    """Steps of a block, of which only the first `tokens` are published in the end."""

    def __init__(self) -> None:
        self.tracker = SaveTracker()
        self.saves: dict[str, Any] = {}
        self.sent: list[bytes] = []
        self.held: list[dict[str, Any]] = []

    def step(self) -> None:
        index = len(self.sent)
        deltas = self.tracker.step(self.saves, index=index)
        self.sent.append(encode(DecodedOutput(attempt=1, seq=index, index=index, token_ids=[7], deltas=[deltas])))
        self.held.append(copy.deepcopy(self.saves))

    def end(self, tokens: int) -> tuple[dict[str, Any], list[Delta]]:
        """What a consumer holds, and the final's deltas."""
        counted = self.tracker.rewind(self.saves, tokens)
        deltas, manifest, _ = self.tracker.ending(counted(self.saves), 0, 0).compare()
        fold = Fold()
        for event in self.sent[:tokens]:
            fold.apply(decode_event(event))
        final = Final(attempt=1, seq=tokens, status="stopped", deltas=[(0, 0, deltas)], manifest=manifest)
        fold.apply(decode_event(encode(final)))
        fold.verify()
        return fold.choices[0, 0].saves, deltas


def test_what_later_steps_saved_is_undone() -> None:
    """Lists, dicts, nested ones, rebound and new names: the block's own objects too."""
    for tokens in range(1, 13):
        block = Rewound()
        seen: list[Any] = []
        nested: dict[str, Any] = {"rows": [[0]], "last": None}
        kinds: set[str] = set()
        block.saves = {"seen": seen, "nested": nested, "kinds": kinds}
        for step in range(12):
            kinds.add(f"kind {step // 2}")
            seen.append(torch.full((3,), float(step)))
            nested["rows"].append([step])
            nested["rows"][0] = [step * 100]
            nested["last"] = f"step {step}"
            nested[f"key {step}"] = step
            block.saves["latest"] = step + 1000
            if step == 9:
                block.saves["new"] = "bound late"
                del nested["key 3"]
                del seen[:4]
            block.step()
        folded, deltas = block.end(tokens)
        assert deltas == []
        assert equal(folded, block.held[tokens - 1]), tokens
        assert equal({"seen": seen, "nested": nested}, {name: folded[name] for name in ("seen", "nested")})


def test_what_is_too_long_ago_to_be_undone_is_sent_anew() -> None:
    block = Rewound()
    block.saves = {"seen": []}
    for step in range(3 * saves_module.REPLACED):
        block.saves["seen"].append(step)
        block.saves["latest"] = step + 1000
        block.step()
    folded, _ = block.end(4)
    assert folded["seen"] == [0, 1, 2, 3]


def test_what_a_block_saves_when_its_request_is_over_stays() -> None:
    """It runs on to its end, behind what is undone."""
    block = Rewound()
    block.saves = {"seen": []}
    for step in range(5):
        block.saves["seen"].append(step)
        block.saves["latest"] = step + 1000
        block.step()
    counted = block.tracker.rewind(block.saves, 3)
    block.saves["seen"].append("end")
    block.saves["text"] = "the result"
    assert counted(block.saves) == {"seen": [0, 1, 2, "end"], "latest": 1002, "text": "the result"}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_sequence_of_changes_can_be_undone(data: st.DataObject) -> None:
    block = Rewound()
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 4))):
            _mutate(data, block.saves)
        block.step()
    tokens = data.draw(st.integers(0, len(block.sent)))
    folded, _ = block.end(tokens)
    # What was written into a tensor in place stays written.
    assert equal(_without_contents(folded), _without_contents(block.held[tokens - 1] if tokens else {}))


def _without_contents(value: Any) -> Any:
    """Arrays by their shapes, and dtypes alike."""
    if isinstance(value, dict):
        return {key: _without_contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_contents, value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return ("array", *value.shape)
    return "dtype" if isinstance(value, torch.dtype | np.dtype) else value


def test_a_list_that_changed_on_its_way_out_comes_back_as_it_was_sent() -> None:
    """Its last change was never sent: in the same step the block let go of it."""
    block = Rewound()
    inner: list[Any] = [0, {"kinds": {1}}]
    block.saves = {"a": inner, "b": [[1, 2], inner]}
    block.step()
    inner[1]["kinds"].add(2)
    inner[0] = 7
    block.step()
    inner[1]["kinds"].clear()
    inner[1]["new"] = 1
    inner.pop(0)
    block.saves["a"] = None
    block.saves["b"][:] = []
    block.step()
    folded, deltas = block.end(1)
    assert deltas == []
    assert equal(folded, block.held[0])


@pytest.mark.parametrize("keeps", [False, True])
def test_arrays_that_are_known_to_be_as_they_were_saved_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    compared: list[torch.Tensor] = []
    is_in = HostArray.is_in

    def noting(array: HostArray, tensor: torch.Tensor) -> bool:
        compared.append(tensor)
        return is_in(array, tensor)

    monkeypatch.setattr(HostArray, "is_in", noting)
    tracker, kept = SaveTracker(), []
    for number in range(3):
        kept.append(torch.full((4,), float(number)))
        host = HostCopy()
        host.prime(kept[-1:])
        tracker.step({"kept": kept}, host)
    # What came since is found by its identity.
    kept[1] = torch.ones(4)
    tracker.keeps = keeps
    ending = tracker.ending({"kept": kept}, 0, 0)
    ending.passed = True
    deltas, (entry,), _ = ending.compare()
    assert [delta.path for delta in deltas] == [("kept", 1)]
    assert len(compared) == (0 if keeps else 1)
    # One of its items has another digest than the adapter knows.
    assert entry.digest


@pytest.mark.parametrize("changed", [None, 0, 7, 19])
def test_the_end_compares_what_was_sent_in_pieces(monkeypatch: pytest.MonkeyPatch, changed: int | None) -> None:
    monkeypatch.setattr(saves_module, "_COMPARED", 64)
    tracker, kept = SaveTracker(), []
    for number in range(20):
        kept.append(torch.full((number % 5 + 1, 4), float(number)))
        host = HostCopy()
        host.prime([kept[-1]])
        tracker.step({"kept": kept}, host)
    if changed is not None:
        kept[changed][-1, -1] += 1
    ending = tracker.ending({"kept": kept}, 0, 0)
    ending.passed = True
    deltas, (entry,), _ = ending.compare()
    assert [delta.path for delta in deltas] == ([] if changed is None else [("kept", changed)])
    assert bool(entry.digest) == (changed is not None)
