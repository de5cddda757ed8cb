"""Conditions, controllers, features, lenses and subspaces on the real engine: each equal to a block that does it."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracewire
from tests.e2e.tracing.test_declared import HIDDEN, V, W, close, run
from tests.support import ROOT
from tests.support.cells import run_page
from tests.support.engine_process import running_engine
from tracewire import (
    Client,
    Coordinates,
    Features,
    Hold,
    Lens,
    Live,
    LogitLens,
    Model,
    Probe,
    Project,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    TraceRejected,
    When,
)
from tracewire_bus.transport.embedded import EmbeddedServer

RNG = np.random.default_rng(11)
UNIT = V / np.linalg.norm(V)
FEATURES = 40


def autoencoder(**more: Any) -> SparseAutoencoder:
    encoder, decoder = RNG.standard_normal((2, FEATURES, HIDDEN)).astype(np.float32) / 16
    return SparseAutoencoder(encoder, decoder, RNG.standard_normal(FEATURES).astype(np.float32), **more)


SAE = autoencoder(architecture="topk", k=12)
E, D = SAE.packed[: 2 * FEATURES * HIDDEN].reshape(2, FEATURES, HIDDEN)
B = SAE.packed[-FEATURES:]


@pytest.fixture(scope="module")
async def served(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of the Redis of an engine with an autoencoder of its own, and room for two."""
    folder = tmp_path_factory.mktemp("sae")
    SAE.save(folder / "tiny")
    options = ["--sae", f"tiny={folder / 'tiny'}", "--sae-bytes", "200000", "--check-collect"]
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, folder, *options):
            yield server.url


@pytest.fixture
async def client(served: str) -> AsyncIterator[Client]:
    async with tracewire.connect(served) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    return await client.models.get("demo", timeout=30)


@tracewire.intervention
def conditional(model, tracer, live, v, u, above, release):
    scores = [].save()
    steered = [].save()
    after = [].save()
    held = False
    for _ in tracer.iter[:]:
        scores.append(float(model.residual(2).output[-1].float() @ u))
        held = scores[-1] > above or (held and scores[-1] > release)
        steered.append(held)
        if held:
            hidden = model.model.layers[4].output[0]
            hidden[-1] = (hidden[-1].float() + 3.0 * v).to(hidden.dtype)
        after.append(model.residual(4).output[-1].clone())


async def test_a_probe_decides_in_the_same_step_and_with_hysteresis(client: Client, model: Model) -> None:
    plain = await run(client, model, interventions=[Probe("score", "residual(2)", UNIT)], max_tokens=24)
    above, release = np.quantile(plain.saves["score"], [0.7, 0.3])
    block = await run(
        client, model, conditional(v=V, u=UNIT, above=float(above), release=float(release)), max_tokens=24
    )
    assert 0 < sum(block.saves["steered"]) < 24
    result = await run(
        client,
        model,
        interventions=[
            Probe("score", "residual(2)", UNIT),
            Steer("residual(4)", V, scale=3.0, when=When(probe="score", above=above, release=release)),
            Probe("after", "residual(4)"),
            Probe("seen", "residual(5)", UNIT, when=When(probe="score", above=above, release=release)),
        ],
        max_tokens=24,
    )
    assert result.token_ids == block.token_ids
    close(result.saves["score"], block.saves["scores"])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(result.saves["after"], block.saves["after"], strict=True))
    assert [not np.isnan(value) for value in result.saves["seen"]] == block.saves["steered"]


@tracewire.intervention
def at_tokens(model, tracer, live, v, pattern, start, stop, every, prompt):
    ids = [].save()
    after = [].save()
    index = 0
    ids.extend(prompt)
    for _ in tracer.iter[:]:
        hidden = model.model.layers[3].output[0]
        for held in (ids[-len(pattern) :] == pattern, start <= index < stop and (index - start) % every == 0):
            if held:
                hidden[-1] = (hidden[-1].float() + 4.0 * v).to(hidden.dtype)
        after.append(model.residual(3).output[-1].clone())
        ids.append(int(model.samples[-1]))
        index += 1


