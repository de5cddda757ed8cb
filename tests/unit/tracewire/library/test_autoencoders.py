"""Sparse autoencoders go into the library and come out of it with the same activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire import Client, InvalidEntry, LibraryEntry, SparseAutoencoder
from tracewire.library.autoencoders import made

RANDOM = np.random.default_rng(0)
ENCODER, DECODER = RANDOM.standard_normal((16, 8)), RANDOM.standard_normal((16, 8))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"architecture": "topk", "k": 4, "centered": True},
        {"architecture": "jumprelu", "threshold": np.full(16, 0.5)},
        {"architecture": "gated", "gate": np.full(16, 0.1), "scale": np.full(16, 1.5)},
    ],
)
async def test_what_is_put_has_the_same_activations(client: Client, more: dict[str, Any]) -> None:
    sae = SparseAutoencoder(
        ENCODER, DECODER, np.full(16, 0.25), np.full(8, -0.5), model="tiny", at="residual(2)", **more
    )
    entry = await client.library.put("sae", sae, licence="MIT")
    assert (entry.kind, entry.model, entry.at, entry.licence) == ("autoencoder", "tiny", "residual(2)", "MIT")
    found = await client.library.autoencoder("sae")
    assert found.description == sae.description
    values = RANDOM.standard_normal((5, 8))
    assert found.encode(values) == pytest.approx(sae.encode(values), abs=1e-5)
    assert found.decode(sae.encode(values)) == pytest.approx(sae.decode(sae.encode(values)), abs=1e-5)


async def test_what_is_no_autoencoder_makes_none(client: Client) -> None:
    await client.library.put("calm", np.ones(8))
    with pytest.raises(InvalidEntry, match="expected an autoencoder, got a vector"):
        await client.library.autoencoder("calm")


def test_settings_that_are_not_supported_are_named() -> None:
    entry = LibraryEntry("sae@1", "", "sae", 1, kind="autoencoder", settings={"architecture": "crosscoder"})
    arrays = {"W_enc": np.float32(ENCODER.T), "W_dec": np.float32(DECODER)}
    with pytest.raises(InvalidEntry, match="crosscoder") as refused:
        made(entry, arrays)
    assert refused.value.field == "settings"
