"""How far a harvest is."""

from __future__ import annotations

import msgspec

__all__ = ["HarvestProgress"]


class HarvestProgress(msgspec.Struct, frozen=True):
    """The progress of a harvest, or its outcome.

    Attributes:
        prompts: prompts whose traces have ended well in this run.
        failed: prompts whose traces failed in this run.
        skipped: prompts that were in the harvest before this run, or had failed before.
        total: prompts of the data set, where it has a length.
        shards: shards that this run has written. The rows of further prompts are in memory.
        tokens: tokens of the prompts, and sampled tokens.
        bytes: bytes of the values that were kept.
        seconds: how long the run has taken.
    """

    prompts: int = 0
    failed: int = 0
    skipped: int = 0
    total: int | None = None
    shards: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of values a second, over the whole run."""
        return self.bytes / self.seconds if self.seconds else 0.0
