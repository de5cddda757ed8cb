"""The rows of a step with drafts, with speculative decoding.

A drafted request has a row for its next token and one for each draft. Each of these rows is served as the row of a step
of its own would be: edits change it, reads read it. When the model has sampled, it is known how many drafts were taken.
What was read of the others is dropped on the device, before anything is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .ops import Declaration
from .spans import Chunk

__all__ = ["Served", "pieces_of"]


@dataclass(slots=True)
class Served:
    """A request's declared interventions in a plan.

    Attributes:
        declaration: the interventions.
        end: the position behind the request's last row in the plan's first step.
        index: of the token that this step samples first; negative if it samples none.
        drafts: how many of the rows are drafts.
        taken: how many drafts the model took. None, until it has sampled.
    """

    declaration: Declaration
    end: int
    index: int
    drafts: int = 0
    taken: int = 0

    @property
    def rejected(self) -> int:
        """How many of the last rows do not count."""
        return self.drafts - self.taken


def pieces_of(chunk: Chunk, drafts: int) -> Iterator[tuple[int, Chunk]]:
    """A request's rows in a step with so many drafts, in pieces: those up to its next token's, then each draft's.

    Each piece comes with its number.
    """
    own = chunk.count - drafts
    yield 0, Chunk(chunk.start, chunk.first, own, chunk.prompt)
    for place in range(drafts):
        yield place + 1, Chunk(chunk.start + own + place, chunk.first + own + place, 1, chunk.prompt)
