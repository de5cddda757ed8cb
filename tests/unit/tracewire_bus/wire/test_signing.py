"""A signature stands in front of its content, and covers all that says what the content is for."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Invoke, Submission
from tracewire_bus.wire.signing import Envelope, decode_envelope, encode_envelope, signed_text, unwrap, wrap

ENVELOPE = Envelope("alice", 1000, b"n" * 16, b"s" * 64, "red")


def test_content_comes_back_from_behind_its_envelope() -> None:
    data = encode(Submission(trace="t", model="m", invokes=[Invoke(prompt="x")]))
    assert unwrap(wrap(ENVELOPE, data)) == (ENVELOPE, data)
    assert unwrap(data) == (None, data)
    assert unwrap(b"") == (None, b"")
    assert decode_envelope(encode_envelope(ENVELOPE)) == ENVELOPE


def test_what_is_no_envelope_is_refused() -> None:
    signed = wrap(ENVELOPE, b"content")
    for length in range(1, len(signed) - len(b"content")):
        with pytest.raises(ValueError):
            unwrap(signed[:length])
    with pytest.raises(ValueError, match="at most 512 bytes"):
        decode_envelope(b"\x95" + b"\xd9\xff" * 300)


def test_everything_that_a_signature_is_for_is_covered() -> None:
    usual = ("submit", "tw", "m", "t", ENVELOPE, b"content")
    texts = {signed_text(*usual)}  # type: ignore[arg-type]
    for index, other in enumerate(("edit", "tx", "n", "u")):
        texts.add(signed_text(*usual[:index], other, *usual[index + 1 :]))  # type: ignore[arg-type]
    for changed in (
        Envelope("bob", 1000, b"n" * 16, tenant="red"),
        Envelope("alice", 1001, b"n" * 16, tenant="red"),
        Envelope("alice", 1000, b"m" * 16, tenant="red"),
        Envelope("alice", 1000, b"n" * 16, tenant="blue"),
    ):
        texts.add(signed_text("submit", "tw", "m", "t", changed, b"content"))
    texts.add(signed_text("submit", "tw", "m", "t", ENVELOPE, b"other"))
    # Fields do not run into each other.
    texts.add(signed_text("submit", "twm", "", "t", ENVELOPE, b"content"))
    assert len(texts) == 11
