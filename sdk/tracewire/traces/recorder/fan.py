"""A fan: siblings of one trace from one token on, at different live values, read side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from tracewire.checks import shown
from tracewire.errors import TextChanged, TracewireError
from tracewire.traces.output import Gap, Output, Restarted
from tracewire.traces.readers import Reader
from tracewire_bus.transport.errors import first_error

from .planning import Place, planned_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracewire.traces.output import Item
    from tracewire.traces.state import Result
    from tracewire_bus.wire.messages import Submission

    from .recording import Recording

__all__ = ["Fan", "FanStep", "ForkedTrace", "forked"]


class ForkedTrace(Protocol):
    """A sibling: a `Trace`, in what a fan needs of it. `Trace` has more."""

    @property
    def id(self) -> str:
        """The trace's id."""

    async def start(self) -> None:
        """Submit it."""

    async def aclose(self) -> None:
        """Stop reading, and cancel it if it runs."""

    async def __anext__(self) -> Item:
        """Its next item."""

    async def result(self) -> Result:
        """Its result."""

    async def steer(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> int:
        """Change its live parameters."""


class FanStep(msgspec.Struct, frozen=True):
    """One token of each sibling.

    Attributes:
        index: the token's index, the same in all siblings.
        token_ids: the token of each sibling; None for one that has ended.
        texts: the text of each, `""` where a token's text came with an earlier or later one.
        same: for each sibling, whether all its tokens up to this one are those of the first sibling.
        distances: for each sibling, the distance of its distribution at this token from the first sibling's, from 0 to
            1; None without `logprobs`. It is half the sum of the differences of the probabilities of the likeliest
            tokens that are known of both, and so a lower bound of the total variation.
    """

    index: int
    token_ids: list[int | None]
    texts: list[str]
    same: list[bool]
    distances: list[float | None]


class _Sibling:
    """The tokens of one sibling that were read."""

    def __init__(self, trace: ForkedTrace) -> None:
        self.trace = trace
        self.tokens: list[tuple[int, str, dict[int, float] | None]] = []
        self.ended = False
        self.error: TracewireError | None = None
        #: The text of `tokens` that comes again, after a restart or a gap.
        self._again = ""
        #: New text that came with tokens that were here already: it goes to the next new token.
        self._left = ""

    async def reach(self, index: int) -> tuple[int, str, dict[int, float] | None] | None:
        """The token of this index, once it is here; None if the sibling has ended before."""
        while len(self.tokens) <= index and not self.ended:
            try:
                self._take(await anext(self.trace))
            except StopAsyncIteration:
                self.ended = True
            except TracewireError as error:
                self.ended, self.error = True, error
        return self.tokens[index] if index < len(self.tokens) else None

    def _take(self, item: Item) -> None:
        """Take an item. The caller has got all tokens that are here: it reads on only when it needs more.

        Raises:
            TextChanged: the sibling runs again, and its tokens or its text differ from those that are here.
        """
        match item:
            case Output():
                texts = _texts(item.text, item.token_strings, len(item.token_ids))
                self._place(item.index, item.token_ids, texts, item.logprobs)
            case Restarted():
                self._begin_again()
            case Gap():
                # A restart may be among the trimmed events.
                self._begin_again()
                for choice in (choice for invoke in item.state.invokes for choice in invoke.choices):
                    texts = _texts(choice.text, choice.token_strings, len(choice.token_ids))
                    self._place(0, choice.token_ids, texts, None)

    def _begin_again(self) -> None:
        """The tokens that are here come again, with their text."""
        self._again, self._left = "".join(text for _, text, _ in self.tokens), ""

    def _place(
        self, index: int, token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[Any] | None
    ) -> None:
        """Put tokens at their indices. Those that are here already are compared."""
        for place, text in enumerate(texts):
            self._left += self._beyond(text)
            if place == len(token_ids):
                # Text without a token.
                break
            token, at = token_ids[place], index + place
            if at < len(self.tokens):
                if self.tokens[at][0] != token:
                    raise self._changed()
                continue
            likely = None
            if logprobs is not None and place < len(logprobs):
                likely = {one: entry[0] for one, entry in logprobs[place].items()}
            self.tokens.append((token, self._left, likely))
            self._left = ""

    def _beyond(self, text: str) -> str:
        """The part of a text that is not here yet."""
        known = self._again[: len(text)]
        if not text.startswith(known):
            raise self._changed()
        self._again = self._again[len(known) :]
        return text[len(known) :]

    def _changed(self) -> TextChanged:
        return TextChanged(self.trace.id, sum(len(text) for _, text, _ in self.tokens))


def _texts(text: str, strings: Sequence[str] | None, count: int) -> list[str]:
    """The text of each of so many tokens. The first has all of it where the tokens' strings are not known."""
    if strings is not None and len(strings) == count and "".join(strings) == text:
        return list(strings)
    return [text, *[""] * (count - 1)]


class Fan(Reader):
    """Siblings of one trace: an async iterator of `FanStep`s, from the first token that may differ to the last.

    Entering or starting it starts the siblings; leaving it cancels those that run. Each sibling is a trace of its own,
    in `traces`, which any client can read and steer.

    Attributes:
        at: the index of the first token that may differ.
        live: the live values of each sibling.
        traces: the siblings.
    """

    def __init__(self, traces: Sequence[ForkedTrace], at: int, live: Sequence[Mapping[str, Any]]) -> None:
        self.traces = list(traces)
        self.at = at
        self.live = [dict(values) for values in live]
        self._siblings = [_Sibling(trace) for trace in traces]
        self._next = at
        self._same = [True] * len(self.traces)
        #: For each sibling, the index of its first token that is not the first sibling's; None while there is none.
        self.first_differences: list[int | None] = [None] * len(self.traces)

    async def start(self) -> None:
        """Submit all siblings. A second call does nothing.

        Raises:
            TracewireError: one cannot be submitted: see `Trace.start`. Those that were are cancelled.
        """
        try:
            async with anyio.create_task_group() as group:
                for trace in self.traces:
                    group.start_soon(trace.start)
        except BaseException as error:
            # Also when the caller was cancelled: no other code closes a fan that was not entered.
            await self.aclose()
            raise first_error(error) from None

    async def aclose(self) -> None:
        """Cancel the siblings that run. Idempotent."""
        with anyio.CancelScope(shield=True):
            for trace in self.traces:
                await trace.aclose()

    async def __anext__(self) -> FanStep:
        """The next token of each sibling, once all that run have it.

        Raises:
            StopAsyncIteration: all have ended.
            TracewireError: a sibling failed, once the others have ended: the error of `Trace`.
        """
        index = self._next
        found = [await sibling.reach(index) for sibling in self._siblings]
        if not any(found):
            for sibling in self._siblings:
                if sibling.error is not None:
                    raise sibling.error
            raise StopAsyncIteration
        self._next += 1
        first = found[0]
        for place, one in enumerate(found):
            differs = (one and one[0]) != (first and first[0])
            if differs and self._same[place]:
                self._same[place], self.first_differences[place] = False, index
        return FanStep(
            index,
            [one and one[0] for one in found],
            ["" if one is None else one[1] for one in found],
            self._same[:],
            [_distance(first and first[2], one and one[2]) for one in found],
        )

    async def results(self) -> list[Result]:
        """The results of all siblings, in order, once they have ended.

        Raises:
            TraceFailed, InterventionError, StateMismatch: a sibling's, as `Trace.result` raises it.
        """
        return [await trace.result() for trace in self.traces]

    def __repr__(self) -> str:
        return f"<Fan of {len(self.traces)} siblings from token {self.at} on>"


def _distance(one: dict[int, float] | None, other: dict[int, float] | None) -> float | None:
    """Half the sum of the differences of probabilities, over the tokens that both know."""
    if one is None or other is None:
        return None
    shared = one.keys() & other.keys()
    missing = [math.exp(side[token]) for side in (one, other) for token in side.keys() - shared]
    least = [min(math.exp(value) for value in side.values()) if side else 0.0 for side in (one, other)]
    # A token that only one of them lists is at most as likely in the other as that one's least likely.
    apart = sum(abs(math.exp(one[token]) - math.exp(other[token])) for token in shared)
    return min(1.0, (apart + sum(max(0.0, value - max(least)) for value in missing)) / 2)


def forked(
    make: Callable[[Submission], ForkedTrace],
    client: str,
    recording: Recording,
    live: Any,
    *,
    at: int | None,
    invoke: int,
    choice: int,
    logprobs: int | None,
) -> Fan:
    """The fan of a recorded trace, not started. `make` makes a trace of a submission."""
    if isinstance(live, Mapping | str) or not isinstance(live, Sequence) or not live:
        raise ValueError(f"live: expected a list of live values, one dict for each sibling, got {shown(live)}")
    for number, values in enumerate(live):
        if not isinstance(values, Mapping):
            raise ValueError(f"live[{number}]: expected a dict of live parameters, got {shown(values)}")
    if at is None:
        state = recording.state()
        choices = state.invokes[invoke].choices if 0 <= invoke < len(state.invokes) else []
        at = len(choices[choice].token_ids) if 0 <= choice < len(choices) else 0
    if type(at) is not int:
        raise ValueError(f"at: expected the index of a token, got {shown(at)}")
    place = Place(at, invoke, choice)
    submissions = [planned_fork(recording, client, place, dict(one), logprobs) for one in live]
    return Fan([make(submission) for submission in submissions], at, live)
