"""`client.strength_sweep`: what a model writes when it is steered at several strengths, with a score of each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol, TypeAlias

import anyio

from tracewire.checks import check_count, shown
from tracewire.errors import TraceRejected
from tracewire.options import SamplingOptions, check_names
from tracewire_bus.transport.errors import first_error
from tracewire_bus.wire.messages import Probe, Steer

from .extraction import Extraction
from .plots import lines_svg

__all__ = ["Score", "Strength", "StrengthOptions", "StrengthSweep", "SweepsStrengths", "strength_sweep"]

Score: TypeAlias = Probe | Callable[[str], float | Awaitable[float]]
"""A `Probe`, of which the mean over the sampled tokens counts, or a function of the text, such as a classifier."""


class StrengthOptions(SamplingOptions, total=False):
    """The keyword arguments of `Client.strength_sweep`: sampling params, and these.

    `at` is the location; an `Extraction` has its own. `perplexity` says whether the unsteered model's perplexity of the
    texts is measured. `concurrency` is how many traces run at once. Each prompt has the same seed at all strengths.
    """

    at: str
    perplexity: bool
    concurrency: int


class SweepsStrengths(Protocol):
    """A client, as far as a sweep needs it."""

    @property
    def models(self) -> Any: ...

    @property
    def trace(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Strength:
    """The outcome at one strength.

    Attributes:
        strength: the factor of the vector.
        score: the mean of `scores`, which has one number a prompt.
        perplexity: of all sampled tokens under the unsteered model; NaN if it was not measured.
        texts: what the model wrote, by prompt.
    """

    strength: float
    score: float
    scores: list[float]
    perplexity: float
    texts: list[str] = field(repr=False)


@dataclass(frozen=True)
class StrengthSweep:
    """The outcomes by strength, in the order in which the strengths were given."""

    rows: list[Strength]

    def plot(self) -> str:
        """An SVG of the mean score, and of the perplexity if it was measured, by strength."""
        rows = sorted(self.rows, key=lambda row: row.strength)
        lines = {"score": [row.score for row in rows]}
        if not any(math.isnan(row.perplexity) for row in rows):
            lines["perplexity"] = [row.perplexity for row in rows]
        return lines_svg("steering", "strength", [row.strength for row in rows], lines)

    def best(self, most_perplexity: float = math.inf) -> Strength:
        """The row of the greatest score among those of at most this perplexity.

        Raises:
            ValueError: there is none.
        """
        rows = [row for row in self.rows if not row.perplexity > most_perplexity]
        if not rows:
            raise ValueError(f"no strength has a perplexity of at most {most_perplexity:g}")
        return max(rows, key=lambda row: row.score)

    def _repr_svg_(self) -> str:
        return self.plot()


async def strength_sweep(
    client: SweepsStrengths,
    model: Any,
    vector: Any,
    prompts: Iterable[Any],
    strengths: Iterable[float],
    score: Score,
    options: Mapping[str, Any],
) -> StrengthSweep:
    """`Client.strength_sweep`."""
    check_names(options, StrengthOptions)
    sampling = dict(options)
    concurrency = check_count("concurrency", sampling.pop("concurrency", 32))
    measures = bool(sampling.pop("perplexity", True))
    at = sampling.pop("at", None)
    if isinstance(vector, Extraction):
        at, vector = at or vector.at, vector.vector
    if at is None:
        raise TraceRejected("at", "expected a location, as 'residual(4)'")
    if not isinstance(score, Probe) and not callable(score):
        raise TraceRejected("score", f"expected a Probe or a function of a text, got {shown(score)}")
    given, wanted = list(prompts), [float(one) for one in strengths]
    for name, values in (("prompts", given), ("strengths", wanted)):
        if not values:
            raise TraceRejected(name, "expected at least one")
    if measures and any(map(_has_media, given)):
        raise TraceRejected("perplexity", "expected False: the tokens of a prompt with media do not give it back")
    served = await client.models.get(model) if isinstance(model, str) else model
    run = _Run(client, served, score, {"max_tokens": 64, **sampling}, measures, anyio.Semaphore(concurrency))
    results: list[list[Any]] = [[None] * len(given) for _ in wanted]

    async def one(row: int, column: int) -> None:
        steer = Steer(at, vector, scale=wanted[row])
        results[row][column] = await run(given[column], steer, column)

    try:
        async with anyio.create_task_group() as group:
            for row in range(len(wanted)):
                for column in range(len(given)):
                    group.start_soon(one, row, column)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return StrengthSweep([_row(strength, found) for strength, found in zip(wanted, results, strict=True)])


def _has_media(prompt: Any) -> bool:
    """Whether a prompt has more than text: `multi_modal_data`, or such parts in a chat's messages."""
    if isinstance(prompt, Mapping):
        return bool(prompt.get("multi_modal_data"))
    messages = prompt if isinstance(prompt, list | tuple) else ()
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def _row(strength: float, found: Sequence[tuple[float, str, Sequence[float]]]) -> Strength:
    losses = [loss for _, _, of_tokens in found for loss in of_tokens]
    perplexity = math.exp(fmean(losses)) if losses else math.nan
    scores = [score for score, _, _ in found]
    return Strength(strength, fmean(scores), scores, perplexity, [text for _, text, _ in found])


@dataclass(frozen=True)
class _Run:
    """One steered text after another, with its score and the losses of its tokens."""

    client: SweepsStrengths
    model: Any
    score: Score
    sampling: Mapping[str, Any]
    perplexity: bool
    free: anyio.Semaphore

    async def __call__(self, prompt: Any, steer: Steer, number: int) -> tuple[float, str, list[float]]:
        async with self.free:
            options = dict(self.sampling)
            options["seed"] = (options.get("seed") or 0) + number
            reads = [self.score] if isinstance(self.score, Probe) else []
            # Even at a strength of 0, so that all texts are sampled by the same kernels.
            async with self.client.trace(self.model, prompt, interventions=[steer, *reads], **options) as trace:
                result = await trace.result()
            losses = await self._losses(result) if self.perplexity else []
            return await self._score(result), result.text, losses

    async def _score(self, result: Any) -> float:
        import numpy as np

        if isinstance(self.score, Probe):
            return float(np.mean(result.saves[self.score.name]))
        found = self.score(result.text)
        return float(await found if inspect.isawaitable(found) else found)

    async def _losses(self, result: Any) -> list[float]:
        """The negative log-likelihood of each sampled token under the unsteered model, in nats."""
        prompt, sampled = list(result.accepted.prompt_token_ids[0]), list(result.token_ids)
        # A prompt has to leave room for one more token.
        sampled = sampled[: self.model.info.max_model_len - 1 - len(prompt)]
        if not sampled:
            return []
        options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        if (lora := self.sampling.get("lora")) is not None:
            options["lora"] = lora
        async with self.client.trace(self.model, prompt + sampled, **options) as again:
            read = await again.result()
        steps = read.prompt_logprobs[0][len(prompt) :]
        return [-step[token][0] for token, step in zip(sampled, steps, strict=True)]
