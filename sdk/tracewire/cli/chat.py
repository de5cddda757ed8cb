"""`tracewire chat`: talk with a model, with interventions on its answers."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import anyio

from tracewire.client import Client, connect
from tracewire.errors import TracewireError
from tracewire.traces.model import Model
from tracewire.traces.trace import Trace
from tracewire_bus.wire.messages import ChatMessage, ToolCall

from .chat_options import assistant_message
from .commands import UsageError, add_command
from .presenters import presenter
from .printing import print_json_line, remark
from .requests import Request, add_request, request_of
from .run import shown_trace, succeeded
from .specs import named_value

__all__ = ["Chat", "add_chat"]

_HELP = """\
/steer NAME=VALUE   change a live parameter for the answers to come
/live               show the live parameters
/reset              forget the messages so far
/help               show this
/quit               end; so does Ctrl-D. Ctrl-C ends an answer"""


def add_chat(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    chat = add_command(
        commands,
        "chat",
        _chat,
        parents=parents,
        help="talk with a model: each line of standard input is a message, or the result of a function that it calls",
        exits={1: "an error, or an answer failed while standard input is no terminal"},
        examples=(
            "tracewire chat demo --system 'Answer briefly.'",
            "tracewire chat MODEL --tools tools.json --template enable_thinking=false",
            "tracewire chat demo --steer 'residual(4)@direction.npy*alpha' --live alpha=4",
        ),
        json="each event of each answer as a JSON object on a line",
    )
    add_request(chat)


class Chat:
    """The messages of a conversation, and how they are answered.

    Where an answer calls functions, each of the next lines is the result of one of them, in order.
    """

    def __init__(self, client: Client, model: Model, request: Request, *, as_json: bool) -> None:
        self._client = client
        self._model = model
        self._request = request
        self._json = as_json
        self.messages: list[dict[str, Any]] = list(request.conversation.messages)
        #: The calls whose results are still to come.
        self._calls: list[ToolCall] = []

    @property
    def prompt(self) -> str:
        """What a terminal shows before the next line: the name of the function whose result it is."""
        return f"{self._calls[0].name}> " if self._calls else "> "

    async def take(self, line: str) -> bool:
        """Take a line: a command, or a message to answer. Returns `False` if an answer failed.

        Raises:
            EOFError: the line ends the conversation.
        """
        if line.startswith("/"):
            self._obey(line)
            return True
        before = list(self.messages), self._calls
        if self._calls:
            call, *self._calls = self._calls
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": line})
            if self._calls:
                return True
        else:
            self.messages.append({"role": "user", "content": line})
        answer = await self._answer()
        if answer is None:
            # The model has not answered it, so it is no part of the conversation.
            self.messages, self._calls = before
            return False
        self.messages.append(assistant_message(answer))
        self._calls = answer.tool_calls
        return True

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit"):
            raise EOFError
        if word == "/reset":
            self.messages, self._calls = list(self._request.conversation.messages), []
        elif word == "/steer":
            self._steer(rest.split())
        elif word != "/live":
            remark(_HELP if word == "/help" else f"unknown command {word}\n{_HELP}")
        if word in ("/steer", "/live"):
            remark("  ".join(f"{name}={value}" for name, value in self._request.live.items()) or "no live parameters")

    def _steer(self, changes: Sequence[str]) -> None:
        for change in changes:
            try:
                name, value = named_value(change)
            except argparse.ArgumentTypeError as error:
                remark(f"/steer: {error}")
                continue
            first = self._request.live.get(name)
            if first is None:
                remark(f"/steer: no live parameter {name!r}: declare it with --live {name}=VALUE")
            else:
                self._request.live[name] = float(value) if isinstance(first, float) and type(value) is int else value

    async def _answer(self) -> ChatMessage | None:
        """Run the messages and show the answer. Returns it, or `None` if it failed."""
        try:
            with self._request.refusals():
                arguments = self._request.arguments(self._model.info.max_model_len)
                trace = self._client.trace(self._model, messages=self.messages, **arguments)
                await trace.start()
        except (TracewireError, UsageError) as error:
            remark(f"tracewire: {error}")
            return None
        if self._json:
            print_json_line({"type": "submitted", "trace_id": trace.id, "model": self._model.name})
        with presenter(trace.id, as_json=self._json, saves=self._request.saves) as shown:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_on_interrupt, trace)
                final = await shown_trace(trace, shown)
                group.cancel_scope.cancel()
        if not succeeded(final) and final.status != "cancelled":
            # The presenter has said why.
            return None
        state = trace.state()
        return ChatMessage(content=state.text) if state.message is None else state.message


async def _cancel_on_interrupt(trace: Trace) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            await trace.cancel("interrupted at the terminal")


async def _chat(options: argparse.Namespace) -> int:
    request = request_of(options, chats=True)
    terminal = sys.stdin.isatty()
    failed = False
    async with connect(options.url, prefix=options.prefix) as client:
        model = await client.models.get(options.model)
        chat = Chat(client, model, request, as_json=options.json)
        if terminal:
            remark(f"{options.model}: /help shows the commands, Ctrl-D ends")
        while (line := read_line(chat.prompt if terminal else "")) is not None:
            if not line.strip():
                continue
            try:
                failed = not await chat.take(line) or failed
            except EOFError:
                break
    return 1 if failed and not terminal else 0


def read_line(prompt: str) -> str | None:
    """A line of standard input without its end; `None` at the end of the input, or after Ctrl-C.

    The event loop waits meanwhile: no trace runs. So a terminal's line can be edited, and recalled.
    """
    if not prompt:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        # Importing it gives `input` history and editing.
        import readline  # noqa: F401
    except ImportError:
        pass
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    finally:
        signal.signal(signal.SIGINT, before)
