"""A worker runs only the blocks that its own adapter has stamped."""

from __future__ import annotations

import pytest

from tracewire_engine.protocol.permits import CheckedPermits, NoPermit, Permits


def test_a_stamp_is_of_one_block_and_one_engine() -> None:
    ours = Permits(b"k" * 32)
    free, limited = ours.of(b"block", limited=False), ours.of(b"block", limited=True)
    assert not ours.check(b"block", free)
    assert ours.check(b"block", limited)
    # Nobody takes the limit off a stamp.
    for forged in (b"", free[:1] + limited[1:], free[:-1], Permits(b"o" * 32).of(b"block", limited=False)):
        with pytest.raises(NoPermit, match="--code"):
            ours.check(b"block", forged)
    with pytest.raises(NoPermit):
        ours.check(b"other", free)


def test_without_a_key_every_block_may_run() -> None:
    assert Permits(b"").of(b"block", limited=True) == b""
    assert not Permits(b"").check(b"block", b"")


def test_a_process_without_the_key_takes_stamps_at_their_word() -> None:
    permits = Permits(b"key")
    assert CheckedPermits().check(b"block", permits.of(b"block", limited=True))
    assert not CheckedPermits().check(b"block", permits.of(b"block", limited=False))
    assert not CheckedPermits().check(b"block", b"")
