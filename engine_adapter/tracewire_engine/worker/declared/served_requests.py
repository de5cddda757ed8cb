"""How the requests of a step are served, which is mostly as in the step before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .conditions import Signals
from .drafted_rows import Served, pieces_of
from .gathering import Gathering
from .ops import Declaration
from .spans import Chunk

__all__ = ["ServedRequests"]


class ServedRequests:
    """The live requests with declared interventions, as the last plan served them.

    A service's batch changes every few steps. The requests that go on take little of the time in which a plan is made.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        #: How many steps have begun with live requests: the number of the step under way.
        self.step = 0
        self._known: dict[str, Served] = {}
        #: Requests of the last plan whose interventions had failed before it, unreported: each with its token's index.
        self.failed: list[tuple[Declaration, int]] = []

    def forget(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._known.pop(request_id, None)

    def serve(
        self,
        live: Mapping[str, Declaration],
        order: Iterable[tuple[str, int, int]],
        states: Mapping[str, Any],
        drafts: Mapping[str, Sequence[int]],
        gathering: Gathering,
    ) -> list[Served]:
        """Gather the interventions of a step's requests, in the order of the batch.

        Args:
            live: the declared interventions, by the scheduler's names of requests.
            order: of each request of the step its name, how many tokens were computed before, and how many the step
                computes.
            states: vLLM's, by the same names.
            drafts: those of these tokens that are drafts, by the same names.
            gathering: takes the interventions.
        """
        found: list[Served] = []
        self.failed = []
        step, known_of, start = self.step, self._known, 0
        for request_id, first, count in order:
            declaration = live.get(request_id)
            if declaration is not None and count and declaration.failure is not None and not declaration.reported:
                end = first + count - len(drafts.get(request_id, ()))
                self.failed.append((declaration, end - states[request_id].num_prompt_tokens))
            elif declaration is not None and count and declaration.failure is None:
                known = known_of.get(request_id)
                if (
                    known is not None
                    and known.lasting
                    and count == 1
                    and known.position_in(step) == first
                    and not drafts
                ):
                    known.step, known.row, declaration.rows = step, start, (start, 1)
                    gathering.add_lasting(known)
                    found.append(known)
                else:
                    chunk = Chunk(start, first, count, states[request_id].num_prompt_tokens)
                    found.append(self._serve(declaration, chunk, len(drafts.get(request_id, ())), gathering))
            start += count
        return found

    def _serve(self, declaration: Declaration, chunk: Chunk, drafts: int, gathering: Gathering) -> Served:
        """Serve a request's rows, of which the last ones are drafts, in another way than before."""
        known = self._known.get(declaration.id)
        # A step that is planned again has served nothing yet.
        if known is not None and known.since < self.step:
            known.settle(self.step - 1)
        declaration.begin_rows(self._signals, chunk.start, chunk.count, chunk.first)
        end = chunk.first + chunk.count
        index = end - drafts - chunk.prompt
        generates = chunk.count == 1 and index > 0 and not drafts
        served = Served(
            declaration,
            end,
            index,
            drafts,
            row=chunk.start,
            since=self.step,
            generates=generates,
            lasting=generates and chunk.first >= declaration.seen,
            step=self.step,
        )
        self._known[declaration.id] = served
        if served.lasting:
            gathering.add_lasting(served)
        else:
            for draft, piece in pieces_of(chunk, drafts):
                gathering.add(declaration, piece, draft)
        return served

    def settle(self, earlier: Iterable[Served]) -> None:
        """Note what those requests of the plan before have read that the step leaves out."""
        for served in earlier:
            if served.step != self.step:
                served.settle(self.step - 1)
                if self._known.get(served.declaration.id) is served:
                    del self._known[served.declaration.id]
