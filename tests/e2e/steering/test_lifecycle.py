"""How traces end before their own end, on a real engine: cancelled, expired, left, stopped; and what is freed then."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.blocks.steering import dawdles, steered, stops
from tests.support.blocks.tracing import list_each_step
from tests.support.steering import LONG, direction, has, held_up
from tracewire import Client, Final, Model, Output, Paused, Steered

PROMPT = "def add(a, b):"


async def final_of(client: Client, trace: str) -> Final:
    """A trace's last event; there is one."""
    finals = [event async for event in client.subscribe(trace) if isinstance(event, Final)]
    assert len(finals) == 1
    return finals[0]


async def test_a_cancelled_trace_keeps_what_it_had(live_client: Client, model: Model) -> None:
    async with live_client.trace(model, PROMPT, list_each_step(), **LONG) as trace:
        tokens = 0
        with pytest.raises(tracewire.TraceFailed) as caught:
            async for output in trace:
                tokens += len(output.token_ids)
                if has(output, 9):
                    assert await trace.cancel("enough")
    error = caught.value
    assert (error.status, error.type) == ("cancelled", "Cancelled")
    assert "enough" in error.message
    assert "submitter" in error.message
    result = error.result
    # Folded and verified like any other end.
    assert len(result.token_ids) == tokens < 1500
    assert len(result.saves["hidden"]) >= tokens
    assert result.manifest
    with pytest.raises(tracewire.TraceFailed):
        await trace.result()
    assert not await trace.cancel()
    with pytest.raises(tracewire.UnknownTrace):
        await live_client.cancel("nobody-knows")


async def test_every_choice_of_a_cancelled_trace_ends(live_client: Client, model: Model) -> None:
    async with live_client.trace(
        model, prompts=[PROMPT, "import os"], block=list_each_step(), n=2, seed=1, max_tokens=1500, ignore_eos=True
    ) as trace:
        with pytest.raises(tracewire.TraceFailed):
            async for output in trace:
                if has(output, 5):
                    await trace.cancel()
        with pytest.raises(tracewire.TraceFailed) as caught:
            await trace.result()
    choices = [choice for invoke in caught.value.result.invokes for choice in invoke.choices]
    assert len(choices) == 4
    assert all(choice.finish_reason == "abort" for choice in choices)
    assert all(len(choice.saves["hidden"]) >= len(choice.token_ids) > 0 for choice in choices)


async def test_leaving_a_trace_cancels_it_unless_it_is_detached(live_client: Client, model: Model) -> None:
    async with live_client.trace(model, PROMPT, **LONG) as left:
        await left.accepted()
    async with live_client.trace(model, PROMPT, detach=True, max_tokens=40, ignore_eos=True) as detached:
        await detached.accepted()
    assert (await final_of(live_client, left.id)).status == "cancelled"
    final = await final_of(live_client, detached.id)
    assert (final.status, final.usage.completion_tokens) == ("finished", 40)


async def test_a_deadline_passes_while_it_runs(live_client: Client, model: Model) -> None:
    async with live_client.trace(model, PROMPT, dawdles(seconds=0.01), deadline=2.0, **LONG) as trace:
        with pytest.raises(tracewire.TraceFailed) as caught:
            await trace.result()
    error = caught.value
    assert (error.status, error.type) == ("expired", "DeadlineExceeded")
    assert "2 s" in error.message
    assert 0 < len(error.result.token_ids) < 1500


async def test_a_stop_shows_no_forced_token(live_client: Client, model: Model) -> None:
    """Also where vLLM would not let an end-of-sequence token end it."""
    async with live_client.trace(model, PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True) as plain:
        whole = await plain.result()
    for sampling in ({}, {"ignore_eos": True}, {"min_tokens": 20}):
        async with live_client.trace(model, PROMPT, stops(at=6), max_tokens=30, temperature=0.0, **sampling) as trace:
            outputs = [output async for output in trace]
            result = await trace.result()
        assert result.status == "stopped"
        assert result.token_ids == whole.token_ids[:7]
        assert outputs[-1].stop_reason == "tracer.stop()"
        assert len(result.saves["seen"]) == 7


