"""The state of a trace: its events folded into text, tokens and saves, up to one event or to the end.

The caller may change the lists and dicts in a state. Its arrays are shared and read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from tracewire.errors import AmbiguousResult, SaveMissing
from tracewire_bus.wire.messages import SHARED_INVOKE, Accepted, ChatMessage, Failure, Manifest, Status, Usage

from .values import Values, library

if TYPE_CHECKING:
    from tracewire.rendering.page import Mark, Page
    from tracewire_bus.domain.fold import Fold

__all__ = ["Choice", "Invoke", "Result", "Saves", "State"]


class Saves(Values):
    """Saved values by name, with conversions (`to_numpy()`, `to_torch()`, `to_pandas()`, `to_xarray()`).

    A missing name raises a `SaveMissing`, which is a `KeyError`.
    """

    def __init__(
        self, values: Mapping[str, Any] = MappingProxyType({}), trace_id: str = "", *, ended: bool = False
    ) -> None:
        super().__init__(values)
        self._trace_id = trace_id
        self._ended = ended
        #: For each save that could not be sent, the reason.
        self._reasons: dict[str, str] = {}

    def __missing__(self, name: Any) -> Any:
        raise SaveMissing(self._trace_id, name, self, self._reasons.get(name, ""), self._ended)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """A table of them, as notebooks show it."""
        from tracewire.rendering.page import saves_html, saves_text

        return {"text/html": saves_html(self), "text/plain": saves_text(self) or "{}"}


class Choice(msgspec.Struct):
    """One sampled sequence of one prompt.

    Attributes:
        invoke, choice: index of the prompt, and of the sequence among the prompt's.
        text, token_ids: the sampled text and tokens.
        saves: the saved values, by name.
        finish_reason, stop_reason: vLLM's words for why the sequence ended, or None.
        token_strings: the tokens as strings, if `token_strings=True` asked for them.
        message: of a chat, the message with its content, reasoning and tool calls; else None.
    """

    invoke: int
    choice: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    saves: Saves = msgspec.field(default_factory=lambda: Saves())
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_strings: list[str] | None = None
    message: ChatMessage | None = None


class Invoke(msgspec.Struct):
    """One prompt of a trace, with its choices in order."""

    index: int
    choices: list[Choice]


class State:
    """A trace folded up to one of its events. `status` is `None` while it runs.

    With one prompt and one choice, `text`, `token_ids` and `saves` are that choice's; with more, they are in
    `invokes[i].choices[j]`.

    Attributes:
        trace_id: the trace's id.
        attempt, seq: the last event folded; `seq` is -1 before the first.
        position: id of the last event folded. `subscribe(trace, since=state.position)` goes on after it.
        status, error, usage: those of the final, or None.
        accepted: the engine's acceptance, or None.
        save_errors: saves that could not travel, by `invoke.choice.name`, with the reason.
        manifest: kind, length and digest of every save on the engine (at the end only).
        prompt_logprobs: by prompt and token, if requested (at the end only).
        warnings: likely mistakes in a block, each with the line in the author's file (at the end only).

    Raises:
        ValueMissing: saves of the trace are lost or out of reach.
    """

    def __init__(self, trace_id: str, fold: Fold) -> None:
        from tracewire_bus.bus import FINAL_ID

        if fold.lost is not None:
            raise fold.lost
        copy = fold.copy()
        self.trace_id = trace_id
        self.attempt: int = copy.attempt
        self.seq: int = copy.seq
        self.status: Status | None = copy.status
        self.error: Failure | None = copy.error
        self.usage: Usage = copy.usage
        self.paused: bool = copy.paused
        #: Version of the live parameters that hold for the last output.
        self.live_version: int = copy.live_version
        self.accepted: Accepted | None = copy.accepted
        self.save_errors: dict[str, str] = dict(copy.save_errors)
        self.manifest: list[Manifest] = list(copy.manifest)
        self.prompt_logprobs = list(copy.prompt_logprobs)
        self.warnings: list[str] = list(copy.warnings)
        self.position = FINAL_ID if copy.finished else "start" if copy.seq < 0 else f"{copy.attempt}-{copy.seq}"
        self._fold = copy

    @cached_property
    def invokes(self) -> list[Invoke]:
        """Its prompts, in order, with their choices."""
        return _invokes(self._fold, self.trace_id)

    @cached_property
    def shared(self) -> Saves:
        """The values that the blocks of its prompts share, by name."""
        return _saves(self._fold, self.trace_id, SHARED_INVOKE, 0)

    @property
    def finished(self) -> bool:
        """Whether the trace has ended, with any status."""
        return self.status is not None

    @property
    def text(self) -> str:
        """Text of the only choice."""
        return self._only("text").text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the only choice."""
        return self._only("token_ids").token_ids

    @property
    def token_strings(self) -> list[str] | None:
        """The strings of the only choice's tokens, if `token_strings=True` asked for them."""
        return self._only("token_strings").token_strings

    @property
    def message(self) -> ChatMessage | None:
        """The only choice's message, if the prompt is a chat (`messages=`)."""
        return self._only("message").message

    @property
    def saves(self) -> Saves:
        """Saved values of the only choice, by name."""
        return self._only("saves").saves

    async def load(self, name: str | None = None, *, dtype: str | None = None, exact: bool = False) -> Any:
        """Download the arrays that the saves of the only choice refer to: see `saves.load`."""
        return await self._only("saves").saves.load(name, dtype=dtype, exact=exact)

    def to_numpy(self, name: str | None = None, *, dtype: str | None = None) -> Any:
        """Convert the saves of the only choice to NumPy arrays: see `Values.to_numpy`."""
        return self._only("saves").saves.to_numpy(name, dtype=dtype)

    def to_torch(self, name: str | None = None, *, dtype: Any = None, device: Any = None) -> Any:
        """Convert the saves of the only choice to torch tensors: see `Values.to_torch`."""
        return self._only("saves").saves.to_torch(name, dtype=dtype, device=device)

    def to_pandas(self, name: str | None = None) -> Any:
        """Convert the saves of the only choice to a table: see `Values.to_pandas`.

        Without a name, the table also has the column `token_id`, and `token_string` if the engine sent strings. Row `i`
        has token `i`, and item `i` of each saved list.
        """
        saves = self._only("saves").saves
        table = saves.to_pandas(name)
        if name is not None:
            return table
        tokens = library("pandas", "to_pandas()").DataFrame({"token_id": self.token_ids})
        if (strings := self.token_strings) is not None:
            tokens["token_string"] = strings
        return tokens.join(table, how="outer").rename_axis(index="step")

    def to_xarray(self, name: str | None = None) -> Any:
        """Convert the saves of the only choice to labelled arrays: see `Values.to_xarray`."""
        return self._only("saves").saves.to_xarray(name)

    @property
    def finish_reason(self) -> str | None:
        """vLLM's word for why the only choice ended; `None` while it runs."""
        return self._only("finish_reason").finish_reason

    def digest(self) -> bytes:
        """A digest of all saves, 16 bytes. States with equal saves have equal digests in any process."""
        return self._fold.digest()

    def _only(self, what: str) -> Choice:
        choices = [choice for invoke in self.invokes for choice in invoke.choices]
        if len(choices) > 1:
            raise AmbiguousResult(
                f"trace {self.trace_id} has {len(self.invokes)} prompts and {len(choices)} choices: "
                f"ask .invokes[i].choices[j].{what}"
            )
        return choices[0] if choices else Choice(0, 0, saves=Saves({}, self.trace_id, ended=self.finished))

    def __repr__(self) -> str:
        choices = [choice for invoke in self.invokes for choice in invoke.choices]
        tokens = sum(len(choice.token_ids) for choice in choices)
        names = sorted({name for choice in choices for name in choice.saves})
        saves = f", saves {', '.join(names)}" if names else ""
        return f"<{type(self).__name__} of {self.trace_id}: {self.status or 'running'}, {tokens} tokens{saves}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The text, plots and a table of the saves, as notebooks show them."""
        from tracewire.rendering.page import as_html, as_text

        page = self._page()
        return {"text/html": as_html(page), "text/plain": as_text(page)}

    def _page(
        self,
        pieces: Mapping[tuple[int, int], Sequence[str]] = MappingProxyType({}),
        marks: Mapping[tuple[int, int], Sequence[Mark]] = MappingProxyType({}),
    ) -> Page:
        """What a rendering shows. `pieces` are the texts of tokens, and `marks` where it was steered, by choice."""
        from tracewire.rendering.page import Page, SequenceShown

        choices = [choice for invoke in self.invokes for choice in invoke.choices]
        several = len(choices) > 1
        return Page(
            title=f"Trace {self.trace_id}",
            status=self.status or ("paused" if self.paused else "running"),
            details=f"{sum(len(choice.token_ids) for choice in choices)} tokens",
            problem="" if self.error is None else self.error.message,
            sequences=[
                SequenceShown(
                    title=f"prompt {one.invoke + 1}, choice {one.choice + 1}" if several else "",
                    pieces=_pieces(one, pieces.get((one.invoke, one.choice))),
                    tokens=len(one.token_ids),
                    saves=one.saves,
                    marks=marks.get((one.invoke, one.choice), ()),
                )
                for one in choices
            ],
            shared=self.shared,
        )


