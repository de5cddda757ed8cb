"""The engine's own autoencoders are read when it starts, and what is wrong is said then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.later_plans import autoencoder
from tracewire_engine.launch.sae_options import described


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
