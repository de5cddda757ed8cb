"""The methods of a client that run many traces and put their outcomes together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Unpack

from tracewire_bus.wire.messages import Probe

from .extract.extraction import Extraction, ExtractOptions, extract
from .extract.retroactive import ProbeReading, apply_probe
from .extract.sweep import Score, StrengthOptions, StrengthSweep, strength_sweep
from .options import SweepOptions
from .patch_sweep import Metric, PatchSweep, patch_sweep
from .submission import PromptInput
from .traces.model import Model
from .traces.recorder.recording import Recording
from .traces.session import Session

__all__ = ["Experiments"]


class Experiments:
    """A base of `Client`."""

    _session: Session

    async def patch_sweep(
        self,
        model: Model | str,
        clean: PromptInput,
        corrupted: PromptInput,
        *,
        metric: Metric,
        **options: Unpack[SweepOptions],
    ) -> PatchSweep:
        """Patch the values of one prompt into another, at each layer and position, and measure the next token.

            prompts = "The Eiffel Tower is in", "The Space Needle is in"
            sweep = await client.patch_sweep("demo", *prompts, metric=(" Paris", " Seattle"))
            sweep.normalized  # [layers, positions]; 1 where a value of the clean prompt brings back its answer

        Both prompts must have equally many tokens. `metric` is a token (its id, or its text), whose log-probability as
        the next token is measured; or two tokens, for the difference of their log-probabilities, which is that of
        their logits; or a function of each run's `Result`. `SweepOptions` lists the options.

        The sweep runs `layers` x `positions` traces of one token each, `concurrency` at once, and a few more for the
        unpatched prompts. The first error ends all of them. Cancelling the call cancels its traces.

        Raises:
            UnknownModel: no engine serves the model.
            UnknownOption: a keyword is neither an option nor a sampling param.
            TraceRejected: the prompts differ in length, or a layer, a position, a token or an option cannot be.
            TokenizerUnavailable: a token is given as text, and the model's tokenizer is not on this machine.
            TraceEnded: one of the traces was cancelled, expired or failed; a note names its layer and position.
        """
        self._session.open_bus()
        client: Any = self
        return await patch_sweep(client, model, clean, corrupted, metric, options)

    async def extract(
        self,
        model: Model | str,
        positive: Iterable[PromptInput],
        negative: Iterable[PromptInput],
        **options: Unpack[ExtractOptions],
    ) -> Extraction:
        """Find the direction between two kinds of prompts at each layer, and choose the layer by cross-validation.

            found = await client.extract("demo", code, prose, method="difference_of_means", token="mean")
            arrays, options = found.entry()
            await client.library.put("code", arrays, **options)

        The engine's activations are harvested: of the last token of each prompt, or the mean over its tokens. `method`
        is `"difference_of_means"` (the default), `"principal_components"` of the differences between pairs, or
        `"logistic"`, a logistic probe, for which scikit-learn is needed. The layer with the best AUROC of held-out
        prompts is chosen; of equal ones, that of the widest separation. `ExtractOptions` lists the options.

        Raises:
            UnknownModel: no engine serves the model.
            UnknownOption: a keyword is no option.
            TraceRejected: an option is wrong, there are fewer prompts than folds, or a prompt failed.
            HarvestConflict: `to` has a harvest of something else.
            LibraryMissing: the extra `tracewire[harvest]`, or `[extract]` for a logistic probe, is not installed.
            TracewireError: a harvest's other errors.
        """
        self._session.open_bus()
        client: Any = self
        return await extract(client, model, positive, negative, options)

    async def strength_sweep(
        self,
        model: Model | str,
        vector: Any,
        prompts: Iterable[PromptInput],
        strengths: Iterable[float],
        *,
        score: Score,
        **options: Unpack[StrengthOptions],
    ) -> StrengthSweep:
        """Steer each prompt by a vector at several strengths, and score what the model writes.

            sweep = await client.strength_sweep("demo", found, prompts, [-20, 0, 20], score=is_code)
            [(row.strength, row.score, row.perplexity) for row in sweep.rows]

        `vector` is an array, the name of a library's entry, or an `Extraction`. `score` is a function of a text, async
        or not, or a `Probe`, whose mean over the tokens counts. The perplexity is that of the sampled tokens under the
        unsteered model, for which each text runs once more as a prompt. `StrengthOptions` lists the options. The first
        error ends all traces.

        Raises:
            UnknownModel: no engine serves the model.
            UnknownOption: a keyword is neither an option nor a sampling param.
            TraceRejected: an option or the vector is wrong.
            TraceFailed: one of the traces was cancelled, expired or failed.
        """
        self._session.open_bus()
        client: Any = self
        return await strength_sweep(client, model, vector, prompts, strengths, score, options)

    async def apply_probe(
        self,
        probe: Probe,
        *,
        harvest: str | PathLike[str] | None = None,
        traces: Sequence[str | Recording] | None = None,
        saves: str | None = None,
        concurrency: int = 32,
    ) -> Sequence[ProbeReading]:
        """Apply a probe to what was recorded before the probe existed. `probe.weight` may be a name of the library.

            await client.apply_probe(Probe("code", "residual(4)", weight="code"), harvest="acts")
            await client.apply_probe(Probe("code", "residual(4)", weight="code"), traces=["a", "b"], saves="stream")
            await client.apply_probe(Probe("code", "residual(4)", weight="code"), traces=["a", "b"])

        - `harvest`: over the activations at `probe.at` in a harvest. No engine is needed.
        - `traces` and `saves`: over the activations that the traces saved under that name. No engine is needed. The
          caller sees to it that they are those of `probe.at`.
        - `traces` alone: each trace's prompt and output run once more as one prompt, without the trace's interventions.
          So a trace that was steered is read as the unsteered model reads its text.

        A trace is an id, while Redis keeps the trace, or a `Recording`. Each choice of each prompt is a reading of its
        own, in the order of `traces`.

        Raises:
            TraceRejected: the probe, its weight or a source is wrong.
            UnknownEntry: the library has no entry of the weight's name.
            UnknownTrace: a trace is not kept any more.
            SaveMissing: a trace has no such save.
            HarvestMissing: there is no harvest.
        """
        self._session.open_bus()
        client: Any = self
        return await apply_probe(client, probe, harvest, traces, saves, concurrency)