async def test_patterns_of_tokens_and_ranges_of_indices(client: Client, model: Model) -> None:
    prompt = [11, 5, 20, 7]
    plain = await run(client, model, prompt=prompt, max_tokens=16)
    pattern = plain.token_ids[3:5]
    options = {"start": 6, "stop": 14, "every": 3}
    block = await run(client, model, at_tokens(v=V, pattern=pattern, prompt=prompt, **options), prompt, max_tokens=16)
    result = await run(
        client,
        model,
        interventions=[
            Steer("residual(3)", V, scale=4.0, positions="last", when=When(tokens=pattern)),
            Steer("residual(3)", V, scale=4.0, positions="last", when=When(**options)),
            Probe("after", "residual(3)"),
            Probe("answer", "residual(3)", UNIT, when=When(part="answer")),
        ],
        prompt=prompt,
        max_tokens=16,
    )
    assert result.token_ids == block.token_ids
    assert result.token_ids != plain.token_ids
    close(result.saves["after"], block.saves["after"][:16], 1e-2)
    assert [bool(np.isnan(value)) for value in result.saves["answer"]] == [True] + [False] * 15


async def test_a_text_is_found_in_the_tokens_of_the_model(client: Client, model: Model) -> None:
    result = await run(
        client,
        model,
        interventions=[Probe("p", "residual(1)", UNIT, positions="all", when=When(text=" "))],
        max_tokens=20,
        token_strings=True,
    )
    found = [not np.isnan(value) for item in result.saves["p"] for value in np.atleast_1d(item)]
    assert 0 < sum(found) < len(found)
    # The last token is computed in no step.
    generated = [" " in one for one in result.token_strings[:-1]]
    assert found[-len(generated) :] == generated
    assert 0 < sum(generated) < len(generated)
    with pytest.raises(TraceRejected, match="no token of the model has") as error:
        await run(client, model, interventions=[Probe("p", "residual(1)", when=When(text="no token has all of this"))])
    assert error.value.field == "interventions[0].when.text"


@tracewire.intervention
def thermostat(model, tracer, live, v, u, target, most):
    strengths = [].save()
    after = [].save()
    for _ in tracer.iter[:]:
        now = model.residual(3).output[-1].float() @ u
        strength = ((target - now) / (v @ u)).clamp(-most, most)
        hidden = model.model.layers[3].output[0]
        hidden[-1] = (hidden[-1].float() + strength * v).to(hidden.dtype)
        strengths.append(float(strength))
        after.append(float(model.residual(3).output[-1].float() @ u))


async def test_a_linear_probe_is_held_exactly_within_the_bounds(client: Client, model: Model) -> None:
    def declared(target: Any) -> list[Any]:
        return [
            Probe("before", "residual(3)", UNIT),
            Hold("strength", "residual(3)", V, "before", target, min=-0.5, max=0.5),
            Probe("after", "residual(3)", UNIT),
        ]

    plain = await run(client, model, interventions=[Probe("p", "residual(3)", UNIT)], max_tokens=12)
    target = float(np.median(plain.saves["p"]) + 2)
    block = await run(client, model, thermostat(v=V, u=UNIT, target=target, most=0.5), max_tokens=12)
    result = await run(client, model, interventions=declared(target), max_tokens=12)
    assert result.token_ids == block.token_ids
    close(result.saves["strength"], block.saves["strengths"])
    close(result.saves["after"], block.saves["after"], 1e-2)
    reached = [
        value for value, used in zip(result.saves["after"], result.saves["strength"], strict=True) if abs(used) < 0.5
    ]
    assert reached
    # In bfloat16.
    assert np.abs(np.array(reached) - target).max() < 0.1
    live = await run(client, model, interventions=declared(Live("target")), live={"target": target}, max_tokens=12)
    close(live.saves["strength"], result.saves["strength"])


