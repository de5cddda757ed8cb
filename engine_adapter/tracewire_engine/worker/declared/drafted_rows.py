"""The rows of a step with drafts, with speculative decoding.

A drafted request has a row for its next token and one for each draft. Each of these rows is served as the row of a step
of its own would be: edits change it, reads read it. When the model has sampled, it is known how many drafts were taken.
What was read of the others is dropped on the device, before anything is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .ops import Declaration
from .spans import Chunk

__all__ = ["Served", "pieces_of"]


@dataclass(slots=True)
class Served:
    """A request's declared interventions in a plan, and in those behind it in which the request goes on likewise.

    Steps are counted (`ServedRequests.step`), and each has one more token of the request than the one before.

    Attributes:
        declaration: the interventions.
        end: the position behind the request's last row in step `since`.
        index: of the token that step `since` samples first; negative if it samples none.
        drafts: how many of the rows are drafts.
        taken: how many drafts the model took. None, until it has sampled.
        row: the request's first row in the last plan's flat batch.
        since: the number of the first step in which it is served so.
        generates: whether the request has one row, which follows what it has generated.
        lasting: whether later steps may serve it so: it generates, and its row was not read before.
        step: the number of the last step that began a plan with it.
        owner: the request (the `id` of its declared interventions) and the draft of its first row.
    """

    declaration: Declaration
    end: int
    index: int
    drafts: int = 0
    taken: int = 0
    row: int = 0
    since: int = 0
    generates: bool = False
    lasting: bool = False
    step: int = 0
    owner: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = id(self.declaration), 0

    @property
    def rejected(self) -> int:
        """How many of the last rows do not count."""
        return self.drafts - self.taken

    def index_in(self, step: int) -> int:
        """The index of the token that a step samples first."""
        return self.index + step - self.since

    def position_in(self, step: int) -> int:
        """The position of the request's last row in a step."""
        return self.end - 1 + step - self.since

    def chunk(self, step: int) -> Chunk:
        """What a step computes of the request, if it is `lasting`."""
        return Chunk(self.row, self.position_in(step), 1, self.end - self.index)

    def settle(self, step: int) -> None:
        """Note what the request has read by the end of a step, the last one that served it so."""
        declaration = self.declaration
        declaration.seen = max(declaration.seen, self.end - self.rejected + step - self.since)


def pieces_of(chunk: Chunk, drafts: int) -> Iterator[tuple[int, Chunk]]:
    """A request's rows in a step with so many drafts, in pieces: those up to its next token's, then each draft's.

    Each piece comes with its number.
    """
    if not drafts:
        yield 0, chunk
        return
    own = chunk.count - drafts
    yield 0, Chunk(chunk.start, chunk.first, own, chunk.prompt)
    for place in range(drafts):
        yield place + 1, Chunk(chunk.start + own + place, chunk.first + own + place, 1, chunk.prompt)
