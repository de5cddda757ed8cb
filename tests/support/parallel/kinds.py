"""Each declared kind beside a block that does the same, and how far they may be apart: on every layout.

The layers are one of each of two pipeline stages. The tokens are given, so that rounding decides none. `TABLE` is the
table of `docs/internals/declared-interventions.md`, which a test compares with the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.blocks import kinds as blocks
from tests.support.parallel.scenarios import outcome, same
from tracewire import (
    Ablate,
    AttentionPattern,
    Clamp,
    Client,
    Coordinates,
    Features,
    HeadAblate,
    HeadProbe,
    Hold,
    Lens,
    LogitLens,
    Model,
    Patch,
    Probe,
    Project,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    StopWhen,
    When,
)

__all__ = ["KINDS", "LAYOUTS", "SPLIT_BYTES", "TABLE", "Kind", "differences", "of_prompts"]

LAYOUTS = ("one rank", "two ranks", "two stages")
LAYERS = (1, 6)
WIDTH, SIZE = 256, 64
PROMPT = [11, 5, 20, 7, 31, 8]
#: The prompt whose values another one takes.
GIVING = [3, 90, 14, 200, 35, 61]
#: How far a patch from there and its blocks may be apart, by layout.
PROMPTS_ROUNDING = (0.0, 0.0, 0.0)
TOKENS = [266, 14, 671, 8, 66, 12]

_rng = np.random.default_rng(17)
VECTOR = (_rng.standard_normal(WIDTH) / 8).astype(np.float32)
UNIT = VECTOR / np.linalg.norm(VECTOR)
WEIGHT = (_rng.standard_normal((3, WIDTH)) / 16).astype(np.float32)
BASIS = np.linalg.qr(WEIGHT.T)[0].T.astype(np.float32)
MATRICES = (np.eye(WIDTH) + _rng.standard_normal((2, WIDTH, WIDTH)) / 64).astype(np.float32)
ROWS = _rng.standard_normal((3, WIDTH)).astype(np.float32)
MEANS = _rng.standard_normal((2, 2, SIZE)).astype(np.float32)
#: Which some of the tokens have at either layer, and others have not.
ABOVE, RELEASE = 1.0, 0.2
#: The features of a small autoencoder; and of large ones, which have so many bytes that the engine of two ranks splits
#: them.
FEATURES, MANY = 48, 201
SPLIT_BYTES = 4 * WIDTH * (FEATURES + MANY)


@dataclass(frozen=True)
class Kind:
    """One comparison.

    Attributes:
        says: what the table says of it.
        declared: the interventions.
        block: what does the same.
        rounding: by name of what both save: how far they may be apart, in parts of the greatest element. On all
            layouts, or on each.
            An intervention at one of several layers saves what the block saves in turn: `raw1` and `raw6` are `raw`.
        stops: whether it ends the generation.
    """

    says: str
    declared: list[Any]
    block: Any
    rounding: Mapping[str, float | tuple[float, ...]]
    stops: bool = False

    def bounds(self, name: str) -> tuple[float, ...]:
        """How far the two may be apart, by layout."""
        found = self.rounding[name]
        return found if isinstance(found, tuple) else (found,) * len(LAYOUTS)


def _each(name: str, make: Any) -> list[Any]:
    """A read at each layer."""
    return [make(f"{name}{layer}", f"residual({layer})") for layer in LAYERS]


def _edit(says: str, name: str, make: Any, rounding: float, amount: float = 0.0) -> Kind:
    block = blocks.edits(layers=[*LAYERS], kind=name, vector=VECTOR, basis=BASIS, amount=amount)
    return Kind(says, [*(make(f"residual({layer})") for layer in LAYERS), _AFTER], block, {"after": rounding})


_AFTER = Probe("after", "residual(7)", positions="all")
_READ = 1e-5
#: One step of bfloat16 at the greatest element: of a number that is little less than a power of two, and of any.
_EDIT, _STEP = 2.0**-8, 2.0**-7


def _features(says: str, count: int, chosen: list[int], k: int = 0) -> Kind:
    """The greatest features and chosen ones, changed then: of a jumprelu autoencoder, or of a topk."""
    rng = np.random.default_rng(count)
    encoder, decoder = (rng.standard_normal((2, count, WIDTH)) / 16).astype(np.float32)
    bias, threshold = encoder[:, 0].copy(), np.full(count, 0.1, np.float32)
    kind: dict[str, Any] = {"architecture": "topk", "k": k} if k else {"architecture": "jumprelu"}
    sae = SparseAutoencoder(encoder, decoder, bias, **kind, **({} if k else {"threshold": threshold}))
    block = blocks.features(
        layers=[*LAYERS],
        encoder=encoder,
        bias=bias,
        threshold=threshold,
        k=k,
        decoder=decoder,
        chosen=chosen,
        scale=0.5,
        add=1.0,
    )
    declared = [
        *_each("top", lambda name, at: Features(name, at, sae, top_k=3)),
        *_each("picked", lambda name, at: Features(name, at, sae, indices=chosen)),
        *(SteerFeatures(f"residual({layer})", sae, chosen, scale=0.5, add=1.0) for layer in LAYERS),
        _AFTER,
    ]
    return Kind(says, declared, block, {"top": _READ, "picked": _READ, "after": _EDIT if count == FEATURES else _STEP})


def _when(layer: int) -> When:
    return When(probe=f"scores{layer}", above=ABOVE, release=RELEASE)


def _stop(layer: int, above: float) -> Kind:
    name = f"scores{layer}"
    return Kind(
        "`StopWhen`",
        [Probe(name, f"residual({layer})", UNIT), StopWhen(name, above=above)],
        blocks.stops(layer=layer, vector=UNIT, above=above),
        {"scores": _READ},
        stops=True,
    )


KINDS: dict[str, Kind] = {
    "probes": Kind(
        "`Probe`",
        [
            *_each("raw", Probe),
            *_each("linear", lambda name, at: Probe(name, at, WEIGHT, bias=WEIGHT[:, 0], activation="sigmoid")),
            *_each("norm", lambda name, at: Probe(name, at, reduce="norm")),
            *_each("magnitudes", lambda name, at: Probe(name, at, reduce="l1")),
            *_each("most", lambda name, at: Probe(name, at, reduce="max")),
            *_each("moments", lambda name, at: Probe(name, at, reduce="moments")),
            *_each("mean", lambda name, at: Probe(name, at, reduce="mean", positions="all")),
            Probe("every", "residual(*)", VECTOR),
        ],
        blocks.probes(layers=[*LAYERS], weight=WEIGHT, bias=WEIGHT[:, 0].copy(), vector=VECTOR),
        {"raw": 0.0, "linear": _READ, "norm": _READ, "magnitudes": _READ, "most": 0.0, "moments": _READ, "mean": _READ}
        | {"every": _READ},
    ),
    "lenses": Kind(
        "`LogitLens`, `Lens`",
        [
            *_each("plain", lambda name, at: LogitLens(name, at, top_k=2)),
            *(
                Lens(f"mapped{layer}", f"residual({layer})", MATRICES[place], WEIGHT[0], top_k=2)
                for place, layer in enumerate(LAYERS)
            ),
            *(
                Lens(f"tuned{layer}", f"residual({layer})", MATRICES[place], WEIGHT[0], add=True, top_k=2)
                for place, layer in enumerate(LAYERS)
            ),
        ],
        blocks.lenses(layers=[*LAYERS], matrices=MATRICES, bias=WEIGHT[0].copy()),
        {"plain": _EDIT, "mapped": _EDIT, "tuned": _EDIT},
    ),
    "coordinates": Kind(
        "`Coordinates`",
        _each("found", lambda name, at: Coordinates(name, at, WEIGHT)),
        blocks.coordinates(layers=[*LAYERS], inverse=np.linalg.pinv(WEIGHT).astype(np.float32)),
        {"found": _READ},
    ),
    "steer": _edit("`Steer`", "steer", lambda at: Steer(at, VECTOR, scale=4.0), 0.0, 4.0),
    "clamp": _edit("`Clamp`", "clamp", lambda at: Clamp(at, VECTOR, max=0.25), _EDIT, 0.25),
    "ablate": _edit("`Ablate`: a direction", "ablate", lambda at: Ablate(at, VECTOR, keep=0.25), _EDIT, 0.25),
    "ablate basis": _edit("`Ablate`: a subspace", "ablate basis", lambda at: Ablate(at, WEIGHT), _EDIT),
    "remove": _edit("`Project`: removed", "remove", lambda at: Project(at, WEIGHT, remove=True), _EDIT),
    "project": _edit("`Project`: half of the way", "project", lambda at: Project(at, WEIGHT, strength=0.5), _EDIT, 0.5),
    "patches": Kind(
        "`Patch`",
        [
            *(Patch(f"residual({layer})", ROWS, positions=[0, 3, -1]) for layer in LAYERS),
            *(Patch(f"residual({layer})", ROWS[0], positions="generated", strength=0.25) for layer in LAYERS),
            _AFTER,
        ],
        blocks.patches(layers=[*LAYERS], rows=ROWS, places=[0, 3, -1], value=ROWS[0].copy(), strength=0.25),
        {"after": 0.0},
    ),
    "heads": Kind(
        "`HeadProbe`, `HeadAblate`",
        [
            *(HeadAblate(f"heads({layer})", [3, 1], keep=0.5, mean=MEANS[0, 0]) for layer in LAYERS),
            *(HeadProbe(f"found{layer}", f"heads({layer})") for layer in LAYERS),
            *(HeadProbe(f"norms{layer}", f"heads({layer})", heads=[3, 1], reduce="norm") for layer in LAYERS),
            _AFTER,
        ],
        blocks.heads(layers=[*LAYERS], chosen=[3, 1], keep=0.5, mean=MEANS[0, 0].copy()),
        {"found": 0.0, "norms": _READ, "after": 0.0},
    ),
    "patched heads": Kind(
        "`Patch` of heads",
        [*(Patch(f"heads({layer})", MEANS, heads=[0, 3], positions=[1, -1]) for layer in LAYERS), _AFTER],
        blocks.patched_heads(layers=[*LAYERS], chosen=[0, 3], places=[1, -1], rows=MEANS),
        {"after": 0.0},
    ),
    "patterns": Kind(
        "`AttentionPattern`",
        [AttentionPattern(f"whole{layer}", f"heads({layer})", top_k=0) for layer in LAYERS],
        blocks.attends(layers=[*LAYERS]),
        {"whole": 1e-2},
    ),
    "features": _features("`Features`, `SteerFeatures`", FEATURES, [1, 7, 20]),
    "split features": _features("`Features`, `SteerFeatures`: two ranks split the autoencoder", MANY, [1, 7, 200]),
    "split topk": _features("`Features`, `SteerFeatures` of a `topk`: two ranks split it", MANY, [1, 7, 200], k=40),
    "conditions": Kind(
        "`When`: a probe with hysteresis",
        [
            one
            for read, write in ((1, 2), (5, 6))
            for one in (
                Probe(f"scores{read}", f"residual({read})", UNIT),
                Probe(f"seen{read}", f"residual({read})", UNIT, when=_when(read)),
                Steer(f"residual({write})", UNIT, scale=2.0, when=_when(read)),
            )
        ]
        + [_AFTER],
        blocks.conditional(pairs=[[1, 2], [5, 6]], vector=UNIT, above=ABOVE, release=RELEASE),
        {"scores": _READ, "seen": _READ, "after": _EDIT},
    ),
    "tokens": Kind(
        "`When`: ids, and ranges of indices",
        [
            one
            for layer in LAYERS
            for one in (
                Steer(f"residual({layer})", UNIT, scale=3.0, positions="last", when=When(tokens=TOKENS[1:3])),
                Steer(f"residual({layer})", UNIT, scale=3.0, positions="last", when=When(start=1, stop=5, every=2)),
            )
        ]
        + [_AFTER],
        blocks.at_tokens(
            layers=[*LAYERS],
            vector=UNIT,
            prompt=PROMPT,
            ids=TOKENS,
            pattern=TOKENS[1:3],
            start=1,
            stop=5,
            every=2,
        ),
        {"after": 0.0},
    ),
    "hold": Kind(
        "`Hold`: exact, and with a gain",
        [
            Probe("now", f"residual({LAYERS[0]})", UNIT),
            Hold("exact", f"residual({LAYERS[0]})", UNIT, "now", 2.0, min=-1.5, max=1.5),
            Hold("controlled", f"residual({LAYERS[1]})", UNIT, "value", 2.0, min=-1.5, max=1.5, gain=0.02),
            Probe("value", "residual(7)", UNIT),
            _AFTER,
        ],
        blocks.held(layers=[*LAYERS], vector=UNIT, target=2.0, most=1.5, gain=0.02),
        {"exact": _READ, "controlled": 1e-4, "after": _EDIT},
    ),
    "early stop": _stop(LAYERS[0], ABOVE),
    "late stop": _stop(LAYERS[1], -1.0),
}


#: What is compared, by the name under which both save it.
_WORDS = {
    "raw": "the value",
    "linear": "with a weight and a sigmoid",
    "norm": "`norm`",
    "magnitudes": "`l1`",
    "most": "`max`",
    "moments": "`moments`",
    "mean": "`mean`",
    "every": "`residual(*)` with a weight",
    "plain": "`LogitLens`",
    "mapped": "`Lens`",
    "tuned": "`Lens` with `add`",
    "found": "what is read",
    "norms": "norms of heads",
    "whole": "the whole pattern",
    "top": "the greatest features",
    "picked": "chosen features",
    "scores": "the probe",
    "seen": "what is read under the condition",
    "exact": "the exact strength",
    "controlled": "the strength with a gain",
    "after": "the stream behind it",
}


def _table() -> str:
    """How far each kind and its block may be apart, on each layout, in Markdown."""
    lines = ["| kind | what is compared | " + " | ".join(LAYOUTS) + " |", "| --- | --- |" + " --- |" * len(LAYOUTS)]
    for kind in KINDS.values():
        by_bounds: dict[tuple[float, ...], list[str]] = {}
        for name in kind.rounding:
            by_bounds.setdefault(kind.bounds(name), []).append(_WORDS[name])
        for bounds, names in by_bounds.items():
            lines.append(f"| {kind.says} | {', '.join(names)} | " + _cells(bounds))
    lines.append("| `Patch` from a prompt of the trace | the stream behind it | " + _cells(PROMPTS_ROUNDING))
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _cells(bounds: tuple[float, ...]) -> str:
    return " | ".join(map(_said, bounds)) + " |"


def _said(bound: float) -> str:
    if not bound:
        return "bit for bit"
    power = np.log2(bound)
    return f"2^{power:.0f}" if power == round(power) else f"{bound:.0e}".replace("e-0", "e-")


TABLE = _table()


async def of_prompts(client: Client, model: Model, layout: str) -> list[str]:
    """How a `Patch` from another prompt of its trace differs from the blocks that read and write the values."""
    options: Any = {"max_tokens": 1, "temperature": 0.0}
    declared = [
        one
        for layer in LAYERS
        for one in (
            Patch(f"residual({layer})", prompt=0, source=[4, 0, -1], positions=[0, 3, -1]),
            Patch(f"heads({layer})", heads=[3, 1], prompt=0, source=2, positions="1:3", into=1),
        )
    ]
    result = await client.trace(model, prompts=[GIVING, PROMPT], interventions=[*declared, _AFTER], **options).result()
    plain = await client.trace(model, PROMPT, interventions=[_AFTER], **options).result()
    assert same(result.invokes[1].choices[0].saves["after"], plain.saves["after"], tolerance=4 * _EDIT)
    gives = await client.trace(model, GIVING, blocks.gives(layers=[*LAYERS], chosen=[3, 1]), **options).result()
    rows, heads = (np.stack([np.asarray(one, np.float32) for one in gives.saves[name]]) for name in ("rows", "heads"))
    takes = blocks.takes(
        layers=[*LAYERS],
        rows=rows[:, [4, 0, -1]].copy(),
        places=[0, 3, -1],
        heads=heads[:, 2].copy(),
        chosen=[3, 1],
        others=[1, 2],
    )
    theirs = await client.trace(model, PROMPT, takes, **options).result()
    bound = PROMPTS_ROUNDING[LAYOUTS.index(layout)]
    return [
        *same(
            result.invokes[1].choices[0].saves["after"][:1], theirs.saves["after"][:1], tolerance=bound, path="after"
        ),
        *same(result.invokes[0].choices[0].saves["after"][:1], gives.saves["after"][:1], tolerance=bound, path="gives"),
    ]


async def differences(client: Client, model: Model, kind: Kind, layout: str) -> list[str]:
    """How the interventions of a kind and its block differ on an engine, if they do."""
    tokens: Any = {"max_tokens": len(TOKENS), "forced_tokens": TOKENS}
    ours = await outcome(client, model, prompt=PROMPT, interventions=kind.declared, **tokens)
    theirs = await outcome(client, model, kind.block, prompt=PROMPT, **tokens)
    plain = await outcome(client, model, prompt=PROMPT, interventions=[_AFTER], **tokens)
    for one in (ours, theirs, plain):
        assert one["error"] is None, one["error"]
        assert one["save_errors"] == {}
    ((ids, mine, reason),), ((other_ids, other, other_reason),) = ours["choices"], theirs["choices"]
    assert ids
    if kind.stops:
        assert len(ids) < len(TOKENS)
        assert reason == other_reason
    found = same(ids, other_ids, path="tokens")
    if "after" in kind.rounding:
        # Neither does nothing.
        assert same(mine["after"], plain["choices"][0][1]["after"], tolerance=4 * _EDIT)
    for name in kind.rounding:
        parts = [mine[one] for one in mine if one.rstrip("0123456789") == name]
        items = [item for step in zip(*parts, strict=True) for item in step]
        assert items
        # In a step that was under way at the end, a block may still save.
        found += same(items, other[name][: len(items)], tolerance=kind.bounds(name)[LAYOUTS.index(layout)], path=name)
    return found
