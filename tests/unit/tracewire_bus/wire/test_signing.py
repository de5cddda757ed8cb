"""A signature stands in front of its content, and covers all that says what the content is for."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.messages import Final, Invoke, Submission
from tracewire_bus.wire.signing import (
    MOST_AT_ONCE,
    Envelope,
    decode_envelope,
    encode_envelope,
    is_among,
    joint_digests,
    joint_text,
    signed_text,
    unwrap,
    with_signature,
    without_signature,
    wrap,
)

TEXTS = [signed_text("submit", "tw", "m", f"t{number}", Envelope("a", 1, b""), b"") for number in range(3)]
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
    with pytest.raises(ValueError, match="at most 1536 bytes"):
        decode_envelope(b"\x95" + b"\xd9\xff" * 800)


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


def test_a_signature_of_several_messages_covers_these_and_no_other() -> None:
    digests = joint_digests(TEXTS[:2])
    assert is_among(TEXTS[0], digests)
    assert is_among(TEXTS[1], digests)
    assert not is_among(TEXTS[2], digests)
    # It is never what a signature of one message is of.
    assert joint_text(digests)[0] != TEXTS[0][0]
    assert joint_text(digests) != joint_text(digests[::-1])
    # No digests have nothing, nor do digests that lie across two others, cut ones and too many.
    assert not is_among(TEXTS[0], b"")
    assert not is_among(TEXTS[0], b"x" * 16 + digests + b"x" * 16)
    assert not is_among(TEXTS[0], digests[:-1])
    assert not is_among(TEXTS[0], digests * MOST_AT_ONCE)


def test_a_final_is_found_without_its_signature() -> None:
    final = encode(Final(attempt=1, seq=0, status="finished"))
    for signature in (b"s" * 64, b"s" * 64 + joint_digests(TEXTS), b"s" * 300):
        signed = with_signature(final, signature)
        decoded = decode_event(signed)
        assert isinstance(decoded, Final)
        assert decoded.signature == signature
        assert without_signature(signed, signature) == final
        assert without_signature(signed, signature[1:]) is None
    assert without_signature(final, b"") is None


def test_a_final_with_fields_of_a_later_version_is_found_without_its_signature() -> None:
    """They stand behind the signature. Bytes that repeat the signature make nothing of it."""
    final = encode(Final(attempt=1, seq=0, status="finished"))
    signature = b"s" * 64
    assert without_signature(with_signature(final, signature) + b"\x07", signature) == final + b"\x07"
    assert without_signature(with_signature(final, signature) * 2 + b"\x07", signature) is None
