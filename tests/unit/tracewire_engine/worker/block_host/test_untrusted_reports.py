"""What a host may report, and what none reports that runs its own code."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.wire.messages import Append, Delete, Set
from tracewire_engine.protocol.block_host import MOST_RECORDS, Broken, Chunk, Ready, Report, Reported, Saved
from tracewire_engine.protocol.messages import FinishRecord, StepRecord
from tracewire_engine.worker.block_host.untrusted_reports import UntrustedReport, UntrustedReports, values_in

BLOB = "0123456789abcdef"


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def step(deltas: msgspec.Raw, index: int = 0, ended: str = "") -> Reported:
    return Reported([StepRecord("r", 0, index, deltas, ended)])


def test_what_hosts_report_passes() -> None:
    reports = UntrustedReports(0)
    deltas = raw([Set(("a",), []), Append(("a",), [1, 2]), Delete(("b", 3))])
    reports.check(Ready([]), 0)
    reports.check(step(deltas, ended="stop"), 1)
    reports.check(Reported([], [FinishRecord("r", 0, deltas)]), 2)
    for number in range(500):
        reports.check(Chunk("r", BLOB, number, bytes(CHUNK_BYTES)), 2)
    broken = Broken("x" * 100_000)
    reports.check(broken, 2)
    assert len(broken.message) == 10_000


@pytest.mark.parametrize(
    "report",
    [
        step(raw([]), index=-1),
        step(raw([]), index=1 << 40),
        step(raw([]), ended="oddly"),
        step(raw(5)),
        step(raw([5])),
        step(raw([["x", ["a"], 1]])),
        step(raw([["a", [], [1]]])),
        step(raw([["a", ["a"], 5]])),
        step(raw([["s", ["a"]]])),
        Reported([], [FinishRecord("r", 0, raw([None]))]),
        Ready(["x"] * 100),
        Ready(["x" * 100_000]),
        Chunk("r", "../../other", 0, b""),
        Chunk("r", BLOB, -1, b""),
        Chunk("r", BLOB, 0, bytes(CHUNK_BYTES + 1)),
    ],
)
def test_what_no_host_reports_is_refused(report: Report) -> None:
    with pytest.raises((UntrustedReport, msgspec.DecodeError)):
        UntrustedReports(0).check(report, 1)


def appended(content: bytes, name: str = "kept") -> bytes:
    """The deltas of a step that appends one array."""
    return msgspec.msgpack.encode([Append((name,), [msgspec.msgpack.Ext(1, content)])])


@pytest.mark.parametrize("size", [1, 4, 100, 300, 70_000])
def test_arrays_that_differ_in_their_content_pass(size: int) -> None:
    reports = UntrustedReports(0)
    for turn in range(5):
        reports.check(step(msgspec.Raw(appended(bytes([turn]) * size)), index=turn), turn + 1)


def test_what_is_like_a_checked_report_but_for_its_head_is_checked() -> None:
    good = appended(b"abcdefgh" * 4)
    # One byte is another; what is refused then is refused as by a checker that has seen nothing.
    for place in range(len(good)):
        for value in (0x00, 0x90, 0x91, 0xC1, 0xC4, 0xC7, 0xDC, 0xFF):
            changed = msgspec.Raw(good[:place] + bytes([value]) + good[place + 1 :])
            known, fresh = UntrustedReports(0), UntrustedReports(0)
            known.check(step(msgspec.Raw(good)), 1)
            outcomes = []
            for reports in (known, fresh):
                try:
                    reports.check(step(changed), 2)
                    outcomes.append("passes")
                except (UntrustedReport, msgspec.DecodeError, UnicodeDecodeError):
                    outcomes.append("refused")
            assert outcomes[0] == outcomes[1], (place, value)


def test_what_follows_the_items_of_a_report_is_checked_each_time() -> None:
    reports = UntrustedReports(0)
    more = b"\x91\x94\xa1a\x91\xa1n\x91\xc4\x01x"
    reports.check(step(msgspec.Raw(more + b"\x91\xc4\x01x")), 1)
    with pytest.raises(msgspec.DecodeError):
        reports.check(step(msgspec.Raw(more + b"\x91\xc4\x02x")), 2)


@pytest.mark.parametrize(("length", "kept"), [(10, 1), (100_000, 0)])
def test_what_is_remembered_of_reports_is_short(length: int, kept: int) -> None:
    """A host may name a path of any length."""
    reports = UntrustedReports(0)
    reports.check(step(raw([Append(("a" * length,), [msgspec.msgpack.Ext(1, bytes(100))])])), 1)
    assert len(reports._heads) == kept


def test_more_reports_than_turns_and_ends_are_refused() -> None:
    reports = UntrustedReports(0)
    reports.check(Reported(), 1)
    reports.ends = 1
    reports.check(Reported(), 1)
    with pytest.raises(UntrustedReport, match="3 reports of 1 turns and 1 ends"):
        reports.check(Reported(), 1)
    reports.check(Ready(), 1)
    with pytest.raises(UntrustedReport):
        reports.check(Ready(), 1)


def test_many_small_pieces_of_large_arrays_are_refused() -> None:
    for large, allowed in ((1000, True), (0, False)):
        reports = UntrustedReports(large)

        def flood(reports: UntrustedReports = reports) -> None:
            for _ in range(200):
                reports.check(Chunk("r", BLOB, 0, bytes(1001)), 1)

        if allowed:
            flood()
        else:
            with pytest.raises(UntrustedReport, match="pieces of large arrays"):
                flood()


def test_a_report_of_very_many_records_is_not_decoded() -> None:
    one = StepRecord("r", 0, 0, raw([]))
    encoded = msgspec.msgpack.encode(Reported([one] * (MOST_RECORDS + 1)))
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(encoded, type=Report)


@pytest.mark.parametrize("deltas", [[["d", ["a"]]] * ((1 << 20) + 1), [["d", ["a"] * 129]]])
def test_a_step_has_so_many_changes_and_a_path_so_many_keys_at_most(deltas: Any) -> None:
    with pytest.raises(msgspec.DecodeError, match="Expected `array` of length <="):
        UntrustedReports(0).check(step(raw(deltas)), 1)


def test_saves_are_checked_as_reports_are_and_come_once_a_turn() -> None:
    reports = UntrustedReports(0)
    reports.check_saved(Saved(step(raw([Set(("a",), [])])).steps), 1)
    for odd in (step(raw([]), index=-1), step(raw([5])), step(raw([]), ended="oddly")):
        with pytest.raises((UntrustedReport, msgspec.DecodeError)):
            UntrustedReports(0).check_saved(Saved(odd.steps), 1)
    with pytest.raises(UntrustedReport, match="2 messages of saves, where 1 were allowed"):
        reports.check_saved(Saved([]), 1)


def nested(depth: int, value: Any = 1) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [1, 64, 200, 300, 600, 900])
def test_saves_nest_no_deeper_than_every_reader_can_decode(depth: int) -> None:
    """Although this process could decode them at each depth."""
    reports, deltas = UntrustedReports(0), raw([["s", ["a"], nested(depth)]])
    for check in (
        lambda: reports.check(step(deltas), 1),
        lambda: reports.check_saved(Saved([StepRecord("r", 0, 0, deltas)]), 2),
        lambda: reports.check(Reported([], [FinishRecord("r", 0, deltas)]), 3),
    ):
        if depth <= 200:
            check()
            continue
        with pytest.raises(UntrustedReport, match="more than 256 containers in each other"):
            check()


VALUES: list[Any] = [
    *(None, True, 0, 127, 128, 1 << 10, 1 << 20, 1 << 40, -1, -32, -33, -(1 << 10), -(1 << 20), -(1 << 40), 0.5),
    *("", "a" * 31, "a" * 32, "a" * 300, "a" * 70_000, b"", b"a" * 300, b"a" * 70_000),
    *(msgspec.msgpack.Ext(1, bytes(size)) for size in (0, 1, 2, 3, 4, 8, 16, 300, 70_000)),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_depth_is_counted_behind_values_of_all_forms(value: Any) -> None:
    for shape, depth in (
        ([value, nested(3)], 4),
        ([value] * 20 + [nested(5)], 6),
        ({"a": value, "b": {"c": [value, {}]}}, 4),
        ({str(number): value for number in range(20)} | {"b": nested(2)}, 3),
        ([[value] * 70_000, nested(2)], 3),
    ):
        data = memoryview(msgspec.msgpack.encode(shape))
        values_in(data, depth)
        with pytest.raises(UntrustedReport, match=f"more than {depth - 1} containers in each other"):
            values_in(data, depth - 1)


def test_values_are_counted_but_for_long_lists_of_numbers() -> None:
    for value, count in (
        ([1, "a", [2, 3], {"b": None}], 9),
        ([0.5] * 16, 17),
        ([0.5] * 5000, 1),
        ([[0.5] * 5000, [0.5] * 20 + [1]], 24),
        ([*[0.5] * 17, nested(3)], 22),
    ):
        assert values_in(memoryview(msgspec.msgpack.encode(value)), 9) == count
    assert values_in(memoryview(msgspec.msgpack.encode([1] * (5 << 20))), 9) == (1 << 22) + 1
    assert values_in(memoryview(msgspec.msgpack.encode([1] * 100)), 9, 50) == 51
    reports, many = UntrustedReports(0), raw([["s", ["a"], [1] * (3 << 20)]])
    reports.check_saved(Saved([StepRecord("r", 0, 0, many)]), 1)
    with pytest.raises(UntrustedReport, match="values in one message"):
        reports.check_saved(Saved([StepRecord("r", 0, index, many) for index in (1, 2)]), 2)


def test_an_end_has_so_many_names_and_changes_at_most() -> None:
    reports, nothing = UntrustedReports(0), raw([])
    finish = FinishRecord("r", 0, nothing, warnings=["w" * 100_000] * 100, hosted=False)
    reports.check(Reported([], [finish]), 1)
    assert [len(one) for one in finish.warnings] == [10_000] * 32
    # Whatever the host says of it.
    assert finish.hosted
    many = {str(number): "e" for number in range((1 << 16) + 1)}
    with pytest.raises(UntrustedReport, match="65537 names of saves and errors"):
        reports.check(Reported([], [FinishRecord("r", 0, nothing, save_errors=many)]), 2)
    changes = raw([["d", ["a"]]] * (1 << 15))
    with pytest.raises(UntrustedReport, match=r"changes with .* values in one message"):
        reports.check(Reported([], [FinishRecord(name, 0, changes) for name in "rst"]), 3)
