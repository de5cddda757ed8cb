"""The fold: whatever the deltas were, it ends as the value that they tell of, and nothing out of order gets in."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import equal
from tracewire_bus.domain.fold import DigestMismatch, Fold, FoldError, extended
from tracewire_bus.wire.codec import decode_event, decode_plain, decode_snapshot, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import kind, length
from tracewire_bus.wire.messages import (
    SHARED_INVOKE,
    Accepted,
    Append,
    ChatMessage,
    DecodedOutput,
    DecodedShared,
    Delete,
    Delta,
    Event,
    Failure,
    Final,
    Manifest,
    MessageDelta,
    Restarted,
    Set,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from tracewire_bus.wire.packing import encode_key, wire
from tracewire_bus.wire.refs import ArrayRef


def manifest_of(saves: dict[str, Any], invoke: int = 0, choice: int = 0) -> list[Manifest]:
    return [
        Manifest(invoke=invoke, choice=choice, name=name, kind=kind(value), length=length(value), digest=digest(value))
        for name, value in saves.items()
    ]


def output(seq: int, *deltas: Delta, attempt: int = 1, **fields: Any) -> DecodedOutput:
    """An output of one token whose step brought `deltas`."""
    return DecodedOutput(
        **{"attempt": attempt, "seq": seq, "index": seq, "token_ids": [seq], "deltas": [list(deltas)], **fields}
    )


def folded(*events: Event, names: set[str] | None = None) -> Fold:
    fold = Fold(names, verifying=True)
    for event in events:
        fold.apply(decode_event(encode(event)))
        # Digests taken as values come are those of what is held.
        for state in fold.choices.values():
            assert {name: state.digest_of(name) for name in state.saves} == {
                name: digest(value) for name, value in state.saves.items()
            }
    return fold


def saves_of(fold: Fold) -> dict[str, Any]:
    return fold.choices[0, 0].saves


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 255), max_size=3).map(lambda items: np.array(items, np.uint8)),
    st.sets(st.integers(0, 3), max_size=3),
    st.just(np.dtype("float32")),
)


_keys = st.one_of(
    *(st.text(max_size=2), st.integers(-2, 3), st.none(), st.binary(max_size=1), st.sampled_from([0.5, -0.5])),
    st.tuples(st.integers(0, 2), st.one_of(st.text(max_size=1), st.tuples(st.booleans()))),
)


_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=3), st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=6,
)


def containers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every list and dict below a value that deltas can reach, with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from containers(item, (*path, encode_key(key)))
    elif isinstance(value, list):
        yield path, value
        for index, item in enumerate(value):
            yield from containers(item, (*path, index))


def change(data: st.DataObject, saves: dict[str, Any]) -> Delta:
    """Mutate one container somewhere in `saves`, and say so in a delta."""
    path, target = data.draw(st.sampled_from(list(containers(saves, ()))))
    if isinstance(target, list):
        if not target or data.draw(st.booleans()):
            items = data.draw(st.lists(_values, max_size=3))
            target.extend(copy.deepcopy(items))
            return Append(path=path, items=[wire(item) for item in items])
        index = data.draw(st.integers(0, len(target) - 1))
        target[index] = data.draw(_values)
        return Set(path=(*path, index), value=wire(target[index]))
    if target and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(list(target)))
        del target[key]
        return Delete(path=(*path, encode_key(key)))
    key = data.draw(st.text(min_size=1, max_size=2) if target is saves else _keys)
    target[key] = copy.deepcopy(data.draw(_values))
    return Set(path=(*path, encode_key(key)), value=wire(target[key]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_sequence_of_changes_folds_to_the_changed_value(data: st.DataObject) -> None:
    saves: dict[str, Any] = {}
    fold, plain = Fold(), Fold()
    for seq in range(data.draw(st.integers(0, 6))):
        deltas = [change(data, saves) for _ in range(data.draw(st.integers(0, 4)))]
        event = encode(output(seq, *deltas))
        fold.apply(decode_event(event))
        assert equal(saves_of(fold), saves)
        # A snapshot is made of what was not decoded.
        plain.apply(decode_plain(event))
        assert equal(decode_snapshot(encode(plain.snapshot())).choices[0].saves, saves)
    last = [change(data, saves) for _ in range(data.draw(st.integers(0, 2)))]
    final = Final(attempt=1, seq=fold.seq + 1, status="finished", deltas=[(0, 0, last)], manifest=manifest_of(saves))
    fold.apply(decode_event(encode(final)))
    fold.verify()
    assert equal(saves_of(fold), saves)
    assert fold.digest() == digest({"0.0": saves} if saves else {})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_filtered_fold_is_the_filtered_value(data: st.DataObject) -> None:
    saves: dict[str, Any] = {"a": [], "b": {}}
    first = [Set(path=(name,), value=wire(value)) for name, value in saves.items()]
    deltas = [change(data, saves) for _ in range(data.draw(st.integers(0, 8)))]
    final = Final(attempt=1, seq=1, status="finished", manifest=manifest_of(saves))
    events = [output(0, *first, *deltas), final]
    fold = folded(*events, names={"a"})
    fold.verify()
    assert equal(saves_of(fold), {name: value for name, value in saves.items() if name == "a"})
    assert fold.digest() == folded(*events).digest(names=["a"])


def test_a_whole_trace() -> None:
    accepted = Accepted(attempt=1, seq=0, engine="e", model="m")
    fold = folded(
        accepted,
        DecodedOutput(attempt=1, seq=1, token_ids=[4, 5], text="ab", deltas=[[Set(path=("x",), value=[1])], []]),
        DecodedOutput(attempt=1, seq=2, choice=1, token_ids=[6], text="z", deltas=[[Set(path=("x",), value=5)]]),
        DecodedOutput(attempt=1, seq=3, invoke=1, token_ids=[7], deltas=[[]], finish_reason="length"),
        DecodedOutput(
            attempt=1,
            seq=4,
            index=2,
            token_ids=[8],
            text="c",
            deltas=[[Append(path=("x",), items=[2])]],
            finish_reason="stop",
            stop_reason="c",
        ),
        Final(
            attempt=1,
            seq=5,
            status="failed",
            error=Failure(type="ValueError", message="no"),
            usage=Usage(prompt_tokens=3, completion_tokens=5),
            deltas=[(0, 0, [Append(path=("x",), items=[3])])],
            manifest=[*manifest_of({"x": [1, 2, 3]}), *manifest_of({"x": 5}, choice=1)],
            save_errors={"0.0.y": "cannot travel"},
        ),
    )
    fold.verify()
    assert fold.finished
    assert (fold.attempt, fold.seq, fold.status, fold.accepted) == (1, 5, "failed", accepted)
    assert fold.error is not None
    assert fold.error.type == "ValueError"
    assert fold.usage.completion_tokens == 5
    assert fold.save_errors == {"0.0.y": "cannot travel"}
    assert fold.state() == {(0, 0): {"x": [1, 2, 3]}, (0, 1): {"x": 5}, (1, 0): {}}
    first = fold.choices[0, 0]
    assert (first.text, first.token_ids, first.finish_reason, first.stop_reason) == ("abc", [4, 5, 8], "stop", "c")
    assert fold.choices[1, 0].finish_reason == "length"


def test_its_containers_are_its_own() -> None:
    event = output(0, Set(path=("x",), value=[[1]]), Append(path=("x",), items=[[2]]))
    fold = Fold()
    fold.apply(event)
    before = fold.copy()
    handed_out = fold.state()[0, 0]["x"]
    event.deltas[0][0].value[0].append(99)  # type: ignore[union-attr]
    event.deltas[0][1].items[0].append(99)  # type: ignore[union-attr]
    handed_out[0].append(98)
    fold.apply(output(1, Append(path=("x", 0), items=[3])))
    assert saves_of(fold) == {"x": [[1, 3], [2]]}
    assert saves_of(before) == {"x": [[1], [2]]}
    assert (before.seq, before.choices[0, 0].token_ids) == (0, [0])
    before.apply(output(1))


def test_arrays_are_shared_with_copies() -> None:
    fold = folded(output(0, Set(path=("x",), value=wire([np.ones(3)]))))
    assert fold.copy().choices[0, 0].saves["x"][0] is saves_of(fold)["x"][0]


def test_restarting_starts_over() -> None:
    fold = folded(
        Accepted(attempt=1, seq=0, engine="e1", model="m"),
        DecodedOutput(attempt=1, seq=1, token_ids=[1], text="a", deltas=[[Set(path=("x",), value=1)]]),
        Restarted(attempt=2, seq=0, reason="lost"),
    )
    assert fold.choices == {}
    assert fold.accepted is None
    for event in (
        Accepted(attempt=2, seq=1, engine="e2", model="m"),
        DecodedOutput(attempt=2, seq=2, token_ids=[9], text="b", deltas=[[]]),
        Final(attempt=2, seq=3, status="finished"),
    ):
        fold.apply(event)
    fold.verify()
    assert fold.choices[0, 0].text == "b"


def test_a_final_by_someone_else_lets_stand_what_was_there() -> None:
    fold = folded(output(0, Set(path=("x",), value=1)), Final(attempt=2, seq=0, status="failed"))
    fold.verify()
    assert saves_of(fold) == {"x": 1}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([output(1)], "1-1 does not follow"),
        ([output(0), output(2, index=1)], "1-2 does not follow 1-0"),
        ([output(0), output(0, index=1)], "1-0 does not follow 1-0"),
        ([output(0, attempt=2), output(1, attempt=1)], "1-1 does not follow 2-0"),
        ([output(0), output(1, attempt=2, index=1)], "2-1 does not follow 1-0"),
        ([output(0), output(1, index=2)], "begins at token 2, and 1 came before"),
        ([output(0), output(1, index=0)], "begins at token 0, and 1 came before"),
        ([output(0, token_ids=[1, 2])], "deltas of 1 steps for 2 tokens"),
        ([Final(attempt=1, seq=0, status="finished"), output(1)], "after the final"),
        ([output(0, Append(path=("x",), items=[1]))], "Append at .'x',. leads nowhere"),
        ([output(0, Set(path=("x",), value=1), Append(path=("x",), items=[1]))], "no list"),
        ([output(0, Set(path=("x",), value=wire((1,))), Append(path=("x",), items=[1]))], "no list"),
        ([output(0, Set(path=("x",), value=[1]), Set(path=("x", 1), value=1))], "index 1 of a list of 1"),
        ([output(0, Set(path=("x",), value=[1]), Set(path=("x", -1), value=1))], "index -1"),
        ([output(0, Set(path=("x",), value=[1]), Set(path=("x", "a"), value=1))], "index 'a'"),
        ([output(0, Set(path=("x",), value=[1]), Delete(path=("x", 0)))], "no dict"),
        ([output(0, Set(path=("x",), value=wire(np.zeros(2))), Set(path=("x", 0), value=1))], "neither list nor dict"),
        ([output(0, Set(path=("x",), value="text"), Set(path=("x", 0, 0), value=1))], "neither list nor dict"),
        ([output(0, Delete(path=("x",)))], "leads nowhere"),
        ([output(0, Set(path=("x",), value={}), Set(path=("x", [1]), value=1))], "unhashable"),
        ([output(0, Set(path=(), value=1))], "without a path"),
    ],
)
def test_what_does_not_follow_is_refused(events: list[Event], said: str) -> None:
    with pytest.raises(FoldError, match=said):
        folded(*events)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_no_event_may_be_missing_or_twice(count: int, chance: random.Random) -> None:
    events: list[Event] = [output(seq) for seq in range(count)]
    place = chance.randrange(count - 1)
    spoilt = events[:place] + events[place + 1 :] if chance.random() < 0.5 else events[: place + 1] + events[place:]
    with pytest.raises(FoldError):
        folded(*spoilt)


def test_verifying_names_what_differs() -> None:
    manifest = manifest_of({"same": 1, "different": 2, "missing": 3})
    saved = [Set(path=(name,), value=value) for name, value in {"same": 1, "different": 5, "extra": 4}.items()]
    final = Final(attempt=1, seq=1, status="finished", manifest=manifest)
    with pytest.raises(DigestMismatch) as caught:
        folded(output(0, *saved), final).verify()
    assert caught.value.names == ["0.0.different", "0.0.extra", "0.0.missing"]
    folded(output(0, *saved), final, names={"same"}).verify()
    with pytest.raises(DigestMismatch):
        folded(output(0, *saved), Final(attempt=1, seq=1, status="finished")).verify()
    with pytest.raises(FoldError, match="only a finished trace"):
        folded(output(0, *saved)).verify()


def test_equal_saves_have_one_digest_whoever_folded_them() -> None:
    one = folded(output(0, Set(path=("x",), value=[1, 2]), Set(path=("y",), value=1)))
    other = folded(
        output(0, Set(path=("y",), value=1), Set(path=("x",), value=[])),
        output(1, Append(path=("x",), items=[1])),
        output(2, Append(path=("x",), items=[2])),
    )
    assert one.digest() == other.digest()
    assert one.digest(["x"]) == other.digest(["x"]) != one.digest()
    assert Fold().digest() == folded(output(0)).digest()


def test_references_are_verified_without_what_they_stand_for() -> None:
    arrays = [np.full((3, 2), number, dtype=np.float32) for number in range(3)]
    refs = [ArrayRef("float32", (3, 2), digest(array), f"blob{array[0, 0]:g}", "acts") for array in arrays]
    saves = {"acts": arrays[:2], "last": {"pair": (arrays[2], 1)}}
    final = Final(attempt=1, seq=2, status="finished", manifest=manifest_of(saves))
    events = [
        output(0, Set(path=("acts",), value=wire(refs[:1]))),
        output(
            1, Append(path=("acts",), items=[wire(refs[1])]), Set(path=("last",), value=wire({"pair": (refs[2], 1)}))
        ),
        final,
    ]
    fold = folded(*events)
    fold.verify()
    held = saves_of(fold)
    assert held == {"acts": refs[:2], "last": {"pair": (refs[2], 1)}}
    assert fold.digest() == digest({"0.0": saves})
    assert [(kind(value), length(value)) for value in held["acts"]] == [("array", 6)] * 2
    assert equal(held["acts"][0], arrays[0])
    assert not equal(held["acts"][0], arrays[1])
    events[0] = output(0, Set(path=("acts",), value=wire([refs[2]])))
    with pytest.raises(DigestMismatch, match="acts"):
        folded(*events).verify()


def gain(seq: int, *steps: list[Delta], attempt: int = 1) -> DecodedShared:
    """What the trace shares has gained this, step by step."""
    return DecodedShared(attempt=attempt, seq=seq, invoke=SHARED_INVOKE, deltas=list(steps))


def test_what_a_trace_shares_is_folded_apart_from_its_invokes_and_verified() -> None:
    events: list[Event] = [
        output(0, Set(path=("rows",), value=["own"])),
        gain(1, [Set(path=("rows",), value=[1])], [Append(path=("rows",), items=[2]), Set(path=("n",), value={})]),
        output(2, Append(path=("rows",), items=["more"]), index=1),
        gain(3, [Append(path=("rows",), items=[3])]),
    ]
    shared, own = {"rows": [1, 2, 3, 4], "n": {}}, {"rows": ["own", "more"]}
    manifest = manifest_of(own) + manifest_of(shared, invoke=SHARED_INVOKE)
    last: list[Delta] = [Append(path=("rows",), items=[4])]
    final = Final(attempt=1, seq=4, status="finished", deltas=[(SHARED_INVOKE, 0, last)], manifest=manifest)
    fold = folded(*events, final)
    fold.verify()
    assert fold.state() == {(0, 0): own, (SHARED_INVOKE, 0): shared}
    # From a snapshot on, as an engine takes it.
    plain = Fold()
    for event in events[:2]:
        plain.apply(decode_plain(encode(event)))
    resumed = Fold()
    resumed.resume(decode_snapshot(encode(plain.snapshot())))
    for event in (*events[2:], final):
        resumed.apply(decode_event(encode(event)))
    resumed.verify()
    assert resumed.state() == fold.state()
    with pytest.raises(DigestMismatch, match=r"-1\.0\.rows"):
        folded(*events, Final(attempt=1, seq=4, status="finished", manifest=manifest)).verify()
    # Another attempt begins with none of it.
    again = folded(*events, Restarted(attempt=2, seq=0), gain(1, [Set(path=("rows",), value=[9])], attempt=2))
    assert again.state() == {(SHARED_INVOKE, 0): {"rows": [9]}}


def test_messages_fold_and_the_final_s_are_the_last_word() -> None:
    fold = Fold()
    deltas = [
        MessageDelta(reasoning="hm"),
        MessageDelta(content="Let me", tool_calls=[ToolCallDelta(index=0, id="a", name="add", arguments="{")]),
        MessageDelta(tool_calls=[ToolCallDelta(index=0, arguments=" }"), ToolCallDelta(index=1, id="b", name="say")]),
    ]
    for seq, delta in enumerate(deltas):
        fold.apply(DecodedOutput(attempt=1, seq=seq, index=seq, token_ids=[seq], message=delta))
    calls = [ToolCall(id="a", name="add", arguments="{ }"), ToolCall(id="b", name="say")]
    wanted = ChatMessage(content="Let me", reasoning="hm", tool_calls=calls)
    assert fold.choices[0, 0].message == wanted
    again = Fold()
    again.resume(decode_snapshot(encode(fold.snapshot())))
    copied = again.copy()
    assert copied.choices[0, 0].message == wanted
    whole = ChatMessage(content="Let me", reasoning="hm", tool_calls=[ToolCall(id="a", name="add", arguments="{}")])
    again.apply(Final(attempt=1, seq=3, status="finished", messages=[(0, 0, whole)]))
    assert (again.choices[0, 0].message, copied.choices[0, 0].message) == (whole, wanted)


def test_a_tool_call_out_of_turn_is_refused() -> None:
    with pytest.raises(FoldError, match="0 tool calls got more of number 1"):
        extended(None, MessageDelta(tool_calls=[ToolCallDelta(index=1)]))


def test_without_contents_a_fold_knows_how_far_the_trace_is() -> None:
    saves = {"kept": [1.0]}
    events: list[Event] = [
        output(0, Set(path=("kept",), value=[1.0])),
        output(1, finish_reason="length", stop_reason="x"),
        Final(1, 2, status="finished", usage=Usage(1, 2), manifest=manifest_of(saves)),
    ]
    fold = Fold(contents=False)
    for event in events[:2]:
        fold.apply(event)
    state = fold.choices[0, 0]
    assert (state.token_ids, state.saves, state.finish_reason, state.stop_reason) == ([], {}, "length", "x")
    assert (fold.attempt, fold.seq, fold.finished) == (1, 1, False)
    with pytest.raises(FoldError, match="does not follow"):
        fold.apply(output(3))
    fold.apply(events[2])
    fold.verify()
    assert (fold.status, fold.usage) == ("finished", Usage(1, 2))
    assert folded(*events).choices[0, 0].saves == saves
    # Nor does it take them from a snapshot.
    whole = Fold(verifying=True)
    for event in (output(0, Set(path=("kept",), value=[1.0])), output(1, finish_reason="stop")):
        whole.apply(decode_plain(encode(event)))
    resumed = Fold(contents=False)
    resumed.resume(decode_snapshot(encode(whole.snapshot())))
    held = resumed.choices[0, 0]
    assert (resumed.seq, held.token_ids, held.saves, held.finish_reason) == (1, [], {}, "stop")