@tracewire.intervention
def controlled(model, tracer, live, v, u, target, gain):
    strengths = [].save()
    values = [].save()
    strength = 0.0
    for _ in tracer.iter[:]:
        if values:
            strength = min(max(strength + gain * (target - values[-1]), -1.0), 1.0)
        strengths.append(strength)
        hidden = model.model.layers[2].output[0]
        hidden[-1] = (hidden[-1].float() + strength * v).to(hidden.dtype)
        values.append(float(model.residual(6).output[-1].float() @ u))


async def test_a_controller_takes_the_value_of_the_step_before(client: Client, model: Model) -> None:
    block = await run(client, model, controlled(v=V, u=UNIT, target=3.0, gain=0.05), max_tokens=16)
    result = await run(
        client,
        model,
        interventions=[
            Hold("strength", "residual(2)", V, "value", 3.0, min=-1.0, max=1.0, gain=0.05),
            Probe("value", "residual(6)", UNIT),
        ],
        max_tokens=16,
    )
    assert result.token_ids == block.token_ids
    # The block runs in a step more.
    close(result.saves["strength"], block.saves["strengths"][:16], 1e-2)
    assert len(set(result.saves["strength"])) > 4


@tracewire.intervention
def featured(model, tracer, live, e, b, d, k, chosen):
    before = [].save()
    after = [].save()
    for _ in tracer.iter[:]:
        stream = model.residual(2).output[-1].float()
        pre = stream @ e.T + b
        acts = torch.where(pre >= pre.topk(k).values[-1], pre.relu(), 0.0)
        before.append(acts)
        changed = acts.clone()
        changed[chosen] = (2.0 * acts[chosen] + 1.5).clamp(max=4.0)
        hidden = model.model.layers[2].output[0]
        hidden[-1] = (hidden[-1].float() + (changed - acts) @ d).to(hidden.dtype)
        after.append(model.residual(2).output[-1].clone())


async def test_features_are_read_and_changed_and_the_rest_is_kept(client: Client, model: Model) -> None:
    chosen = [3, 17, 20]
    block = await run(client, model, featured(e=E, b=B, d=D, k=12, chosen=chosen))
    result = await run(
        client,
        model,
        interventions=[
            Features("top", "residual(2)", SAE, top_k=5),
            Features("picked", "residual(2)", SAE, indices=chosen),
            SteerFeatures("residual(2)", SAE, chosen, scale=2.0, add=1.5, max=4.0, positions="last"),
            Probe("after", "residual(2)"),
        ],
    )
    assert result.token_ids == block.token_ids
    close(result.saves["picked"], [one[chosen] for one in block.saves["before"]])
    close(result.saves["after"], block.saves["after"], 1e-2)
    for item, acts in zip(result.saves["top"], block.saves["before"], strict=True):
        assert item["features"].tolist() == np.argsort(-acts)[:5].tolist()
        close([item["activations"]], [np.sort(acts)[::-1][:5]])


async def test_an_autoencoder_of_another_model_or_place_is_refused(client: Client, model: Model) -> None:
    for changes, says in [({"model": "gpt2"}, "is of model 'gpt2'"), ({"at": "residual(1)"}, r"is of residual\(1\)")]:
        with pytest.raises(TraceRejected, match=says) as error:
            await run(client, model, interventions=[Features("f", "residual(2)", SAE.elsewhere(**changes))])
        assert error.value.field == "interventions[0].sae"
    with pytest.raises(TraceRejected, match="has no autoencoder 'other'"):
        await run(client, model, interventions=[Features("f", "residual(2)", "other")])


