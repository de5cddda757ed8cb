"""The methods of a client that run many traces and put their outcomes together."""

from __future__ import annotations

from typing import Any, Unpack

from .options import SweepOptions
from .patch_sweep import Metric, PatchSweep, patch_sweep
from .submission import PromptInput
from .traces.model import Model
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
