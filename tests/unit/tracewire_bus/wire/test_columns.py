"""Records of columns: raw values of several names, and the layout that says which bytes are whose."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tracewire_bus.domain.fold import DigestMismatch, Fold, FoldError
from tracewire_bus.wire.codec import decode_event, decode_snapshot, encode
from tracewire_bus.wire.columns import NUMBER, Column, ColumnPart, encode_layout, layout_of, record_digest
from tracewire_bus.wire.digests import list_digest
from tracewire_bus.wire.messages import (
    Append,
    Columns,
    ColumnsManifest,
    DecodedOutput,
    Final,
    Manifest,
    Set,
    Snapshot,
)


def part(dtype: str, *shape: int, key: str = "") -> ColumnPart:
    return ColumnPart(key, dtype, shape)


COLUMNS = (
    Column("hidden", (part("bfloat16", 2, 3),)),
    Column("score", (part(NUMBER),)),
    Column("top", (part("int32", 2, key="token_ids"), part("float32", 2, key="logits"))),
    Column("none", (part("float32", 0, 4),)),
)
LAYOUT = encode_layout(COLUMNS)
VALUES = memoryview(
    np.arange(6, dtype=np.uint16).tobytes()
    + np.float32(0.5).tobytes()
    + np.array([7, 8], np.int32).tobytes()
    + np.array([1.5, 2.5], np.float32).tobytes()
)


def test_a_layout_says_which_bytes_are_whose() -> None:
    layout = layout_of(LAYOUT)
    assert layout.names == ("hidden", "score", "top", "none")
    assert layout.nbytes == len(VALUES) == 32
    items = dict(layout.items(VALUES))
    assert (items["hidden"].dtype.name, items["hidden"].shape) == ("bfloat16", (2, 3))
    assert items["hidden"].tobytes() == bytes(VALUES[:12])
    assert items["score"] == 0.5
    assert {key: value.tolist() for key, value in items["top"].items()} == {"token_ids": [7, 8], "logits": [1.5, 2.5]}
    assert items["none"].shape == (0, 4)
    assert not items["hidden"].flags.writeable
    assert [name for name, _ in layout.items(VALUES, {"score"})] == ["score"]


def test_some_of_the_names_can_be_cut_out() -> None:
    encoded, values = layout_of(LAYOUT).cut(VALUES, {"top", "score"})
    items = dict(layout_of(encoded).items(values))
    assert sorted(items) == ["score", "top"]
    assert items["top"]["logits"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ([Column("a", (part("float32", 1),))] * 2, "twice"),
        ([Column("a", (part("object", 1),))], "dtype"),
        ([Column("a", (part("float32", -1),))], "shape"),
        ([Column("a", (part("float32", *[1] * 33),))], "shape"),
        ([Column("a", ())], "no part"),
    ],
)
def test_a_layout_of_nothing_that_can_be_is_refused(columns: list[Column], says: str) -> None:
    encoded = encode_layout(columns)
    with pytest.raises(ValueError, match=says):
        layout_of(encoded)
    with pytest.raises(FoldError, match=says):
        fold_of(Columns(encoded, VALUES))
    data = encode(DecodedOutput(attempt=1, seq=0, token_ids=[0], deltas=[[Columns(encoded, VALUES)]]))
    with pytest.raises(FoldError, match=says):
        Fold().apply(decode_event(data))


@pytest.mark.parametrize("layout", [b"", b"\xc1", b"\x80", b"\x91\x91\xa1a", b"\x91\x92\xa1a\x91\x93\x01\x02\x03"])
def test_bytes_that_are_no_layout_are_refused(layout: bytes) -> None:
    with pytest.raises(ValueError):
        layout_of(layout)


def fold_of(*records: Columns, names: list[str] | None = None) -> Fold:
    """A fold of one record a token."""
    fold = Fold(names)
    for index, record in enumerate(records):
        fold.apply(DecodedOutput(attempt=1, seq=index, index=index, token_ids=[0], deltas=[[record]]))
    return fold


def ended(fold: Fold, *digests: bytes) -> Fold:
    """The fold after a final whose manifest covers records of these digests."""
    fold.apply(
        Final(
            attempt=1,
            seq=fold.seq + 1,
            status="finished",
            manifest=[Manifest(0, 0, column.name, "list", len(digests), b"") for column in COLUMNS],
            columns=[ColumnsManifest(0, 0, len(digests), list_digest(digests))],
        )
    )
    return fold


RECORD = Columns(LAYOUT, VALUES)
DIGEST = record_digest(LAYOUT, VALUES)


@pytest.mark.parametrize("names", [None, ["score"], ["score", "top", "elsewhere"], []])
def test_a_fold_holds_the_columns_that_it_wants_and_verifies_them(names: list[str] | None) -> None:
    fold = fold_of(RECORD, RECORD, names=names)
    saves = fold.choices[0, 0].saves
    wanted = {column.name for column in COLUMNS}
    assert set(saves) == (wanted if names is None else wanted & set(names))
    assert all(len(items) == 2 for items in saves.values())
    # What is added later is there, too.
    fold.apply(DecodedOutput(attempt=1, seq=2, index=2, token_ids=[0], deltas=[[RECORD]]))
    assert all(len(items) == 3 for items in fold.choices[0, 0].saves.values())
    ended(fold, DIGEST, DIGEST, DIGEST).verify()


@pytest.mark.parametrize("names", [None, ["top"]])
@pytest.mark.parametrize("digests", [[DIGEST], [DIGEST, b"\0" * 16], [DIGEST] * 3])
def test_a_record_that_is_missing_or_another_is_found(digests: list[bytes], names: list[str] | None) -> None:
    with pytest.raises(DigestMismatch) as raised:
        ended(fold_of(RECORD, RECORD, names=names), *digests).verify()
    assert raised.value.names == [f"0.0.{name}" for name in names or ["hidden", "none", "score", "top"]]


def test_a_record_of_another_size_than_its_layout_says_is_refused() -> None:
    with pytest.raises(FoldError, match="takes 32 bytes, got 31"):
        fold_of(Columns(LAYOUT, VALUES[1:]))


def test_a_name_comes_by_columns_or_otherwise() -> None:
    fold = fold_of(RECORD)
    with pytest.raises(FoldError, match="records of columns"):
        delta = Append(path=("score",), items=[1.0])
        fold.apply(DecodedOutput(attempt=1, seq=1, index=1, token_ids=[0], deltas=[[delta]]))
    fold = Fold()
    fold.apply(DecodedOutput(attempt=1, seq=0, token_ids=[0], deltas=[[Set(path=("score",), value=[])]]))
    with pytest.raises(FoldError, match=r"\['score'\]"):
        fold.apply(DecodedOutput(attempt=1, seq=1, index=1, token_ids=[0], deltas=[[RECORD]]))


def test_a_snapshot_has_the_records() -> None:
    fold = fold_of(RECORD, RECORD)
    snapshot: Snapshot = decode_snapshot(encode(fold.snapshot()))
    for names in (None, ["score"]):
        other = Fold(names)
        other.resume(snapshot)
        other.apply(DecodedOutput(attempt=1, seq=2, index=2, token_ids=[0], deltas=[[RECORD]]))
        assert other.choices[0, 0].saves["score"] == [0.5, 0.5, 0.5]
        ended(other, DIGEST, DIGEST, DIGEST).verify()


def test_a_copy_goes_on_by_itself() -> None:
    fold = fold_of(RECORD)
    assert fold.choices[0, 0].saves["score"] == [0.5]
    copy = fold.copy()
    fold.apply(DecodedOutput(attempt=1, seq=1, index=1, token_ids=[0], deltas=[[RECORD]]))
    assert copy.choices[0, 0].saves["score"] == [0.5]
    assert fold.choices[0, 0].saves["score"] == [0.5, 0.5]
    ended(copy, DIGEST).verify()
    ended(fold, DIGEST, DIGEST).verify()


def test_a_record_travels_without_a_copy_of_its_values() -> None:
    data = encode(DecodedOutput(attempt=1, seq=0, token_ids=[0], deltas=[[RECORD]]))
    event = decode_event(data)
    assert isinstance(event, DecodedOutput)
    ((delta,),) = event.deltas
    assert isinstance(delta, Columns)
    assert delta.values.obj is data
    assert msgspec.msgpack.decode(data)[-3][0][0][0] == "c"
