"""What the keys do in `tracewire top`, without a terminal: tests of `top` have one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from rich.console import Console

from tests.support.cli import steered_story
from tracewire import Client
from tracewire.cli.fleet import Fleet
from tracewire.cli.top_screen import TopScreen

PATIENCE = 60


def drawn(screen: TopScreen) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen.draw(100, 30))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


async def test_the_keys(client: Client, engine: Callable[..., Any]) -> None:
    live = {"alpha": 0.0, "flag": False, "word": "code", "count": 3}
    async with engine(steered_story), anyio.create_task_group() as group, AsyncExitStack() as stack:
        fleet = Fleet(client, group)
        screen = TopScreen(client, fleet, "redis://here", "keys")
        assert await screen.press("enter")
        assert "No engines" in drawn(screen)
        # The list has milliseconds: the first trace generates before the second one is submitted.
        async with client.trace("tiny", "x", live=live) as older:
            await anext(older)
            newer = await stack.enter_async_context(client.trace("tiny", "y", live=live))
            await anext(newer)
            await fleet.look()
            assert f"> {older.id[:12]}" in drawn(screen)
            await screen.press("down")
            assert f"> {newer.id[:12]}" in drawn(screen)
            await screen.press("j")
            assert f"> {newer.id[:12]}" in drawn(screen)
            await screen.press("k")
            assert f"> {older.id[:12]}" in drawn(screen)

            await screen.press("enter")
            assert older.id in drawn(screen)
            assert "> alpha = 0.0   (step 1)" in drawn(screen)
            # A word cannot be steered by arrows.
            assert "> word" not in drawn(screen)
            assert "  word = " not in drawn(screen)
            await screen.press("]")
            await screen.press("right")
            await screen.press("right")
            assert (await client.get_live(older.id)).values["alpha"] == 4.0
            assert "version 2: alpha=4.0" in drawn(screen)
            await screen.press("left")
            assert (await client.get_live(older.id)).values["alpha"] == 2.0
            await screen.press("[")
            await screen.press("down")
            await screen.press("right")
            assert (await client.get_live(older.id)).values["flag"] is True
            await screen.press("tab")
            await screen.press("left")
            assert (await client.get_live(older.id)).values["count"] == 2
            await screen.press("up")
            assert "> flag" in drawn(screen)

            await screen.press("c")
            assert f"press c again to cancel {older.id}" in drawn(screen)
            # Any other key. One that steers would be the sixth, after which the story ends.
            await screen.press("]")
            await screen.press("c")
            assert "press c again" in drawn(screen)
            await screen.press("c")
            assert f"{older.id}: cancelled" in drawn(screen)
            assert (await older.final()).status == "cancelled"
            with anyio.fail_after(PATIENCE):
                while "cancelled, " not in drawn(screen):
                    await checkpoint()
            await screen.press("right")
            assert "has ended" in drawn(screen)
            await screen.press("escape")
            assert "running traces" in drawn(screen)

            await fleet.look()
            await screen.press("p")
            assert f"{newer.id}: paused" in drawn(screen)
            with anyio.fail_after(PATIENCE):
                while fleet.traces[newer.id].state != "paused":
                    await checkpoint()
            await screen.press("p")
            assert f"{newer.id}: resumed" in drawn(screen)
        assert not await screen.press("q")
        group.cancel_scope.cancel()


async def test_a_trace_without_live_numbers(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(steered_story), anyio.create_task_group() as group:
        fleet = Fleet(client, group)
        screen = TopScreen(client, fleet, "redis://here", "keys")
        async with client.trace("tiny", "x") as trace:
            await anext(trace)
            await fleet.look()
            await screen.press("enter")
            await screen.press("right")
            assert "no live parameter that is a number" in drawn(screen)
        group.cancel_scope.cancel()


async def test_a_model_that_is_not_served_is_met_with_those_that_are(
    client: Client, engine: Callable[..., Any]
) -> None:
    async with engine(steered_story), anyio.create_task_group() as group:
        fleet = Fleet(client, group, "tinny")
        screen = TopScreen(client, fleet, "redis://here", "keys")
        await fleet.look()
        assert "with the prefix 'keys'; served now: 'tiny'; did you mean 'tiny'?" in " ".join(drawn(screen).split())