class Result(State):
    """A trace at its end, compared with the engine's digests."""


def _pieces(choice: Choice, known: Sequence[str] | None) -> Sequence[str]:
    """The text of each token, or the whole text as one piece where the tokens' texts are not known."""
    for pieces in (known, choice.token_strings):
        if pieces is not None and len(pieces) == len(choice.token_ids) and "".join(pieces) == choice.text:
            return pieces
    return [choice.text] if choice.text else []


def _saves(fold: Fold, trace_id: str, invoke: int, choice: int) -> Saves:
    held = fold.choices.get((invoke, choice))
    saves = Saves({} if held is None else held.saves, trace_id, ended=fold.finished)
    prefix = f"{invoke}.{choice}."
    saves._reasons = {
        where.removeprefix(prefix): reason for where, reason in fold.save_errors.items() if where.startswith(prefix)
    }
    return saves


def _invokes(fold: Fold, trace_id: str) -> list[Invoke]:
    """All choices that exist or will exist, so that an index has the same meaning from the first event to the last."""
    counts: dict[int, int] = {}
    if fold.accepted is not None:
        sampling = fold.accepted.sampling
        for index in range(max(len(fold.accepted.prompt_tokens), len(sampling))):
            wanted = sampling[index].get("n") if index < len(sampling) else None
            counts[index] = wanted if isinstance(wanted, int) else 1
    for invoke, choice in fold.choices:
        if invoke == SHARED_INVOKE:
            continue
        counts[invoke] = max(counts.get(invoke, 1), choice + 1)
    invokes = []
    for index in range(max(counts, default=-1) + 1):
        choices = []
        for number in range(counts.get(index, 1)):
            one = Choice(index, number, saves=_saves(fold, trace_id, index, number))
            if (held := fold.choices.get((index, number))) is not None:
                one.text, one.token_ids, one.token_strings = held.text, held.token_ids, held.token_strings
                one.finish_reason, one.stop_reason = held.finish_reason, held.stop_reason
                one.message = held.message
            choices.append(one)
        invokes.append(Invoke(index, choices))
    return invokes
