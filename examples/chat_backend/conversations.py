"""Conversations: the user's messages, and the traces that answer them.

Answer `n` of a conversation is the trace `chat.<conversation>.<n>`, so that any process finds it by asking the bus: a
conversation that a process does not know, or whose later turns another process has taken, is read from there. What a
trace's record has no other place for, the words of the user and the settings, stands in a live parameter of it that
nothing on the engine reads.

A process keeps what it has read. The bus keeps an answer for as long as its retention says; a service that must not
forget writes the turns into its database where `Turn` is made and ended.
"""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict
from typing import Annotated, Any

import anyio
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tracewire import Client, UnknownTrace

from .problems import Problem
from .settings import Settings

__all__ = ["Conversation", "Conversations", "Message", "Opening", "Steering", "Turn"]

_ID = re.compile(r"[0-9a-f]{32}")

#: As far as the slider goes. The demo model writes little but noise beyond 4.
ALPHA = 8.0

Alpha = Annotated[float, Field(ge=-ALPHA, le=ALPHA, allow_inf_nan=False)]


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected Unicode text, got half of a surrogate pair") from None
    return text


def _said(text: str) -> str:
    # A line break and its indentation may stand at the end of a beginning of code; a space is part of the next word.
    text = text.rstrip(" ")
    if not text.strip():
        raise ValueError("expected a text, got spaces only")
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Opening(_Body):
    """What a conversation is opened with: a text that stands before all turns, and how its answers are written."""

    system: Text = Field("", max_length=4000)
    alpha: Alpha = 0.0
    temperature: float = Field(0.8, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int = Field(160, ge=1, le=1024)
    seed: int | None = Field(None, ge=0, lt=2**63)


class Message(_Body):
    """What a user says. `alpha` is where the slider stands; without it, where the last answer left it.

    A message that is sent again with the same `key` is the same message.
    """

    text: Annotated[Text, AfterValidator(_said)]
    alpha: Alpha | None = None
    key: Text | None = Field(None, min_length=1, max_length=64)


class Steering(_Body):
    """Where the slider stands now. With `if_version`, only if nobody else has moved it since that version."""

    alpha: Alpha
    if_version: int | None = Field(None, ge=0)


class _Note(BaseModel):
    """The data of this service that a trace carries in its live parameter `turn`."""

    key: str
    said: str
    alpha: float
    opening: Opening


class Turn:
    """One thing said, and its answer once it has ended (`status`)."""

    def __init__(self, note: _Note) -> None:
        self.key = note.key
        self.said = note.said
        self.alpha = note.alpha
        self.answer = ""
        self.status: str | None = None


class Conversation:
    """A conversation as far as this process has read it."""

    def __init__(self, name: str, opening: Opening | None = None) -> None:
        self.id = name
        self.opening = opening or Opening()
        self.turns: list[Turn] = []
        #: One message at a time.
        self.lock = anyio.Lock()

    def prompt(self, said: str, room: int) -> str:
        """What the model goes on from: the system text, as many of the last turns as fit, and what is said now.

        `room` counts bytes. No token of a byte-level vocabulary is shorter than one, so what fits is never refused;
        a service that has the tokenizer counts tokens.

        Raises:
            Problem: what is said does not fit by itself.
        """
        head = f"{self.opening.system}\n\n" if self.opening.system else ""
        size = len((head + said).encode())
        if size > room:
            raise Problem(422, f"expected at most {room} bytes with the system text, got {size}", field="text")
        kept: list[str] = []
        for turn in reversed(self.turns):
            text = f"{turn.said}{turn.answer}\n\n"
            size += len(text.encode())
            if size > room:
                break
            kept.append(text)
        return head + "".join(reversed(kept)) + said


class Conversations:
    """All conversations, over one client of the bus."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._held: OrderedDict[str, Conversation] = OrderedDict()

    # --- finding ------------------------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> Conversation:
        """A new conversation. Until something is said in it, only this process knows it."""
        return self._keep(Conversation(uuid.uuid4().hex, opening))

    async def find(self, name: str) -> Conversation:
        """A conversation with all its turns, whichever process took them.

        Raises:
            Problem: there is none, or the bus has forgotten it.
        """
        conversation = self._held.get(name) or Conversation(name)
        if _ID.fullmatch(name):
            await self._catch_up(conversation)
        if name not in self._held and not conversation.turns:
            raise Problem(404, "there is no such conversation, or it has been forgotten")
        return self._keep(conversation)

    def _keep(self, conversation: Conversation) -> Conversation:
        # Another task may have read it at the same time.
        conversation = self._held.setdefault(conversation.id, conversation)
        self._held.move_to_end(conversation.id)
        while len(self._held) > self._settings.remembered:
            self._held.popitem(last=False)
        return conversation

    async def _catch_up(self, conversation: Conversation) -> None:
        """Read the turns that the bus has and this process has not."""
        while True:
            number = len(conversation.turns)
            try:
                live = await self._client.get_live(trace_id(conversation.id, number))
            except UnknownTrace:
                return
            note = _Note.model_validate_json(live.values["turn"])
            if number == len(conversation.turns):
                conversation.opening = note.opening
                conversation.turns.append(Turn(note))

    async def newest(self, name: str) -> str:
        """The trace of a conversation's newest answer.

        Raises:
            Problem: there is no such conversation, or nothing has been said in it.
        """
        conversation = await self.find(name)
        if not conversation.turns:
            raise Problem(409, "nothing has been said in this conversation yet")
        return trace_id(name, len(conversation.turns) - 1)

    # --- saying -------------------------------------------------------------------------------------------------------

    async def say(self, name: str, message: Message) -> dict[str, Any]:
        """Have a message answered; returns as soon as the answer is queued.

        Raises:
            Problem: the last answer is still being written, or the text is too long.
            TracewireError: it could not be submitted.
        """
        conversation = await self.find(name)
        async with conversation.lock:
            await self._catch_up(conversation)
            for number, turn in enumerate(conversation.turns):
                if turn.key == message.key:
                    return self._told(conversation, number)
            await self._read(conversation)
            number = len(conversation.turns)
            if number and conversation.turns[-1].status is None:
                raise Problem(409, "the last answer is still being written: wait for its end, or cancel it")
            note = _Note(
                key=message.key or uuid.uuid4().hex,
                said=message.text,
                alpha=message.alpha if message.alpha is not None else await self._alpha(conversation),
                opening=conversation.opening,
            )
            await self._submit(conversation, number, note)
            await self._catch_up(conversation)
            if conversation.turns[number].key != note.key:
                raise Problem(409, "another message was taken at the same moment: read the conversation again")
            return self._told(conversation, number)

    async def _submit(self, conversation: Conversation, number: int, note: _Note) -> None:
        opening = conversation.opening
        model = await self._client.models.get(self._settings.model)
        # An answer leaves at least half of the context to what is said.
        most = min(opening.max_tokens, model.info.max_model_len // 2)
        sampling = {"temperature": opening.temperature, "max_tokens": most}
        if opening.seed is not None:
            sampling["seed"] = opening.seed
        trace = self._client.trace(
            model,
            conversation.prompt(note.said, model.info.max_model_len - most),
            interventions=self._settings.bend.interventions,
            live={"alpha": note.alpha, "turn": note.model_dump_json()},
            deadline=self._settings.deadline_s,
            # Its reader is a connection that may break, and this process may be restarted: neither ends the answer.
            detach=True,
            trace_id=trace_id(conversation.id, number),
            **(self._settings.sampling | sampling),
        )
        try:
            await trace.start()
        finally:
            await trace.aclose()

    async def _alpha(self, conversation: Conversation) -> float:
        """Where the last answer left the slider."""
        if conversation.turns:
            try:
                live = await self._client.get_live(trace_id(conversation.id, len(conversation.turns) - 1))
                return float(live.values["alpha"])
            except UnknownTrace:
                pass
        return conversation.opening.alpha

    @staticmethod
    def _told(conversation: Conversation, number: int) -> dict[str, Any]:
        return {
            "answer": number,
            "trace": trace_id(conversation.id, number),
            "alpha": conversation.turns[number].alpha,
            "stream": f"/conversations/{conversation.id}/stream?answer={number}",
        }

    # --- reading ------------------------------------------------------------------------------------------------------

    async def history(self, name: str) -> dict[str, Any]:
        """All of a conversation, an answer that is being written as far as it is."""
        conversation = await self.find(name)
        await self._read(conversation)
        return {
            "id": conversation.id,
            **conversation.opening.model_dump(),
            "turns": [
                {**self._told(conversation, number), "text": turn.said, "reply": turn.answer, "status": turn.status}
                for number, turn in enumerate(conversation.turns)
            ],
        }

    async def _read(self, conversation: Conversation) -> None:
        """Fill in the answers, from the bus; those that have ended are read once."""
        for number, turn in enumerate(conversation.turns):
            if turn.status is not None:
                continue
            try:
                state = await self._client.get_state(trace_id(conversation.id, number))
            except UnknownTrace:
                turn.status = "forgotten"
            else:
                turn.answer, turn.status = state.text, state.status


def trace_id(conversation: str, number: int) -> str:
    """Id of the trace that is a conversation's answer `number`.

    Raises:
        Problem: no conversation has such an id. So a caller cannot reach traces of other services by this id.
    """
    if not _ID.fullmatch(conversation):
        raise Problem(404, "there is no such conversation, or it has been forgotten")
    return f"chat.{conversation}.{number}"
