"""`client.extract`: the direction between two kinds of prompts, by a harvest of their activations."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict

import anyio.to_thread

import tracewire.harvest
from tracewire.checks import check_count, shown
from tracewire.errors import TraceRejected
from tracewire.options import check_names
from tracewire_bus.domain.intervention_checks import find_sites
from tracewire_bus.wire.messages import Probe, Steer

from .directions import METHODS, Direction, LayerScore, Method, cross_validated, found
from .plots import lines_svg

__all__ = ["ExtractOptions", "Extraction", "extract"]

_TENSOR = "activations"


class ExtractOptions(TypedDict, total=False):
    """The keyword arguments of `Client.extract`.

    `at` names the layers to compare, by default `"residual(*)"`. `token` is `"last"`, the last token of each prompt, or
    `"mean"`, the mean over its tokens; `positions` is a slice of the tokens that count, such as `slice(8, 256)`.
    `folds` is the number of folds, 5 by default. `to` keeps the harvest, in a folder or at a URL, where a second call
    with the same prompts reads it. `layer` chooses a layer, in place of the best score. `harvest` are further options
    of the harvest.
    """

    at: str
    method: Method
    token: str
    positions: slice | None
    folds: int
    to: str | None
    layer: int | None
    harvest: Mapping[str, Any]


class Harvests(Protocol):
    """A client, as far as an extraction needs it."""

    @property
    def models(self) -> Any: ...

    @property
    def harvest(self) -> Any: ...


@dataclass(frozen=True)
class Extraction:
    """The direction between two kinds of prompts at the best of several layers.

    Attributes:
        model: the model's name.
        method: how the directions were found.
        at, layer: the chosen location, and its layer; None for a location that is no layer.
        direction: the chosen direction: `vector`, `threshold`, `distance`, `weight`, `bias`.
        scores: the cross-validated scores of all locations.
        directions: the directions of all locations, by location.
        provenance: how it was made, for the library.
    """

    model: str
    method: str
    at: str
    layer: int | None
    direction: Direction
    scores: list[LayerScore]
    directions: dict[str, Direction] = field(repr=False)
    provenance: dict[str, Any] = field(repr=False)

    @property
    def vector(self) -> Any:
        """The chosen direction, float32 `[hidden]`, of unit length."""
        return self.direction.vector

    @property
    def score(self) -> LayerScore:
        """The scores of the chosen location."""
        return next(one for one in self.scores if one.at == self.at)

    def steer(self, scale: Any = 1.0, **more: Any) -> Steer:
        """A `Steer` by the direction; a scale of `direction.distance` is the way from one mean to the other."""
        return Steer(self.at, self.vector, scale=scale, **more)

    def probe(self, name: str, **more: Any) -> Probe:
        """A `Probe` that is positive on the side of the positive kind."""
        one = self.direction
        return Probe(name, self.at, weight=one.weight, bias=one.bias, **more)

    def entry(self, kind: str = "vector") -> tuple[Any, dict[str, Any]]:
        """The arrays and the options with which `Library.put` takes the direction: `"vector"` or `"probe"`.

        Raises:
            ValueError: `kind` is neither.
        """

        import numpy as np

        if kind not in ("vector", "probe"):
            raise ValueError(f"kind: expected 'vector' or 'probe', got {shown(kind)}")
        one, score = self.direction, self.score
        arrays = one.vector if kind == "vector" else {"weight": one.weight, "bias": np.float32(one.bias)}
        effect = {name: getattr(score, name) for name in ("auroc", "accuracy", "separation")}
        settings = {"distance": one.distance, "threshold": one.threshold}
        options = {"kind": kind, "model": self.model, "at": self.at, "provenance": self.provenance}
        return arrays, {**options, "effect": {"cross_validated": effect}, "settings": settings}

    def plot(self) -> str:
        """An SVG of the scores by layer."""
        layers = [float(number if one.layer is None else one.layer) for number, one in enumerate(self.scores)]
        lines = {name: [getattr(one, name) for one in self.scores] for name in ("auroc", "separation")}
        return lines_svg(f"{self.method} of {self.model}", "layer", layers, lines)

    def _repr_svg_(self) -> str:
        return self.plot()

    def __repr__(self) -> str:
        return (
            f"Extraction({self.method}, {self.at}, auroc={self.score.auroc:.3f}, accuracy={self.score.accuracy:.3f}, "
            f"distance={self.direction.distance:.4g})"
        )


async def extract(
    client: Harvests, model: Any, positive: Iterable[Any], negative: Iterable[Any], options: ExtractOptions
) -> Extraction:
    """`Client.extract`."""
    check_names(options, ExtractOptions)
    method, which = options.get("method", "difference_of_means"), options.get("token", "last")
    for name, value, words in (("method", method, METHODS), ("token", which, ("last", "mean"))):
        if value not in words:
            raise TraceRejected(name, f"expected one of {', '.join(map(repr, words))}, got {shown(value)}")
    folds = check_count("folds", options.get("folds", 5))
    kinds = [_prompts("positive", positive, folds), _prompts("negative", negative, folds)]
    positions = options.get("positions")
    if positions is not None and not isinstance(positions, slice):
        raise TraceRejected("positions", f"expected a slice, got {shown(positions)}")
    served = await client.models.get(model) if isinstance(model, str) else model
    at = options.get("at", "residual(*)")
    places = _places(served, at)
    if (wanted := options.get("layer")) is not None and wanted not in [place[1] for place in places]:
        raise TraceRejected("layer", f"{at!r} has no layer {shown(wanted)}")
    with ExitStack() as stack:
        to = options.get("to") or stack.enter_context(tempfile.TemporaryDirectory())
        # The engine sends the last position alone where nothing else is asked for.
        reads = Probe(_TENSOR, at, positions="last" if which == "last" and positions is None else "prompt")
        if "key" in options.get("harvest", {}):
            raise TraceRejected("harvest.key", "expected no key: the prompts go by their order in the two lists")
        given = {**({} if positions is None else {"positions": positions}), **options.get("harvest", {})}
        done = await client.harvest(served, [*kinds[0], *kinds[1]], [reads], to=to, **given)
        if done.failed:
            raise TraceRejected("positive", f"{done.failed} of all prompts failed: with to=... the harvest lists them")
        read = partial(_activations, to, [place[0] for place in places], which, len(kinds[0]))
        activations = await anyio.to_thread.run_sync(read)
    made = await anyio.to_thread.run_sync(partial(_directions, activations, places, method, folds))
    scores = [score for score, _ in made.values()]
    best = max(scores, key=lambda one: (one.layer == wanted, round(one.auroc, 6), one.separation))
    provenance = {
        "method": method,
        "token": which,
        "positions": None if positions is None else [positions.start, positions.stop, positions.step],
        "at": at,
        "folds": folds,
        "prompts": {"positive": len(kinds[0]), "negative": len(kinds[1])},
        "revision": served.info.revision,
        "layers": {one.at: round(one.auroc, 4) for one in scores},
    }
    directions = {one.at: direction for one, direction in made.values()}
    return Extraction(
        served.info.name, method, best.at, best.layer, directions[best.at], scores, directions, provenance
    )


def _prompts(field_: str, given: Iterable[Any], folds: int) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TraceRejected(field_, f"expected a list of prompts, got {shown(given)}")
    prompts = list(given)
    if folds < 2 or len(prompts) < folds:
        raise TraceRejected(field_, f"expected at least as many prompts as folds, and 2 folds; got {len(prompts)}")
    return prompts


def _places(served: Any, at: Any) -> list[tuple[str, int | None, str]]:
    """For each location its tensor in the harvest, its layer, and its own `at`."""
    try:
        sites, pattern = find_sites(served.tree, at)
    except (ValueError, TypeError) as error:
        raise TraceRejected("at", str(error)) from None
    if not pattern:
        layer = int(sites[0].path.rpartition(".")[2]) if sites[0].value == "residual" else None
        return [(_TENSOR, layer, at)]
    if re.fullmatch(r"residual\(.*\)", at) is None:
        raise TraceRejected("at", f"expected layers, as 'residual(*)', or one location, got {at!r}")
    layers = [int(site.path.rpartition(".")[2]) for site in sites]
    return [(f"{_TENSOR}.{layer}", layer, f"residual({layer})") for layer in layers]


def _activations(to: Any, tensors: Sequence[str], which: str, positive: int) -> dict[str, tuple[Any, Any]]:
    """For each tensor the activations of both kinds, float32 `[prompts, hidden]`."""

    import numpy as np

    rows: dict[str, dict[int, Any]] = {name: {} for name in tensors}
    for prompt in tracewire.harvest.open(to):
        for name in tensors:
            if name not in prompt.arrays:
                raise TraceRejected("positions", f"prompt {prompt.key} has no token at these positions")
            positions = prompt.positions[name]
            order = np.argsort(positions, kind="stable")
            inside = prompt[name][order].astype(np.float32)[positions[order] < prompt.prompt_tokens]
            if not len(inside):
                raise TraceRejected("positions", f"prompt {prompt.key} has no token at these positions")
            rows[name][int(prompt.key)] = inside[-1].copy() if which == "last" else inside.mean(0)
    both = {name: np.stack([found_[key] for key in sorted(found_)]) for name, found_ in rows.items()}
    return {name: (stacked[:positive], stacked[positive:]) for name, stacked in both.items()}


def _directions(
    activations: Mapping[str, Any], places: Sequence[tuple[str, int | None, str]], method: Method, folds: int
) -> dict[str, tuple[LayerScore, Direction]]:
    made = {}
    for name, layer, at in places:
        positive, negative = activations[name]
        direction = found(positive, negative, method)
        scores = cross_validated(positive, negative, method, folds)
        made[at] = LayerScore(layer, at, *scores, direction.distance), direction
    return made
