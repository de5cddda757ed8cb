"""Interventions that several submissions have are decoded once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.vectors import encoded
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.codec import decode_submission, encode
from tracewire_bus.wire.messages import Invoke, LogitLens, Probe, Steer, Submission
from tracewire_engine.adapter import known_interventions
from tracewire_engine.adapter.known_interventions import KnownInterventions

VECTOR = np.arange(2048, dtype=np.float32)


def submission(trace: str = "t", **more: Any) -> bytes:
    reference = encoded(VECTOR)[0]
    interventions = [
        Steer("residual(0)", VECTOR[:8]),
        Probe("p", "residual(1)", weight=reference),
        LogitLens("l", "residual(2)"),
    ]
    given = Submission(trace, "demo", [Invoke(prompt="hello")], interventions=normalize(interventions))
    return encode(msgspec.structs.replace(given, **more))


def same(one: Submission, other: Submission) -> bool:
    """Whether two submissions are alike: arrays have no truth value."""
    return encode(normal(one)) == encode(normal(other))


def normal(one: Submission) -> Submission:
    return msgspec.structs.replace(one, interventions=normalize(one.interventions))


def test_a_submission_is_what_it_is_without() -> None:
    known = KnownInterventions()
    for data in (
        submission(),
        submission("u", live=b"\x81\xa1a\x01", priority=3, deadline_s=2.5, library={"a": "b"}),
        memoryview(submission("v")),
        submission(interventions=[]),
        encode(Submission("w", "demo", [])),
    ):
        (found, _), wanted = known.decode(data), decode_submission(data)
        assert same(found, wanted)
        assert type(found) is Submission


def test_the_same_interventions_are_decoded_once() -> None:
    known = KnownInterventions()
    (first, as_sent), (second, _) = known.decode(submission()), known.decode(submission("u", priority=7))
    assert first.interventions is second.interventions
    assert as_sent in submission()
    assert known.decode(encode(Submission("w", "demo", [])))[1] == msgspec.msgpack.encode([])
    assert [one["do"] for one in msgspec.msgpack.decode(as_sent)] == ["steer", "probe", "logit_lens"]
    assert (first.trace, second.trace, second.priority) == ("t", "u", 7)
    other, _ = known.decode(submission(interventions=normalize([Steer("residual(0)", VECTOR[:9])])))
    assert len(other.interventions) == 1
    assert known.decode(submission())[0].interventions is first.interventions


@pytest.mark.parametrize(
    "data",
    [
        submission(interventions=[{"do": "Steer", "at": 5}]),
        submission(interventions=[{"do": "nothing"}]),
        submission(interventions=[msgspec.msgpack.Ext(1, b"short")]),
        submission(interventions="none"),
        submission(priority="high"),
        submission()[:-4],
        b"",
    ],
)
def test_an_error_names_the_field_within_the_submission(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError) as wanted:
        decode_submission(data)
    with pytest.raises(msgspec.DecodeError) as found:
        KnownInterventions().decode(data)
    assert str(found.value) == str(wanted.value)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_interventions, "_MOST", 2)
    monkeypatch.setattr(known_interventions, "_LONGEST", 200)
    known = KnownInterventions()
    lists = [submission(interventions=normalize([Probe(name, "residual(1)")])) for name in "abc"]
    first = known.decode(lists[0])[0].interventions
    known.decode(lists[1])
    assert known.decode(lists[0])[0].interventions is first
    known.decode(lists[2])
    assert known.decode(lists[0])[0].interventions is first
    assert known.decode(lists[1])[0].interventions is not known.decode(lists[0])[0].interventions
    long = submission(interventions=normalize([Steer("residual(0)", VECTOR[:100])]))
    assert known.decode(long)[0].interventions is not known.decode(long)[0].interventions
    assert len(known._kept) == 2
    monkeypatch.setattr(known_interventions, "_MOST_BYTES", known._bytes - 1)
    known.decode(lists[2])
    assert len(known._kept) == 1
    assert known._bytes == sum(map(len, known._kept))
