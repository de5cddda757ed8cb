"""Live parameters on a real engine: a change holds from exactly the token that its event names."""

from __future__ import annotations

import random
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.blocks.steering import added, reads, reads_until_over, scheduled, steered
from tests.support.steering import PROMPT, check_order, direction, has, held_up, schedule_of, steer_along
from tracewire import Client, Live, Model, Output, Probe, Steer, Steered, StopWhen


async def test_a_change_holds_from_the_token_that_its_event_names(live_client: Client, model: Model) -> None:
    vector = direction(model)
    async with live_client.trace(
        model, PROMPT, steered(direction=vector), live={"alpha": 0.0}, max_tokens=300, temperature=0.0, ignore_eos=True
    ) as trace:
        items = await steer_along(trace, [3.0, -2.0, 5.5], 8, in_turn=True)
        live = await trace.result()
    check_order(items)
    expected = schedule_of(items, 0.0, 300)
    assert live.saves["used"][:300] == expected
    assert len(set(expected)) == 4
    async with live_client.trace(
        model, PROMPT, scheduled(direction=vector, schedule=expected), max_tokens=300, temperature=0.0, ignore_eos=True
    ) as trace:
        known = await trace.result()
    assert live.token_ids == known.token_ids
    for one, other in zip(live.saves["norms"], known.saves["norms"], strict=True):
        assert np.array_equal(one, other)


async def test_fifty_changes_at_random_steps(live_client: Client, model: Model) -> None:
    vector = direction(model)
    generator = random.Random(3)
    values = [round(generator.uniform(-4, 4), 3) for _ in range(50)]
    marks = sorted(generator.sample(range(1, 150), 50))
    items: list[Any] = []
    async with live_client.trace(
        model, PROMPT, steered(direction=vector), live={"alpha": 0.5}, max_tokens=300, temperature=0.0, ignore_eos=True
    ) as trace:
        tokens, place = 0, 0
        async for item in trace:
            items.append(item)
            if isinstance(item, Output):
                tokens += len(item.token_ids)
                while place < 50 and tokens >= marks[place]:
                    await trace.steer(alpha=values[place])
                    place += 1
        live = await trace.result()
    check_order(items)
    changes = [change for item in items if isinstance(item, Steered) for change in item.changes]
    assert [change.values["alpha"] for change in changes] == values
    expected = schedule_of(items, 0.5, 300)
    assert live.saves["used"][:300] == expected
    async with live_client.trace(
        model, PROMPT, scheduled(direction=vector, schedule=expected), max_tokens=300, temperature=0.0, ignore_eos=True
    ) as trace:
        known = await trace.result()
    assert live.token_ids == known.token_ids
    assert live.digest() == known.digest()


async def test_a_block_sees_one_value_a_step(live_client: Client, model: Model) -> None:
    async with live_client.trace(
        model, PROMPT, reads(), live={"alpha": 0.0}, max_tokens=200, temperature=0.0, ignore_eos=True
    ) as trace:
        items = await steer_along(trace, [float(number) for number in range(1, 20)], 2)
        saves = (await trace.result()).saves
    expected = schedule_of(items, 0.0, 200)
    assert [row[0] for row in saves["seen"]][:200] == list(range(200))
    assert [set(row[1:]) for row in saves["seen"]][:200] == [{value} for value in expected]


async def test_declared_interventions_take_live_scales_and_vectors(live_client: Client, model: Model) -> None:
    async with held_up(live_client, model):
        vector, other = direction(model), direction(model)[::-1].copy()
        interventions = [
            Steer("residual(2)", Live("vector"), scale=Live("alpha")),
            Probe("norms", "residual(4)"),
        ]
        sampling = {"max_tokens": 80, "temperature": 0.0, "ignore_eos": True}
        items: list[Any] = []
        told = 0
        async with live_client.trace(
            model, PROMPT, interventions=interventions, live={"alpha": 0.0, "vector": vector}, **sampling
        ) as trace:
            async for item in trace:
                items.append(item)
                if has(item, 6):
                    await trace.steer(alpha=2.0)
                told += isinstance(item, Steered)
                if told == 1 and isinstance(item, Steered):
                    await trace.steer(alpha=-1.0, vector=other.astype(np.float64))
            live = await trace.result()
        check_order(items)
        first, second = [item.first[0].index for item in items if isinstance(item, Steered)]
        assert [change.by for item in items if isinstance(item, Steered) for change in item.changes] == [
            "submitter"
        ] * 2

        vectors = [0 * vector] * first + [2 * vector] * (second - first) + [-other]
        async with live_client.trace(model, PROMPT, added(vectors=vectors), **sampling) as trace:
            known = await trace.result()
        assert live.token_ids == known.token_ids
        for one, same in zip(live.saves["norms"], known.saves["norms"], strict=False):
            assert np.array_equal(one, same)


