"""Plans with conditions, controllers, features, lenses and subspaces; and the same done row by row in NumPy."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from tests.support.declared_plans import HEAD, HIDDEN, LAYERS, compare, handed_on
from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.domain.intervention_checks import normalize, substitute_live
from tracewire_bus.wire.messages import (
    Ablate,
    Coordinates,
    Features,
    Hold,
    Lens,
    Live,
    LogitLens,
    Probe,
    Project,
    Steer,
    SteerFeatures,
    When,
)
from tracewire_engine.adapter.read_decoder import ChoiceReads, ReadDecoder
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

__all__ = ["ARCHITECTURES", "Request", "autoencoder", "play"]

ARCHITECTURES = ("relu", "topk", "jumprelu", "gated")
#: Few ids, so that patterns are met.
IDS = 4
_NEVER = np.float32("nan")


def autoencoder(architecture: str, features: int = 24, width: int = HIDDEN, **more: Any) -> SparseAutoencoder:
    """A random autoencoder."""
    rng = np.random.default_rng(ARCHITECTURES.index(architecture))
    vectors = {
        "jumprelu": {"threshold": rng.uniform(0.1, 2.0, features)},
        "gated": {"gate": rng.normal(size=features), "scale": rng.uniform(0.5, 2.0, features)},
    }.get(architecture, {"k": 5} if architecture == "topk" else {})
    encoder, decoder = rng.normal(size=(2, features, width)).astype(np.float32)
    return SparseAutoencoder(
        *(encoder / 4, decoder / 4, rng.normal(size=features), rng.normal(size=width)),
        architecture=architecture,
        centered=architecture != "relu",
        **{**vectors, **more},
    )


def vector(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(*shape, HIDDEN)).astype(np.float32)


def _conditions(rng: random.Random) -> When | None:
    kind = rng.randrange(9)
    return [
        None,
        None,
        When(probe="score", above=rng.choice([0.0, 1.0])),
        When(probe="score", above=2.0, release=-1.0),
        When(probe="late", below=Live("bound"), start=rng.randrange(3)),
        When(start=1, stop=rng.randint(2, 5)),
        When(every=rng.randint(2, 3)),
        When(tokens=rng.choice([[[1]], [[2], [0, 1]], [[1, 2, 3], [3]]])),
        When(part=rng.choice(["prompt", "answer"])),
    ][kind]


def interventions(rng: random.Random) -> list[tuple[Any, list[int]]]:
    """Interventions with their layers: two probes on which others depend, and some others."""
    found: list[tuple[Any, list[int]]] = [
        (Probe("score", "", vector(1)), [1]),
        (Probe("late", "", vector(2, 2), bias=0.5, when=When(every=2) if rng.random() < 0.5 else None), [2]),
    ]
    for number in range(rng.randint(1, 4)):
        name, when, layer = f"s{number}", _conditions(rng), [rng.randrange(LAYERS)]
        positions = rng.choice(["last", "all", "prompt", "generated"])
        sae = autoencoder(rng.choice(ARCHITECTURES))
        picked = rng.sample(range(24), 3)
        several = [0, 2] if rng.random() < 0.5 else layer
        maps = np.stack([np.random.default_rng(5 + place).normal(size=(HIDDEN, HIDDEN)) for place in several]) / 4
        found.append(
            rng.choice(
                [
                    (Probe(name, "", positions=positions, when=when), several),
                    (Probe(name, "", reduce=rng.choice(["l1", "max", "norm", "moments"]), when=when), several),
                    (Probe(name, "", vector(3, 2), reduce="mean", positions=positions, when=when), layer),
                    (LogitLens(name, "", top_k=2, positions=positions, when=when), several),
                    (Lens(name, "", maps, vector(6), add=rng.random() < 0.5, top_k=2, when=when), several),
                    (Coordinates(name, "", vector(7, 2), positions=positions, when=when), several),
                    (Features(name, "", sae, top_k=4, threshold=0.2, positions=positions, when=when), several),
                    (Features(name, "", sae, indices=picked, positions=positions, when=when), layer),
                    (SteerFeatures("", sae, picked, add=Live("bound"), positions=positions, when=when), layer),
                    (SteerFeatures("", sae, picked, scale=0.5, max=1.0, positions=positions, when=when), several),
                    (Steer("", vector(8), scale=Live("bound"), positions=positions, when=when), several),
                    (Ablate("", keep=0.5, positions=positions, when=when), layer),
                    (Project("", vector(9, 3), remove=rng.random() < 0.5, strength=0.5, when=when), layer),
                    (Hold(name, "", vector(1), "score", Live("bound"), -2.0, 2.0, when=when), [1]),
                    (Hold(name, "", vector(4), "late", 1.0, -2.0, 2.0, gain=0.2, output=1, when=when), layer),
                    (Hold(name, "", vector(4), "score", 1.0, -2.0, 2.0, gain=0.2, proportional=0.1, when=when), [2]),
                ]
            )
        )
    return found


class Request:
    """A request with its interventions, and what they come to, row by row."""

    def __init__(self, name: str, rng: random.Random, declared: list[tuple[Any, list[int]]], longest: int) -> None:
        self.name, self.declared = name, declared
        self.prompt = rng.randint(1, 5)
        self.length = self.prompt + rng.randint(longest // 2, longest)
        self.ids = [rng.randrange(IDS) for _ in range(self.length + 1)]
        self.state = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=self.prompt)
        self.tokens = 0
        self.live = {"bound": rng.choice([-0.5, 0.5])}
        self.expected: dict[str, list[Any]] = {}
        self.reads = ChoiceReads()
        #: By the place of an intervention: whether its condition on a probe holds; a controller's strength and error.
        self.holds: dict[int, bool] = {}
        self.controls: dict[int, list[float]] = {}
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        plain = normalize([one for one, _ in declared])
        self.encoded = msgspec.msgpack.encode(
            [
                Placed(one, [(f"layer.{layer}.output", True) for layer in layers], len(layers) > 1)
                for one, (_, layers) in zip(plain, declared, strict=True)
            ]
        )

    def allowed(self, place: int, one: Any, position: int) -> bool:
        """Whether the condition of an intervention holds at a position."""
        when = one.when
        if when is None:
            return True
        index, held = position - self.prompt + 1, True
        if when.probe is not None:
            held &= index >= 0 and self.holds.get(place, False)
        if when.start is not None or when.stop is not None or when.every is not None:
            start = when.start or 0
            held &= start <= index < (when.stop if when.stop is not None else 99)
            held &= (index - start) % (when.every or 1) == 0
        if when.tokens is not None:
            before = self.ids[: position + 1]
            held &= any(before[-len(one) :] == one for one in when.tokens)
        if when.part is not None:
            held &= (position < self.prompt) == (when.part == "prompt")
        return bool(held)

    def watched(self, name: str, numbers: np.ndarray[Any, Any]) -> None:
        """Take the numbers of a probe: conditions change."""
        if np.isnan(numbers).any():
            return
        self.values[name] = numbers
        for place, (intended, _) in enumerate(self.declared):
            when = substitute_live(intended, self.live).when
            if when is not None and when.probe == name:
                value, was = float(numbers[when.output]), self.holds.get(place, False)
                now = (when.above is not None and value > when.above) or (when.below is not None and value < when.below)
                if was and when.release is not None:
                    now |= value > when.release if when.above is not None else value < when.release
                self.holds[place] = bool(now)

    def step(self, streams: list[np.ndarray[Any, Any]], first: int) -> None:
        """What the interventions mean for the rows of one step, in place: `streams` has `[rows, hidden]` by layer."""
        found: dict[str, dict[int, Any]] = {}
        for layer, rows in enumerate(streams):
            for place, (intended, layers) in enumerate(self.declared):
                if layer in layers:
                    one = substitute_live(intended, self.live)
                    items = self._apply(place, one, layers.index(layer), rows, first)
                    if items is not None and len(items):
                        found.setdefault(one.name, {})[layer] = items
                        if isinstance(one, Probe) and one.name in ("score", "late"):
                            self.watched(one.name, np.atleast_1d(items[0]))
        for one, layers in self.declared:
            by_layer = found.get(getattr(one, "name", ""))
            if by_layer:
                self._expect(one, [by_layer[layer] for layer in layers])

    def _expect(self, one: Any, by_layer: list[Any]) -> None:
        flat = getattr(one, "positions", "last") == "last" or getattr(one, "reduce", "") == "mean"

        def joined(arrays: list[np.ndarray[Any, Any]]) -> Any:
            values = np.stack(arrays, 1) if len(arrays) > 1 else arrays[0]
            values = values[0] if flat else values
            return values if values.ndim else float(values)

        items = self.expected.setdefault(one.name, [])
        if isinstance(by_layer[0], tuple):
            items.append(tuple(joined([item[part] for item in by_layer]) for part in range(2)))
        else:
            items.append(joined(by_layer))

    def _rows(self, one: Any, first: int, count: int) -> list[int]:
        end, positions = first + count, getattr(one, "positions", "last")
        reading = hasattr(one, "name") and not isinstance(one, Hold)
        return [
            position
            for position in range(first, end)
            if {
                "all": True,
                "prompt": position < self.prompt,
                "generated": position >= self.prompt,
                "last": position == end - 1 if reading else position >= self.prompt - 1,
            }[positions]
        ]

    def _apply(self, place: int, one: Any, site: int, rows: np.ndarray[Any, Any], first: int) -> Any:
        chosen = self._rows(one, first, len(rows))
        held = np.array([self.allowed(place, one, position) for position in chosen], bool)
        if not chosen:
            return None
        at = [position - first for position in chosen]
        values = rows[at].astype(np.float64)
        if isinstance(one, Hold):
            strength = self._strength(place, one, values, held)
            rows[at] = values + strength[:, None] * one.vector
            return strength[-1:]
        changed = self._edited(one, values)
        if changed is not None:
            rows[at] = np.where(held[:, None], changed, values)
            return None
        read = self._read(one, site, values, held)
        if isinstance(read, tuple):
            return tuple(_masked(part, held) for part in read)
        return read if getattr(one, "reduce", "") == "mean" else _masked(read, held)

    def _edited(self, one: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        if isinstance(one, Steer):
            return values + one.scale * one.vector
        if isinstance(one, Ablate):
            return values * one.keep
        if isinstance(one, Project):
            basis = np.linalg.qr(one.basis.T.astype(np.float64))[0]
            inside = values @ basis @ basis.T
            new = values - inside if one.remove else inside
            return values + one.strength * (new - values)
        if isinstance(one, SteerFeatures):
            before = one.sae.encode(values)
            after = before.copy()
            low, high = -np.inf if one.min is None else one.min, np.inf if one.max is None else one.max
            after[:, one.indices] = np.clip(before[:, one.indices] * one.scale + one.add, low, high)
            return values + one.sae.decode(after) - one.sae.decode(before)
        return None

    def _read(self, one: Any, site: int, values: np.ndarray[Any, Any], held: np.ndarray[Any, Any]) -> Any:
        if isinstance(one, Probe):
            if one.weight is not None:
                values = values @ np.atleast_2d(one.weight).T + (0.0 if one.bias is None else one.bias)
                values = values[:, 0] if one.weight.ndim == 1 else values
            if one.reduce == "mean":
                return values[held].mean(0, keepdims=True) if held.any() else values[:1] * _NEVER
            if one.reduce in ("norm", "l1", "max"):
                return np.linalg.norm(values, {"norm": 2, "l1": 1, "max": np.inf}[one.reduce], axis=-1)
            if one.reduce == "moments":
                unit = (values - values.mean(-1, keepdims=True)) / values.std(-1, keepdims=True)
                return np.stack([values.mean(-1), values.var(-1), (unit**3).mean(-1), (unit**4).mean(-1)], -1)
            return values
        if isinstance(one, Coordinates):
            return np.linalg.lstsq(one.basis.T.astype(np.float64), values.T, rcond=None)[0].T
        if isinstance(one, Features):
            activations = one.sae.encode(values)
            if one.indices is not None:
                return activations[:, one.indices]
            best = np.argsort(-activations, -1, kind="stable")[:, : one.top_k]
            top = np.take_along_axis(activations, best, -1)
            return np.where(top > one.threshold, best, -1), np.where(top > one.threshold, top, 0.0)
        if isinstance(one, Lens):
            mapped = values @ one.matrix[site].T + one.bias
            values = values + mapped if one.add else mapped
        logits = values @ HEAD.numpy().T
        best = np.argsort(-logits, -1)[:, : one.top_k]
        return best, np.take_along_axis(logits, best, -1)

    def _strength(
        self, place: int, one: Hold, values: np.ndarray[Any, Any], held: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        if one.gain is None:
            weight = vector(1).astype(np.float64)
            exact = (one.target - values @ weight) / (weight @ one.vector)
            return np.where(held, np.clip(exact, one.min, one.max), 0.0)
        state = self.controls.setdefault(place, [0.0, np.nan])
        strength, last = state
        if one.probe in self.values:
            error = one.target - float(self.values[one.probe][one.output])
            strength += one.gain * error + (0.0 if np.isnan(last) else one.proportional * (error - last))
            last = error
        strength = float(np.clip(strength, one.min, one.max))
        if held[-1]:
            self.controls[place] = [strength, last]
        return np.where(held, strength, 0.0)


def _masked(values: Any, held: np.ndarray[Any, Any]) -> Any:
    values = np.asarray(values)
    where = held.reshape(-1, *[1] * (values.ndim - 1))
    return np.where(where, values, -1 if values.dtype.kind == "i" else np.nan)


def play(
    seed: int, declared: DeclaredRequests, *, steps: int = 30, arrivals: float = 0.15, make: Any = interventions
) -> int:
    """Play random traffic, and compare what plans read and edit with `Request.step`. Returns the steps of old plans.

    With few `arrivals`, requests are long, and all of them are in each step. `make` makes a request's interventions.
    With `declared.buffers`, the taps' kernels serve the steps that fit.
    """
    rng = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    feed, live, finished, kept = ReadDecoder(), {}, [], 0
    buffers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    ids: dict[int, torch.Tensor] = {}
    for step in range(steps):
        if step < steps * 2 // 3 and (len(live) < 2 or rng.random() < arrivals):
            request = Request(f"r{step}", rng, make(rng), longest=14 if arrivals > 0.1 else 30)
            live[request.name] = request
            run = LiveRun(request.name)
            run.values |= request.live
            declared.add(request.name, Declaration(request.name, 0, request.encoded, run, declared.decoded))
        batch = [one for one in live.values() if rng.random() < 0.95 or arrivals < 0.1]
        scheduled = {one.name: one.prompt + one.tokens - one.state.num_computed_tokens for one in batch}
        total = sum(scheduled.values())
        if not total:
            continue
        if total not in buffers:
            buffers[total] = [(torch.empty(total + 2, HIDDEN), torch.empty(total + 2, HIDDEN)) for _ in range(LAYERS)]
            ids[total] = torch.empty(total + 2, dtype=torch.int32)
        tokens = [
            one.ids[place]
            for one in batch
            for place in range(one.state.num_computed_tokens, one.state.num_computed_tokens + scheduled[one.name])
        ]
        ids[total][:total] = torch.tensor(tokens, dtype=torch.int32)
        declared.ids = lambda total=total: ids[total]
        before = declared.plan
        declared.begin([one.name for one in batch], scheduled, total, {one.name: one.state for one in batch})
        kept += declared.plan is before
        streams = []
        taps = declared.buffers if declared.fits_buffers() else None
        for layer, (hidden, residual) in enumerate(buffers[total]):
            for half in (hidden, residual):
                half.copy_(torch.randn(total + 2, HIDDEN, generator=noise))
            streams.append((hidden + residual)[:total].numpy().copy())
            if taps is not None:
                taps.launch(f"layer.{layer}.output", (hidden, residual))
                continue
            hook = declared.hooks.get(f"layer.{layer}.output")
            if hook is not None:
                hook.replay((hidden, residual))
        start = 0
        for one in batch:
            stop = start + scheduled[one.name]
            one.step([stream[start:stop] for stream in streams], one.state.num_computed_tokens)
            start = stop
        for (hidden, residual), stream in zip(buffers[total], streams, strict=True):
            np.testing.assert_allclose((hidden + residual)[:total].numpy(), stream, rtol=1e-3, atol=1e-3)
        collected = declared.collect(lambda values: values @ HEAD.T)
        if collected is not None:
            data, arrived = handed_on(feed, *collected)
            for reads, index in arrived:
                live[reads.request].reads.take(index, reads, data)
        assert not [one.failure for one in declared.live.values() if one.failure]
        for one in batch:
            one.state.num_computed_tokens += scheduled[one.name]
            one.tokens += 1
            if one.prompt + one.tokens > one.length:
                finished.append(live.pop(one.name))
                declared.pop(one.name)
    assert finished
    for one in finished:
        compare(one)
    return kept
