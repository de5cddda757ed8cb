"""Whom a guard asks: a person at the terminal, an HTTP service, a model, or a Python function."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec

from tracewire.errors import InvalidRules

from .alarm import Alarm, Decision, decision_of
from .rules import Ask, Rule

if TYPE_CHECKING:
    from tracewire.client import Client

__all__ = ["Asker", "asker", "check_function"]

Asker: TypeAlias = Callable[[Alarm], Awaitable[Decision]]

#: The longest answer of an HTTP service that is read, in bytes.
_ANSWER_BYTES = 64 * 1024
#: How often a question at the terminal looks for an answer, in seconds.
_LOOK_S = 0.05


def check_function(rule: Rule) -> None:
    """Import the function that a rule asks, if it asks one.

    Raises:
        InvalidRules: it cannot be imported.
    """
    if isinstance(rule.ask, Ask) and rule.ask.function:
        _imported(rule.ask.function, rule.name)


def asker(rule: Rule, client: Client, terminal: Terminal) -> Asker:
    """The function that decides a rule's alarms.

    Raises:
        InvalidRules: its function cannot be imported.
    """
    ask = rule.ask
    if ask is None:
        assert rule.do is not None
        return _always(Decision(rule.do, rule.live if rule.do == "steer" else {}, rule.reason))
    if ask == "terminal":
        return lambda alarm: terminal.ask(alarm, rule)
    if ask.function:
        return _function(_imported(ask.function, rule.name), rule)
    return _model(ask, rule, client) if ask.model else _http(ask.http, rule)


def _always(decision: Decision) -> Asker:
    async def decide(alarm: Alarm) -> Decision:
        return decision

    return decide


def _imported(path: str, rule: str) -> Callable[[Alarm], Any]:
    module, _, name = path.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        # As `python -m` does: a function often stands beside its rules.
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise InvalidRules(rule, "ask.function", f"{path}: {str(error) or type(error).__name__}") from error
    if not callable(function):
        raise InvalidRules(rule, "ask.function", f"{path}: expected a function, got {type(function).__name__}")
    found: Callable[[Alarm], Any] = function
    return found


def _function(function: Callable[[Alarm], Any], rule: Rule) -> Asker:
    async def decide(alarm: Alarm) -> Decision:
        if inspect.iscoroutinefunction(function):
            return decision_of(await function(alarm), rule)
        answer = await anyio.to_thread.run_sync(function, alarm, abandon_on_cancel=True)
        return decision_of(await answer if inspect.isawaitable(answer) else answer, rule)

    return decide


def _http(url: str, rule: Rule) -> Asker:
    def post(alarm: Alarm) -> Any:
        from urllib.request import Request, urlopen

        headers = {"content-type": "application/json", "accept": "application/json"}
        # The rules' check lets http:// and https:// pass only.
        request = Request(url, json.dumps(msgspec.to_builtins(alarm)).encode(), headers)  # noqa: S310
        with urlopen(request, timeout=rule.timeout) as response:  # noqa: S310  # nosec B310
            return json.loads(response.read(_ANSWER_BYTES))

    async def decide(alarm: Alarm) -> Decision:
        return decision_of(await anyio.to_thread.run_sync(post, alarm, abandon_on_cancel=True), rule)

    return decide


def _model(ask: Ask, rule: Rule, client: Client) -> Asker:
    async def decide(alarm: Alarm) -> Decision:
        prompt = ask.prompt.format(**msgspec.structs.asdict(alarm))
        async with client.trace(
            ask.model, prompt, max_tokens=ask.max_tokens, temperature=0.0, deadline=rule.timeout
        ) as trace:
            text = (await trace.result()).text
        words = text.split()
        word = words[0].strip(".,:;!?\"'").lower() if words else ""
        if word not in ask.answers:
            raise ValueError(f"expected {ask.model} to answer {' or '.join(ask.answers)}, got {text[:80]!r}")
        return decision_of(msgspec.structs.replace(Decision(ask.answers[word]), reason=text.strip()[:200]), rule)

    return decide


class Terminal:
    """A person at a terminal, who gets one question at a time. A thread reads the lines."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reading = False

    async def ask(self, alarm: Alarm, rule: Rule) -> Decision:
        """Ask until the answer is one of those that the question names.

        Raises:
            EOFError: standard input has ended.
        """
        async with self._turn:
            if not self._reading:
                self._reading = True
                threading.Thread(target=self._read, name="tracewire-guard-terminal", daemon=True).start()
            else:
                self._drop_late_answers()
            where = f"trace {alarm.trace_id}, token {alarm.token}"
            print(
                f"\n{rule.name}: {rule.save} is {alarm.value:g} ({where})\n  ...{alarm.text[-160:]!r}", file=sys.stderr
            )
            words = "[r]esume, [c]ancel" + (f", [s]teer to {rule.live}" if rule.live else "")
            while True:
                print(f"{words}? ", end="", file=sys.stderr, flush=True)
                line = await self._line()
                chosen = {"r": "resume", "c": "cancel", "s": "steer"}.get(line.strip().lower()[:1])
                if chosen is not None and (chosen != "steer" or rule.live):
                    return decision_of({"do": chosen, "reason": "answered at the terminal"}, rule)

    def _drop_late_answers(self) -> None:
        """Drop the answers to questions that nobody waits for any longer."""
        while not self._lines.empty():
            line = self._lines.get()
            if not line:
                self._lines.put(line)
                return

    async def _line(self) -> str:
        # An event would need the loop of the reading thread's caller, and a person answers in seconds.
        while self._lines.empty():  # noqa: ASYNC110
            await anyio.sleep(_LOOK_S)
        line = self._lines.get()
        if not line:
            # For the next question, too.
            self._lines.put(line)
            raise EOFError("standard input has ended: nobody answers")
        return line

    def _read(self) -> None:
        line = "begun"
        while line:
            line = sys.stdin.readline()
            self._lines.put(line)