async def test_outputs_without_reads_come_in_order_too(live_client: Client, model: Model) -> None:
    async with held_up(live_client, model):
        interventions = [Steer("residual(2)", direction(model), scale=Live("alpha"))]
        sampling = {"max_tokens": 80, "temperature": 0.0, "ignore_eos": True}
        async with live_client.trace(
            model, PROMPT, interventions=interventions, live={"alpha": 0.0}, **sampling
        ) as trace:
            items = await steer_along(trace, [4.0, -4.0, 0.0, 2.0], 6)
            result = await trace.result()
        check_order(items)
        expected = schedule_of(items, 0.0, 80)
        block = added(vectors=[alpha * direction(model) for alpha in expected])
        async with live_client.trace(model, PROMPT, block, **sampling) as trace:
            known = await trace.result()
        assert result.token_ids == known.token_ids


async def test_a_live_threshold_ends_at_its_token(live_client: Client, model: Model) -> None:
    async with held_up(live_client, model):
        interventions = [
            Probe("norm", "residual(3)", reduce="norm"),
            StopWhen("norm", above=Live("limit")),
        ]
        items: list[Any] = []
        async with live_client.trace(
            model, PROMPT, interventions=interventions, live={"limit": 1e9}, max_tokens=60, ignore_eos=True
        ) as trace:
            async for item in trace:
                items.append(item)
                if has(item, 10):
                    await trace.steer(limit=0.0)
            result = await trace.result()
        (told,) = [item for item in items if isinstance(item, Steered)]
        assert result.status == "stopped"
        assert len(result.token_ids) == told.first[0].index + 1


async def test_what_was_changed_while_queued_holds_from_the_first_token(live_client: Client, model: Model) -> None:
    vector = direction(model)
    trace = live_client.trace(
        model, PROMPT, steered(direction=vector), live={"alpha": 0.0}, max_tokens=100, temperature=0.0, ignore_eos=True
    )
    # Its record is there as soon as it is submitted; an engine may or may not have taken it.
    async with trace:
        assert await trace.steer(alpha=1.0) == 1
        events = [event async for event in live_client.subscribe(trace.id)]
        result = await trace.result()
    told = [event for event in events if isinstance(event, Steered)]
    assert [change.values for event in told for change in event.changes] == [{"alpha": 1.0}]
    assert result.saves["used"][:100] == schedule_of(events, 0.0, 100)
    assert result.live_version == 1


async def test_all_choices_of_all_prompts_change_in_the_same_step(live_client: Client, model: Model) -> None:
    vector = direction(model)
    items: list[Any] = []
    async with live_client.trace(
        model,
        prompts=[PROMPT, "Once upon a time", "import os"],
        block=steered(direction=vector),
        live={"alpha": 0.0},
        max_tokens=30,
        n=2,
        seed=4,
        temperature=0.7,
        ignore_eos=True,
    ) as trace:
        async for item in trace:
            items.append(item)
            if isinstance(item, Output) and item.invoke == 0 and item.choice == 0 and item.index in (5, 15):
                await trace.steer(alpha=float(item.index))
        result = await trace.result()
    check_order(items)
    for invoke in result.invokes:
        for choice in invoke.choices:
            place = choice.invoke, choice.choice
            assert choice.saves["used"][:30] == schedule_of(items, 0.0, 30, place)
    assert all(len(item.first) == 6 for item in items if isinstance(item, Steered))


