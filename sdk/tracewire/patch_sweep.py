"""Activation patching over layers and positions: `Client.patch_sweep`.

The sweep runs the clean prompt once and saves its values at all layers and positions. Then it runs the corrupted prompt
once for each layer and position, with that one value of the clean prompt in its place, and measures the next token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio

from tracewire_bus.domain.intervention_checks import find_sites
from tracewire_bus.domain.patch_checks import prompt_positions
from tracewire_bus.wire.messages import Patch, Probe

from .checks import check_count, shown
from .errors import TraceRejected
from .options import SweepOptions, check_names

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.domain.tree import ModuleTree

__all__ = ["Metric", "PatchSweep", "Submits", "patch_sweep"]

Metric: TypeAlias = int | str | tuple[int | str, int | str] | Callable[[Any], float]
"""What a sweep measures: the log-probability of a token (its id, or its text) as the next one; of two tokens the
difference, first less second; or a function of a run's `Result`."""

#: Layers that one trace of the clean prompt reads.
_LAYERS = 32
_VALUES = "values_"


class Submits(Protocol):
    """A client, as far as a sweep needs it."""

    @property
    def models(self) -> Any: ...

    @property
    def trace(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class PatchSweep:
    """The outcome of a sweep.

    Attributes:
        values: the metric of the corrupted prompt with the value of the clean one at a layer and a position, float64
            `[layers, positions]`.
        clean, corrupted: the metric of either prompt without a patch.
        layers, positions: what the rows and the columns stand for.
        tokens: the strings of the corrupted prompt's tokens at the positions.
        traces: how many traces ran.
        seconds: how long the sweep took.
    """

    values: Any
    clean: float
    corrupted: float
    layers: list[int]
    positions: list[int]
    tokens: list[str]
    traces: int
    seconds: float

    @property
    def normalized(self) -> np.ndarray[Any, Any]:
        """The values on a scale where the corrupted prompt is 0 and the clean one is 1, `[layers, positions]`.

        Raises:
            ZeroDivisionError: both prompts measure the same.
        """
        if self.clean == self.corrupted:
            raise ZeroDivisionError(f"both prompts measure {self.clean}: the metric does not tell them apart")
        found: np.ndarray[Any, Any] = (self.values - self.corrupted) / (self.clean - self.corrupted)
        return found

    def __repr__(self) -> str:
        shape = f"{len(self.layers)} layers, {len(self.positions)} positions"
        return f"PatchSweep({shape}, clean={self.clean:.4g}, corrupted={self.corrupted:.4g}, {self.traces} traces)"


@dataclass(frozen=True)
class _Run:
    """The runs of one sweep: how each is submitted, and what is measured of it."""

    client: Submits
    model: Any
    metric: Callable[[Any, Mapping[int, Any]], float]
    options: Mapping[str, Any]

    async def __call__(self, prompt: Any, interventions: Sequence[Any] = ()) -> tuple[float, Any]:
        """The metric of a prompt's run, and its result."""
        more = {**self.options, "interventions": [*self.options.get("interventions", ()), *interventions]}
        async with self.client.trace(self.model, prompt, **more) as trace:
            found: Mapping[int, Any] = {}
            async for output in trace.outputs():
                if output.index == 0 and output.logprobs:
                    found = output.logprobs[0]
            result = await trace.result()
        return self.metric(result, found), result


async def patch_sweep(
    client: Submits, model: Any, clean: Any, corrupted: Any, metric: Metric, options: SweepOptions
) -> PatchSweep:
    """`Client.patch_sweep`."""
    given: dict[str, Any] = {**options}
    check_names(given, SweepOptions)
    began = time.monotonic()
    at = given.pop("at", "residual({layer})")
    concurrency = check_count("concurrency", given.pop("concurrency", 32))
    positions, wanted = given.pop("positions", "prompt"), given.pop("layers", "*")
    served = await client.models.get(model) if isinstance(model, str) else model
    layers = _layers(served.tree, wanted, at)
    measure, tokens = _measured(served, metric)
    given = {"max_tokens": 1, "temperature": 0.0, "token_strings": True, **given}
    if tokens:
        given["logprob_token_ids"] = tokens
    run = _Run(client, served, measure, given)
    base, result = await run(corrupted)
    prompt, strings = result.accepted.prompt_tokens[0], result.accepted.prompt_token_strings[0]
    chosen = _positions(positions, prompt)
    best, values = await _clean_values(run, clean, prompt, at, layers)
    found = [[0.0] * len(chosen) for _ in layers]
    cells = iter([(row, column) for row in range(len(layers)) for column in range(len(chosen))])

    async def work() -> None:
        # One iterator for all workers: each takes the next cell when it has ended one.
        for row, column in cells:
            layer, position = layers[row], chosen[column]
            patch = Patch(at.format(layer=layer), values[layer][position], positions=position)
            try:
                found[row][column], _ = await run(corrupted, [patch])
            except Exception as error:
                error.add_note(f"in the sweep: layer {layer}, position {position}")
                raise

    await _all(work, min(concurrency, len(layers) * len(chosen)))
    import numpy as np

    clean_traces = -(-len(layers) // _LAYERS)
    return PatchSweep(
        values=np.array(found, np.float64),
        clean=best,
        corrupted=base,
        layers=layers,
        positions=chosen,
        tokens=[strings[position] for position in chosen],
        traces=1 + clean_traces + len(layers) * len(chosen),
        seconds=time.monotonic() - began,
    )


async def _all(work: Callable[[], Any], count: int) -> None:
    """Run `work` in so many tasks. The first error of any ends the others, and is raised as it is."""
    failed: list[Exception] = []

    async def guarded(group: Any) -> None:
        try:
            await work()
        except Exception as error:
            failed.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(guarded, group)
    if failed:
        raise failed[0]


async def _clean_values(
    run: _Run, clean: Any, prompt: int, at: str, layers: Sequence[int]
) -> tuple[float, dict[int, Any]]:
    """The metric of the clean prompt, and by layer its values `[positions, width]`."""
    metric, values = 0.0, {}
    for start in range(0, len(layers), _LAYERS):
        part = layers[start : start + _LAYERS]
        probes = [Probe(f"{_VALUES}{layer}", at.format(layer=layer), positions="prompt") for layer in part]
        metric, result = await run(clean, probes)
        tokens = result.accepted.prompt_tokens[0]
        if tokens != prompt:
            raise TraceRejected(
                "corrupted", f"expected as many tokens as the clean prompt has, which are {tokens}, got {prompt}"
            )
        for layer in part:
            pieces = await result.load(f"{_VALUES}{layer}", exact=True)
            values[layer] = pieces[0] if len(pieces) == 1 else _joined(pieces)
    return metric, values


def _joined(pieces: Sequence[Any]) -> Any:
    """The values of a prompt that the engine computed in several steps."""
    import numpy as np

    return np.concatenate(pieces)


def _layers(tree: ModuleTree, wanted: Any, at: Any) -> list[int]:
    """The numbers of the layers that a sweep patches."""
    if not isinstance(at, str) or "{layer}" not in at:
        raise TraceRejected("at", f"expected a location with {{layer}} in it, got {shown(at)}")
    if not isinstance(wanted, str | int) and isinstance(wanted, Iterable):
        found = [layer for one in wanted for layer in _layers(tree, one, at)]
        if not found or len(set(found)) < len(found):
            raise TraceRejected("layers", f"expected one or more layers, each once, got {shown(wanted)}")
        return found
    try:
        sites, _ = find_sites(tree, f"residual({wanted})")
        layers = [int(site.path.rpartition(".")[2]) for site in sites]
    except ValueError as error:
        raise TraceRejected("layers", str(error)) from None
    for layer in layers:
        try:
            find_sites(tree, at.format(layer=layer))
        except (ValueError, LookupError) as error:
            raise TraceRejected("at", str(error)) from None
    return layers


def _positions(wanted: Any, prompt: int) -> list[int]:
    given = wanted if isinstance(wanted, str | int) else [int(one) for one in wanted]
    try:
        found = prompt_positions(given, prompt)
    except ValueError as error:
        raise TraceRejected("positions", str(error)) from None
    if found is None:
        raise TraceRejected("positions", f"expected positions of the prompt, got {shown(wanted)}")
    return found


def _measured(model: Any, metric: Any) -> tuple[Callable[[Any, Mapping[int, Any]], float], list[int]]:
    """What measures a run, of its result and its log-probabilities; and the tokens whose log-probabilities it needs."""
    if callable(metric):

        def call(result: Any, _: Mapping[int, Any]) -> float:
            value = metric(result)
            try:
                return float(value)
            except (TypeError, ValueError):
                raise TypeError(f"metric: expected a number of the function, got {shown(value)}") from None

        return call, []
    given = metric if isinstance(metric, tuple | list) else (metric,)
    if len(given) not in (1, 2) or not all(type(one) in (int, str) for one in given):
        raise TraceRejected("metric", f"expected a token, two tokens or a function, got {shown(metric)}")
    tokens = [_token(model, one) for one in given]

    def difference(_: Any, logprobs: Mapping[int, Any]) -> float:
        lacking = [token for token in tokens if token not in logprobs]
        if lacking:
            raise TraceRejected("metric", f"the engine has sent no log-probability of token {lacking[0]}")
        first, *other = (float(logprobs[token][0]) for token in tokens)
        return first - sum(other)

    return difference, tokens


def _token(model: Any, given: int | str) -> int:
    if isinstance(given, int):
        if not 0 <= given < (model.info.vocabulary or given + 1):
            raise TraceRejected("metric", f"expected a token id below {model.info.vocabulary}, got {given}")
        return given
    ids = model.tokenizer.encode(given, add_special_tokens=False)
    if len(ids) != 1:
        raise TraceRejected("metric", f"expected the text of one token, got {given!r}, which is {len(ids)} tokens")
    return int(ids[0])
