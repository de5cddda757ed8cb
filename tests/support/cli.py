"""The command line in tests: run as a program would, and a scripted engine whose traces have text and saves."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from tests.support.bus_engine import Stage
from tracewire.cli import main as cli

__all__ = ["command", "steered_story", "story"]

#: What the scripted engine writes.
WORDS = ("def", " parse", "(text", "):", "\n", "    return", " text", ".split", "()", "\n")


async def command(*arguments: str) -> int:
    """Run the command as a program would, with an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))


async def story(stage: Stage) -> None:
    """Ten tokens a tenth of a second apart by the engine's clock, each with a number in the saved list `projection`."""
    await stage.accept()
    for number, word in enumerate(WORDS):
        await stage.save(word, saved(number), time=1000.0 + number / 10)
    await stage.final()


async def steered_story(stage: Stage) -> None:
    """Four tokens, then one for each change of the live parameters, up to a tenth."""
    await stage.accept()
    for number, word in enumerate(WORDS):
        if number >= 4:
            await stage.steered()
        await stage.going()
        await stage.save(word, saved(number), time=1000.0 + number / 10)
    await stage.final()


def saved(number: int) -> dict[str, Any]:
    """What a token of a story saves."""
    return {"projection": float((number * 7) % 10) / 2}