async def test_many_controllers_one_order(live_client: Client, model: Model, engine_bus: str) -> None:
    """Every accepted change appears once, in one order for all consumers, and versions never go back."""
    accepted: dict[int, float] = {}
    seen: list[list[Any]] = [[], []]
    async with live_client.trace(
        model, PROMPT, reads_until_over(), live={"alpha": 0.0, "over": False}, max_tokens=1500, ignore_eos=True
    ) as trace:

        async def control(client: Client, number: int) -> None:
            for turn in range(5):
                value = number * 10.0 + turn
                version = await client.steer(trace.id, alpha=value)
                assert version not in accepted
                accepted[version] = value

        async def follow(events: list[Any]) -> None:
            events.extend([event async for event in live_client.subscribe(trace.id)])

        async with tracewire.connect(engine_bus, name="other") as other, anyio.create_task_group() as group:
            await trace.accepted()
            for events in seen:
                group.start_soon(follow, events)
            async with anyio.create_task_group() as controllers:
                for number in range(100):
                    controllers.start_soon(control, other if number % 2 else live_client, number)
            assert await trace.steer(over=True) == 501
        result = await trace.result()
    assert result.status == "stopped"
    for events in seen:
        check_order(events)
        changes = [change for event in events if isinstance(event, Steered) for change in event.changes]
        assert changes.pop().values == {"over": True}
        assert {change.version: change.values["alpha"] for change in changes} == accepted
        assert result.saves["seen"][-1] == changes[-1].values["alpha"]
    assert len(accepted) == 500


async def test_steers_that_cannot_be(live_client: Client, model: Model) -> None:
    live = {"alpha": 0.0, "name": "a", "flag": True, "vector": np.zeros(4, np.float32)}
    async with live_client.trace(model, PROMPT, reads(), live=live, max_tokens=80, ignore_eos=True) as trace:
        await trace.accepted()
        for values, field in [
            ({"alpha": float("nan")}, "live.alpha"),
            ({"alpha": float("inf")}, "live.alpha"),
            ({"alpha": "high"}, "live.alpha"),
            ({"flag": 1.0}, "live.flag"),
            ({"vector": np.zeros(5, np.float32)}, "live.vector"),
            ({"vector": np.zeros(4, np.int64)}, "live.vector"),
            ({"vector": np.array([0, 1, np.nan, 2], np.float32)}, "live.vector"),
            ({"beta": 1.0}, "live.beta"),
            ({"alpha": 1.0, "beta": 1.0}, "live.beta"),
            ({}, "live"),
        ]:
            with pytest.raises(tracewire.SteerRejected) as caught:
                await trace.steer(values)
            assert caught.value.field == field
        assert (await live_client.get_live(trace.id)).version == 0
        assert await trace.steer(name="b", flag=False, vector=np.ones(4, np.float64), if_version=0) == 1
        with pytest.raises(tracewire.VersionConflict) as conflict:
            await trace.steer(alpha=1.0, if_version=0)
        assert conflict.value.version == 1
        now = await live_client.get_live(trace.id)
        assert (now.version, now.values["name"], now.values["flag"], now.values["alpha"]) == (1, "b", False, 0.0)
        assert now.values["vector"].dtype == np.float32
        result = await trace.result()
    assert result.status == "finished"
    with pytest.raises(tracewire.TraceEnded):
        await trace.steer(alpha=1.0)
    with pytest.raises(tracewire.UnknownTrace):
        await live_client.steer("nobody-knows", alpha=1.0)


async def test_a_flood_of_changes_is_told_whole_and_drowns_nobody(live_client: Client, model: Model) -> None:
    """Controllers that steer as fast as they can, all the time: the trace and its neighbour end as they would have."""
    flood = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    async with live_client.trace(model, PROMPT, **flood) as alone:
        expected = (await alone.result()).token_ids
    accepted: dict[int, float] = {}
    refused: list[str] = []
    over = anyio.Event()
    async with (
        live_client.trace(model, PROMPT, reads(), live={"alpha": 0.0}, **flood) as trace,
        live_client.trace(model, PROMPT, **flood) as neighbour,
    ):

        async def control(number: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                value = number * 1e6 + turn
                try:
                    accepted[await live_client.steer(trace.id, alpha=value)] = value
                except tracewire.SteerRejected as error:
                    refused.append(error.reason)
                except tracewire.TraceEnded:
                    return

        async with anyio.create_task_group() as group:
            await trace.accepted()
            for number in range(32):
                group.start_soon(control, number)
            result = await trace.result()
            assert (await neighbour.result()).token_ids == expected
            over.set()
        events = [event async for event in live_client.subscribe(trace.id)]
    assert result.token_ids == expected
    check_order(events)
    changes = [change for event in events if isinstance(event, Steered) for change in event.changes]
    assert {change.version: change.values["alpha"] for change in changes} == accepted
    assert [change.version for change in changes] == list(range(1, len(accepted) + 1))
    # Far more changes than steps.
    assert len(accepted) > 120
    assert set(refused) <= {"busy"}