CLIENT = """
import sys, anyio, tracewire

async def main():
    async with tracewire.connect(sys.argv[1], name="doomed", lease_ttl=1.0) as client:
        model = await client.models.get("demo")
        left = [
            client.trace(model, "def f():", trace_id=f"{sys.argv[2]}-{n}", max_tokens=1500, ignore_eos=True)
            for n in range(3)
        ]
        kept = [
            client.trace(
                model, "def f():", trace_id=f"{sys.argv[2]}-kept{n}", max_tokens=150, ignore_eos=True, detach=True
            )
            for n in range(3)
        ]
        for trace in left + kept:
            await trace.start()
        for trace in left + kept:
            await trace.accepted()
        print("running", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_killed_client_takes_its_traces_along_but_for_detached_ones(
    live_client: Client, model: Model, engine_bus: str
) -> None:
    async with held_up(live_client, model):
        name = f"doomed{random.randrange(10**9)}"
        process = await anyio.to_thread.run_sync(
            lambda: subprocess.Popen(
                [sys.executable, "-c", CLIENT, engine_bus, name], stdout=subprocess.PIPE, text=True
            )
        )
        try:
            assert await anyio.to_thread.run_sync(process.stdout.readline) == "running\n"
        finally:
            process.send_signal(signal.SIGKILL)
            await anyio.to_thread.run_sync(process.wait)
            process.stdout.close()
        for number in range(3):
            final = await final_of(live_client, f"{name}-{number}")
            assert final.status == "cancelled"
            assert "submitter has gone" in final.error.message
    for number in range(3):
        assert (await final_of(live_client, f"{name}-kept{number}")).status == "finished"


async def test_a_paused_trace_rests_and_goes_on_as_if_nothing_had_been(live_client: Client, model: Model) -> None:
    vector = direction(model)
    sampling = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
    block = steered(direction=vector)
    async with live_client.trace(model, PROMPT, block, live={"alpha": 1.0}, **sampling) as trace:
        undisturbed = await trace.result()
    async with live_client.trace(model, PROMPT, block, live={"alpha": 1.0}, **sampling) as trace:
        items: list[Any] = []
        async for item in trace:
            items.append(item)
            if has(item, 12):
                assert await trace.pause(by="me")
                assert not await trace.pause()
            if isinstance(item, Paused):
                break
        at = []
        for _ in range(2):
            # Others run on, from their beginning to their end.
            async with live_client.trace(model, "import os", max_tokens=40, ignore_eos=True) as other:
                assert len((await other.result()).token_ids) == 40
            state = await live_client.get_state(trace.id)
            assert state.paused
            at.append(state.token_ids)
        assert at[0] == at[1]
        assert len(at[0]) < 150
        assert await trace.resume()
        items += [item async for item in trace]
        result = await trace.result()
        assert not result.paused
    (paused,) = [item for item in items if isinstance(item, Paused)]
    assert paused.by == "me"
    assert [type(item).__name__ for item in items if not isinstance(item, Output)] == ["Paused", "Resumed"]
    assert result.token_ids == undisturbed.token_ids
    assert result.digest() == undisturbed.digest()


async def test_a_paused_trace_can_be_steered_and_cancelled(live_client: Client, model: Model) -> None:
    async with live_client.trace(
        model, PROMPT, steered(direction=direction(model)), live={"alpha": 1.0}, **LONG
    ) as trace:
        async for item in trace:
            if has(item, 8):
                await trace.pause()
            if isinstance(item, Paused):
                break
        at = len(trace.state().token_ids)
        assert await trace.steer(alpha=2.0) == 1
        await trace.resume()
        told = None
        async for item in trace:
            told = item if isinstance(item, Steered) else told
            if isinstance(item, Output) and told is not None:
                await trace.pause()
            if isinstance(item, Paused):
                break
        assert told is not None
        assert told.first[0].index >= at
        assert await trace.cancel("while it rests")
        with pytest.raises(tracewire.TraceFailed, match="while it rests"):
            await trace.result()
        with pytest.raises(tracewire.TraceEnded):
            await trace.resume()