async def test_a_lens_without_a_map_is_the_logit_lens_and_coordinates_are_least_squares(
    client: Client, model: Model
) -> None:
    eye = np.eye(HIDDEN, dtype=np.float32)
    zero = np.zeros_like(eye)
    result = await run(
        client,
        model,
        interventions=[
            LogitLens("plain", "residual(2:5)", top_k=4),
            Lens("jacobian", "residual(2:5)", eye, top_k=4),
            Lens("tuned", "residual(2:5)", zero, add=True, top_k=4),
            Lens("mapped", "residual(2:5)", np.stack([eye, zero, eye]), top_k=4),
            Coordinates("coordinates", "residual(2)", W),
            Probe("stream", "residual(2)"),
            Probe("moments", "residual(2)", reduce="moments"),
            Probe("l1", "residual(2)", reduce="l1"),
            Probe("max", "residual(2)", reduce="max"),
        ],
        token_strings=True,
    )
    for name in ("jacobian", "tuned"):
        for item, plain in zip(result.saves[name], result.saves["plain"], strict=True):
            assert item["token_ids"].tolist() == plain["token_ids"].tolist()
            assert item["token_strings"] == plain["token_strings"]
            assert item["logits"].tobytes() == plain["logits"].tobytes()
    for item, plain in zip(result.saves["mapped"], result.saves["plain"], strict=True):
        assert item["token_ids"][0].tolist() == plain["token_ids"][0].tolist()
        assert np.ptp(item["logits"][1]) < 1e-3
    streams = result.saves.to_numpy("stream")
    expected = np.linalg.lstsq(W.T, streams.T, rcond=None)[0].T
    close(result.saves["coordinates"], list(expected))
    close(result.saves["l1"], list(np.abs(streams).sum(-1)))
    close(result.saves["max"], list(np.abs(streams).max(-1)))
    close([item[:2] for item in result.saves["moments"]], list(np.stack([streams.mean(-1), streams.var(-1)], -1)))


@tracewire.intervention
def projected(model, tracer, live, basis, remove):
    after = [].save()
    for _ in tracer.iter[:]:
        stream = model.residual(4).output.float()
        inside = stream @ basis.T @ basis
        hidden = model.model.layers[4].output[0]
        hidden[:] = (hidden.float() + (-inside if remove else 0.5 * (inside - stream))).to(hidden.dtype)
        after.append(model.residual(4).output[-1].clone())


@pytest.mark.parametrize("remove", [True, False])
async def test_a_subspace_is_kept_or_removed(client: Client, model: Model, remove: bool) -> None:
    basis = np.linalg.qr(W.T)[0].T.astype(np.float32)
    block = await run(client, model, projected(basis=basis, remove=remove))
    edit = Project("residual(4)", W, remove=remove, strength=1.0 if remove else 0.5)
    result = await run(client, model, interventions=[edit, Probe("after", "residual(4)")])
    assert result.token_ids == block.token_ids
    close(result.saves["after"], block.saves["after"], 1e-2)


async def test_the_code_of_the_pages_runs(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/conditions.md, docs/features.md and docs/lenses.md."""
    monkeypatch.chdir(tmp_path)
    autoencoder(model="demo", at="residual(5)").save("layer_5")
    maps = (RNG.standard_normal((8, HIDDEN, HIDDEN)) / 16).astype(np.float32)
    scope: dict[str, Any] = {
        "client": client,
        "prompt": "def add(a, b):",
        **dict.fromkeys(("anger", "calm", "style", "direction"), UNIT),
        "matrices": maps,
        "biases": maps[:, 0],
        "jacobians": maps[:4],
        "basis": W,
    }
    for page in ("conditions", "features", "lenses"):
        await run_page(ROOT / "docs" / f"{page}.md", scope)
    assert capsys.readouterr().out.count("[") > 2
    assert set(scope["result"].saves) == {"where"}


async def test_an_autoencoder_of_the_engine_is_used_by_name_within_a_bound(client: Client, model: Model) -> None:
    reads = [Features(name, "residual(2)", sae, top_k=5) for name, sae in (("named", "tiny"), ("sent", SAE))]
    result = await run(client, model, interventions=reads)
    for one, other in zip(result.saves["named"], result.saves["sent"], strict=True):
        assert one["features"].tolist() == other["features"].tolist()
        assert one["activations"].tobytes() == other["activations"].tobytes()
    third = Features("third", "residual(2)", autoencoder(architecture="topk", k=3))
    with pytest.raises(tracewire.TraceFailed, match="does not fit: autoencoders take 200000 bytes"):
        await run(client, model, interventions=[*reads, third])
    # What no trace uses makes room.
    assert (await run(client, model, interventions=[third])).saves["third"]
