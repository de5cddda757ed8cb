"""What the engines that stand in for vLLM behind the adapter's seam have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio

from tracewire_bus.wire.messages import ChatMessage, MessageDelta
from tracewire_engine.adapter.engine_api import Choice, EngineLost
from tracewire_engine.protocol.messages import Report

__all__ = ["FakeEngine", "MergedOutputs", "TextMessages"]


class MergedOutputs:
    """The outputs of a request. Those that nobody has taken yet are merged, as vLLM's collector merges them."""

    cached_tokens = 0
    prompt_logprobs: tuple[()] = ()

    def __init__(self) -> None:
        self.waiting: Choice | None = None
        self.ready = asyncio.Event()
        self.lost = False

    def put(self, choice: Choice) -> None:
        """Hand tokens over."""
        if self.waiting is None:
            self.waiting = choice
            self.ready.set()
        else:
            self.waiting.token_ids.extend(choice.token_ids)
            self.waiting.text += choice.text
            self.waiting.finish_reason = choice.finish_reason

    async def get(self) -> tuple[list[Choice], bool]:
        """As the seam has it."""
        while self.waiting is None:
            if self.lost:
                raise EngineLost("the scripted engine was told to die")
            await self.ready.wait()
        choice, self.waiting = self.waiting, None
        self.ready.clear()
        return [choice], choice.finish_reason is not None

    def size(self) -> int:
        """As the seam has it."""
        return 0 if self.waiting is None else 48 * len(self.waiting.token_ids) + len(self.waiting.text)


class TextMessages:
    """The message of a choice is its text."""

    def delta(self, text: str, token_ids: list[int], finished: bool) -> MessageDelta | None:
        """As the seam has it."""
        return MessageDelta(content=text) if text else None

    def whole(self, text: str, token_ids: list[int]) -> ChatMessage:
        """As the seam has it."""
        return ChatMessage(content=text)


class FakeEngine:
    """The part of an `Engine` that a fake without a model seldom changes. It reports what `report` is given."""

    inputs = Path("/nonexistent")
    carrier = None
    lost = False

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._arrived = asyncio.Event()

    def report(self, report: Report) -> None:
        """Report this, as workers would."""
        self._reports.append(report)
        self._arrived.set()

    def ready(self) -> list[Report]:
        """What has been reported since the last call."""
        reports, self._reports = self._reports, []
        self._arrived.clear()
        return reports

    async def arrived(self) -> None:
        """Wait for a report."""
        await self._arrived.wait()

    async def large(self) -> AsyncIterator[Any]:
        """No large arrays."""
        await anyio.sleep_forever()
        yield

    async def give_result(self, result: bytes) -> None:
        """No block asks for it."""

    async def takes_requests(self) -> bool:
        """Always."""
        return True

    async def answers(self) -> None:
        """At once."""

    async def steer(self, changes: Any, over: list[str], since: float) -> None:
        """Nothing depends on live parameters."""

    async def abort(self, request: str) -> None:
        """A request runs to its end."""

    async def pause(self, request: str) -> bool:
        """A request knows no pause."""
        return False

    async def resume(self, request: str) -> bool:
        """Nor this."""
        return False

    async def pause_all(self) -> None:
        """Nor this."""

    async def resume_all(self) -> None:
        """Nor this."""

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """A string with each id."""
        return [f"<{token_id}>" for token_id in token_ids]
