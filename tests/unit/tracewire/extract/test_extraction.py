"""`client.extract` on a scripted engine, whose activations tell two kinds of prompts apart at one layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client, Probe, Steer, TraceRejected

Engine = Callable[..., Any]

#: Prompts of capital letters are the positive kind.
POSITIVE = [letter * 5 for letter in "ABCDEFGH"]
NEGATIVE = [letter * 5 for letter in "abcdefgh"]
WIDTH, LAYERS, KIND_LAYER, AXIS = 8, 4, 2, 3


def activations(prompt: str) -> np.ndarray[Any, Any]:
    """At each position noise, and after layer 2 a number for the kind, which grows with the position."""
    values = np.random.default_rng(sum(prompt.encode())).standard_normal((len(prompt), LAYERS, WIDTH))
    sign = 1 if prompt.isupper() else -1
    values[:, KIND_LAYER, AXIS] = sign * (10 + np.arange(len(prompt)))
    return values.astype(np.float32)


async def reads(stage: Stage) -> None:
    """A script that plays `Probe("activations", ...)` of the residual stream after all layers, or after one."""
    prompt = stage.submission.invokes[0].prompt or ""
    ids = [ord(character) for character in prompt]
    await stage.accept(prompt_token_ids=[ids], prompt_token_strings=[list(prompt)])
    probe = stage.submission.interventions[0]
    values = activations(prompt)
    values = values if "*" in probe.at else values[:, KIND_LAYER]
    await stage.save("!", {probe.name: values[-1] if probe.positions == "last" else values}, token_strings=["!"])
    await stage.final()


async def test_the_layer_that_tells_the_kinds_apart_is_found(client: Client, engine: Engine, tmp_path: Path) -> None:
    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        found = await client.extract("tiny", POSITIVE, NEGATIVE, folds=4, to=str(tmp_path / "acts"))
        again = await client.extract("tiny", POSITIVE, NEGATIVE, folds=4, to=str(tmp_path / "acts"))
    assert (found.model, found.at, found.layer) == ("tiny", "residual(2)", 2)
    assert found.vector[AXIS] > 0.95
    # Of the last of five tokens.
    assert found.direction.distance == pytest.approx(28, rel=0.05)
    assert found.score.auroc == found.score.accuracy == 1
    assert [one.layer for one in found.scores] == [0, 1, 2, 3]
    assert all(one.auroc < 1 or one.separation < found.score.separation for one in found.scores if one.layer != 2)
    assert (again.vector == found.vector).all()
    assert "residual(2)" in repr(found)
    assert found._repr_svg_().startswith("<svg")
    assert found.provenance["prompts"] == {"positive": 8, "negative": 8}
    steer, probe = found.steer(3.0), found.probe("kind")
    assert (type(steer), steer.at, steer.scale) == (Steer, "residual(2)", 3.0)
    assert (type(probe), probe.at, probe.bias) == (Probe, "residual(2)", -found.direction.threshold)


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({"token": "mean"}, 24),
        ({"token": "mean", "positions": slice(1, 3)}, 23),
        ({"token": "last", "positions": slice(0, 2)}, 22),
        ({"at": "residual(2)"}, 28),
        ({"layer": 2, "method": "principal_components"}, 28),
    ],
)
async def test_the_tokens_that_are_asked_for_are_read(
    client: Client, engine: Engine, options: dict[str, Any], distance: float
) -> None:
    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        found = await client.extract("tiny", POSITIVE, NEGATIVE, folds=2, **options)
    assert found.layer == 2
    assert found.direction.distance == pytest.approx(distance, rel=0.05)


async def test_no_more_of_a_prompt_is_kept_than_is_asked_for(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt's last row alone, not a view of all of its rows."""
    bases: list[Any] = []
    stack = np.stack

    def recorded(arrays: Any, *arguments: Any, **options: Any) -> Any:
        bases.extend(one.base for one in arrays)
        return stack(arrays, *arguments, **options)

    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        monkeypatch.setattr(np, "stack", recorded)
        await client.extract("tiny", POSITIVE, NEGATIVE, folds=4, positions=slice(0, 5))
    assert len(bases) >= 16
    assert set(map(type, bases)) == {type(None)}


async def test_a_direction_becomes_an_entry_of_the_library(client: Client, engine: Engine) -> None:
    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        found = await client.extract("tiny", POSITIVE, NEGATIVE, method="logistic", folds=2)
    arrays, options = found.entry()
    entry = await client.library.put("kind", arrays, **options)
    assert (entry.kind, entry.model, entry.at) == ("vector", "tiny", "residual(2)")
    assert entry.provenance["method"] == "logistic"
    assert entry.effect["cross_validated"]["auroc"] == 1
    assert entry.settings["distance"] == pytest.approx(found.direction.distance)
    arrays, options = found.entry("probe")
    probe = await client.library.put("kind-probe", arrays, **options)
    assert sorted(probe.shapes) == ["bias", "weight"]
    with pytest.raises(ValueError, match="'vector' or 'probe'"):
        found.entry("subspace")


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [
        ((POSITIVE, NEGATIVE), {"method": "guess"}, "method"),
        ((POSITIVE, NEGATIVE), {"token": "first"}, "token"),
        ((POSITIVE, NEGATIVE), {"positions": 3}, "positions"),
        ((POSITIVE, NEGATIVE), {"at": "residual(9)"}, "at"),
        ((POSITIVE, NEGATIVE), {"at": "model.layers.*.mlp"}, "at"),
        ((POSITIVE, NEGATIVE), {"at": 3}, "at"),
        ((POSITIVE, NEGATIVE), {"layer": 9}, "layer"),
        ((POSITIVE[:3], NEGATIVE), {}, "positive"),
        ((POSITIVE, "text"), {}, "negative"),
        ((POSITIVE, NEGATIVE), {"folds": 1}, "positive"),
        ((POSITIVE, NEGATIVE), {"harvest": {"key": "id"}}, "harvest.key"),
    ],
)
async def test_what_cannot_be_extracted(
    client: Client, engine: Engine, given: tuple[Any, Any], options: dict[str, Any], field: str
) -> None:
    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        with pytest.raises(TraceRejected) as refused:
            await client.extract("tiny", *given, **options)
    assert refused.value.field == field


async def test_an_unknown_option_is_named(client: Client) -> None:
    with pytest.raises(tracewire.UnknownOption, match="layer"):
        await client.extract("tiny", POSITIVE, NEGATIVE, layers=3)  # type: ignore[call-arg]


async def test_a_prompt_without_such_a_token_is_named(client: Client, engine: Engine) -> None:
    async with engine(reads):
        await client.models.get("tiny", timeout=30)
        with pytest.raises(TraceRejected, match="has no token at these positions"):
            await client.extract("tiny", POSITIVE, NEGATIVE, positions=slice(50, 60), folds=2)
