"""The engine's own autoencoders are read when it starts, and what is wrong is said then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.later_plans import autoencoder
from tracewire_engine.launch.sae_options import check_room, described
from tracewire_engine.protocol.autoencoder_parts import size_in_bytes


def test_they_are_described_by_name(tmp_path: Path) -> None:
    autoencoder("topk", model="m").save(tmp_path)
    found = described([("calm", str(tmp_path))])
    assert (found["calm"].architecture, found["calm"].k, found["calm"].model) == ("topk", 5, "m")


def test_a_wrong_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--sae calm=.*cfg\.json"):
        described([("calm", str(tmp_path))])
    autoencoder("relu").save(tmp_path)
    with pytest.raises(ValueError, match="two of this name"):
        described([("calm", str(tmp_path))] * 2)


def test_one_that_has_no_room_anywhere_is_refused() -> None:
    known = {"calm": autoencoder("relu").description}
    size = size_in_bytes(known["calm"])
    check_room(known, 1, size, 0)
    check_room(known, 1, 0, size)
    # Half of it is enough for each of two ranks that split it: by themselves, or as they are told.
    half = size_in_bytes(known["calm"], 1, 2)
    check_room(known, 2, half, 0)
    check_room(known, 2, 0, half, 0)
    with pytest.raises(ValueError, match=rf"^--sae calm: .* takes {size} bytes; expected at most {size - 1} \(--sae-b"):
        check_room(known, 1, size - 1, 7)
    with pytest.raises(ValueError, match=f"takes {half} bytes on each of 2 ranks, which split it; expected at most 9 "):
        check_room(known, 2, 9, 7)
    with pytest.raises(ValueError, match=f"takes {size} bytes on each of 2 ranks; expected at most 9 "):
        check_room(known, 2, 9, 7, size)
