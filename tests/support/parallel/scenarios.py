"""What is tried on every layout of an engine, and compared with one rank: each is what a trace came to.

A scenario returns values that can be compared: token ids, saves, what became of the trace. Where the layout is allowed
to differ, it leaves that out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import numpy as np

from tests.support.blocks import parallel as blocks
from tests.support.steering import check_order, direction, held_up, schedule_of, steer_along
from tracewire import (
    Ablate,
    AttentionPattern,
    Clamp,
    Client,
    Coordinates,
    Features,
    Final,
    HeadAblate,
    HeadProbe,
    Hold,
    Lens,
    Live,
    LogitLens,
    Model,
    Output,
    Patch,
    Probe,
    Project,
    Restarted,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    StopWhen,
    TraceEnded,
    TraceFailed,
    When,
)
from tracewire_bus.wire.columns import layout_of
from tracewire_bus.wire.messages import Columns

__all__ = ["SCENARIOS", "TIES", "check_events", "check_restarted", "outcome", "same"]

PROMPT = "def add(a, b):\n    return"
PROMPTS = ["import os\n", "class A:\n    ", "The module provides"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}

#: In which the demo model finds tokens about as likely as each other: rounding that is done in another order, as with
#: tensor parallelism, decides between them.
TIES = {"several_invokes", "several_choices", "sampling_parameters", "shared_values", "module_calls", "declared_reads"}

Scenario = Callable[[Client, Model], Awaitable[Any]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Enter a scenario by its name."""
    SCENARIOS[function.__name__] = function
    return function


def check_events(events: list[Any]) -> None:
    """Every token index once, with a list of deltas for each; one final, the last."""
    finals = [event for event in events if isinstance(event, Final)]
    assert len(finals) == 1
    assert events[-1] is finals[0]
    tokens: dict[tuple[int, int], list[int]] = {}
    for event in events:
        if isinstance(event, Output):
            assert len(event.deltas) == len(event.token_ids)
            tokens.setdefault((event.invoke, event.choice), []).extend(
                range(event.index, event.index + len(event.token_ids))
            )
    for indices in tokens.values():
        assert indices == list(range(len(indices)))


def check_restarted(events: list[Any]) -> None:
    """One final in all; one restart, in the middle; and the attempt behind it as `check_events` has it."""
    assert [type(event) for event in events].count(Final) == 1
    (restart,) = [place for place, event in enumerate(events) if isinstance(event, Restarted)]
    assert any(isinstance(event, Output) for event in events[:restart])
    check_events(events[restart + 1 :])


def steps(events: list[Any]) -> dict[tuple[int, int, int], list[tuple[str, Any]]]:
    """By invoke, choice and token: what kinds of deltas came with it, and where."""
    found = {}
    for event in events:
        if isinstance(event, Output):
            for offset, deltas in enumerate(event.deltas):
                kinds = [
                    (type(delta).__name__, layout_of(delta.layout).names if isinstance(delta, Columns) else delta.path)
                    for delta in deltas
                ]
                # The order of names is nobody's.
                found[event.invoke, event.choice, event.index + offset] = sorted(
                    kinds, key=lambda kind: str(kind[1][0])
                )
    return found


async def outcome(client: Client, model: Model, block: Any = None, prompt: Any = PROMPT, **options: Any) -> Any:
    """What became of a trace: its choices, the step in which each delta came, its end and its error."""
    options = {**GREEDY, "max_tokens": 6, **options}
    prompts = {"prompts": prompt} if isinstance(prompt, list) and isinstance(prompt[0], str) else {"prompt": prompt}
    async with client.trace(model, block=block, **prompts, **options) as trace:
        try:
            await trace.result()
        except TraceFailed:
            pass
        events = [event async for event in client.subscribe(trace.id, since="start")]
        state = await client.get_state(trace.id)
    check_events(events)
    error = state.error
    return {
        "status": state.status,
        "error": None if error is None else [error.type, error.message, error.line, error.source],
        "save_errors": state.save_errors,
        "choices": [
            [choice.token_ids, choice.saves, choice.finish_reason]
            for invoke in state.invokes
            for choice in invoke.choices
        ],
        "steps": steps(events),
    }


def same(one: Any, other: Any, *, tolerance: float = 0.0, path: str = "") -> list[str]:
    """Where two outcomes differ; arrays and floats by more than `tolerance` of the largest element."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {list(one)} and {list(other)}"]
        return [line for key in one for line in same(one[key], other[key], tolerance=tolerance, path=f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} items and {len(other)}: {one!r:.200} and {other!r:.200}"]
        return [
            line
            for index, (a, b) in enumerate(zip(one, other, strict=True))
            for line in same(a, b, tolerance=tolerance, path=f"{path}[{index}]")
        ]
    if isinstance(one, (np.ndarray, float)):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if a.shape != b.shape:
            return [f"{path}: shapes {a.shape} and {b.shape}"]
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return [f"{path}: NaN at other places"]
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        off = float(np.abs(a - b).max(initial=0.0))
        return [f"{path}: off by {off}"] if off > tolerance * max(1.0, float(np.abs(a).max(initial=0.0))) else []
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


# --- blocks -----------------------------------------------------------------------------------------------------------


@scenario
async def plain(client: Client, model: Model) -> Any:
    return await outcome(client, model)


@scenario
async def reads(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.reads_in_order)


@scenario
async def logits_and_samples(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.logits_and_samples)


@scenario
async def arithmetic(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.arithmetic)


@scenario
async def edits(client: Client, model: Model) -> Any:
    written = await outcome(client, model, blocks.written(amount=1.25))
    carried = await outcome(client, model, blocks.carried(amount=0.125))
    return [written, carried]


@scenario
async def forced_tokens(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.forced(token=17))


@scenario
async def skipped_layers(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.skips(layers=[2, 5]), max_tokens=3)


@scenario
async def some_steps(client: Client, model: Model) -> Any:
    once = await outcome(client, model, blocks.without_a_loop, max_tokens=12)
    later = await outcome(client, model, blocks.later_steps, max_tokens=8)
    return [once, later]


@scenario
async def module_calls(client: Client, model: Model) -> Any:
    return [
        await outcome(client, model, block)
        for block in (blocks.lens, blocks.lens_at_every_layer, blocks.early_calls, blocks.late_calls)
    ]


@scenario
async def cache(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.cached)


@scenario
async def several_invokes(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.arithmetic, prompt=PROMPTS)


@scenario
async def several_choices(client: Client, model: Model) -> Any:
    return await outcome(client, model, blocks.logits_and_samples, n=2, temperature=0.8, seed=5)


@scenario
async def several_at_once(client: Client, model: Model) -> Any:
    """Different blocks, plain requests and declared interventions in the same steps."""
    found: dict[int, Any] = {}
    kinds: list[dict[str, Any]] = [
        {"block": blocks.carried(amount=0.125)},
        {},
        {"block": blocks.reads_in_order},
        {"interventions": [Probe("early", "residual(1)"), Probe("late", "residual(6)")]},
        {"block": blocks.without_a_loop},
        {"block": blocks.lens},
    ]

    async def one(number: int) -> None:
        found[number] = await outcome(client, model, **kinds[number], max_tokens=6 + 3 * number)

    async with anyio.create_task_group() as group:
        for number in range(len(kinds)):
            group.start_soon(one, number)
    return [[found[number]["status"], found[number]["choices"][0][0]] for number in sorted(found)]


@scenario
async def sampling_parameters(client: Client, model: Model) -> Any:
    """Requests with other parameters join a batch and leave it, each in another step, and none samples by another's."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4},
        {"logit_bias": {40: 30.0}},
        {"frequency_penalty": 1.2, "presence_penalty": 0.5},
        {"bad_words": ["return"]},
        {"min_tokens": 9, "ignore_eos": False},
        {"allowed_token_ids": [40, 41, 42, 43, 44, 45]},
        {},
    ]
    found: dict[int, Any] = {}

    async def one(number: int) -> None:
        options: dict[str, Any] = {**GREEDY, **kinds[number], "max_tokens": 12 + number % 3}
        async with client.trace(model, PROMPTS[number % 3], **options) as trace:
            async for output in trace:
                # The next one begins when this one has a token.
                if isinstance(output, Output) and output.index == 0 and number + 1 < len(kinds):
                    group.start_soon(one, number + 1)
            found[number] = (await trace.result()).token_ids

    async with anyio.create_task_group() as group:
        group.start_soon(one, 0)
    return [found[number] for number in sorted(found)]


@scenario
async def large_values(client: Client, model: Model) -> Any:
    async with client.trace(model, list(range(1, 201)), blocks.large, **GREEDY, max_tokens=3) as trace:
        result = await trace.result()
        loaded = {name: await value.load() if hasattr(value, "load") else value for name, value in result.saves.items()}
    return [result.token_ids, loaded]


@scenario
async def shared_values(client: Client, model: Model) -> Any:
    shared = {"seen": [], "sums": np.zeros(6)}
    async with client.trace(model, prompts=PROMPTS, block=blocks.collects, shared=shared, **GREEDY, max_tokens=6) as t:
        result = await t.result()
    ids = [token for invoke in result.invokes for token in invoke.choices[0].token_ids]
    assert sorted(result.shared["seen"]) == sorted(ids)
    return [ids, result.shared["sums"]]


@scenario
async def a_result(client: Client, model: Model) -> Any:
    # What it put out and the notice of its end take different ways to the workers: either may be there first.
    found = [await outcome(client, model, blocks.asks_result) for _ in range(4)]
    for one in found:
        assert one["choices"][0][1]["ids"] == one["choices"][0][0]
    return found


@scenario
async def standing(client: Client, model: Model) -> Any:
    """Edits on every request, beside a block and without one; one of them fails on its own."""
    edits = client.edits(model.name)
    await edits.clear()
    try:
        await edits.install("carried", blocks.carried(amount=0.125))
        await edits.install("seen", blocks.arithmetic)
        found = [await outcome(client, model), await outcome(client, model, blocks.reads_in_order)]
        await edits.install("broken", blocks.raises(layer=6, at=2))
        found.append(await outcome(client, model))
    finally:
        await edits.clear()
    return found


# --- what goes wrong --------------------------------------------------------------------------------------------------


@scenario
async def block_errors(client: Client, model: Model) -> Any:
    return [
        await outcome(client, model, blocks.raises(layer=1, at=2)),
        await outcome(client, model, blocks.raises(layer=6, at=2)),
        await outcome(client, model, blocks.raises_after_samples),
        await outcome(client, model, blocks.raises_at_once),
        await outcome(client, model, blocks.wrong_shape(layer=1)),
        await outcome(client, model, blocks.wrong_shape(layer=6)),
    ]


@scenario
async def out_of_order(client: Client, model: Model) -> Any:
    return [
        await outcome(client, model, blocks.out_of_order(first=first, then=then))
        for first, then in ((2, 1), (6, 5), (6, 1))
    ]


@scenario
async def stops(client: Client, model: Model) -> Any:
    return [await outcome(client, model, blocks.stops(layer=layer, at=3), max_tokens=40) for layer in (1, 6)]


@scenario
async def cancelled(client: Client, model: Model) -> Any:
    """In the middle; and what comes next is served as ever."""
    for block in (blocks.reads_in_order, blocks.carried(amount=0.1), None):
        async with client.trace(model, PROMPT, block, **GREEDY, max_tokens=2000) as trace:
            async for item in trace:
                if isinstance(item, Output) and item.index >= 4:
                    break
            await trace.cancel()
            events = [event async for event in client.subscribe(trace.id, since="start")]
        check_events(events)
        assert events[-1].status == "cancelled", events[-1]
    return await outcome(client, model, blocks.arithmetic)


@scenario
async def rests(client: Client, model: Model) -> Any:
    """Paused again and again for a few steps, one beside others or all: each goes on with its own last token."""
    tokens, pauses = 120, 0

    async def one(number: int) -> None:
        nonlocal pauses
        sampling = {**GREEDY, "max_tokens": tokens}
        async with client.trace(model, PROMPTS[number % 3], blocks.fed, **sampling) as trace:
            left = [5 * count + number * (count % 2) for count in range(1, 20)]
            async for item in trace:
                if isinstance(item, Output) and left and item.index >= left[0]:
                    left = [index for index in left if index > item.index]
                    with suppress(TraceEnded):
                        pauses += await trace.pause()
                        await trace.resume()
            result = await trace.result()
        assert len(result.token_ids) == tokens
        assert result.saves["ids"][1:tokens] == result.token_ids[:-1]

    # On a busy machine the client reads late, so that few of its pauses come before the end.
    for _ in range(5):
        pauses = 0
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(one, number)
        if pauses > 3:
            break
    assert pauses > 3


# --- declared interventions -------------------------------------------------------------------------------------------


@scenario
async def declared_reads(client: Client, model: Model) -> Any:
    weight = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32)
    interventions = [
        Probe("early", "residual(1)"),
        Probe("late", "residual(6)", weight, activation="sigmoid"),
        Probe("all", "residual(*)", reduce="norm"),
        LogitLens("lens", "residual(*)", top_k=3),
    ]
    return await outcome(client, model, interventions=interventions)


@scenario
async def declared_edits(client: Client, model: Model) -> Any:
    vector = direction(model)
    kinds = [
        edit
        for where in ("residual(1)", "residual(6)")
        for edit in (Steer(where, vector, scale=4.0), Clamp(where, vector, max=0.5), Ablate(where, vector))
    ]
    after = Probe("after", "residual(7)")
    return [await outcome(client, model, interventions=[edit, after]) for edit in kinds]


@scenario
async def declared_patches(client: Client, model: Model) -> Any:
    """Of one prompt's values into another, at positions alike and each with its own row; read behind the patch."""
    reads = [Probe("early", "residual(1)", positions="prompt"), Probe("late", "residual(6)", positions="prompt")]
    options: Any = {**GREEDY, "max_tokens": 1}
    saved = await (await client.trace(model, PROMPTS[0], interventions=reads, **options).result()).load()
    found = []
    for where, name in (("residual(1)", "early"), ("residual(6)", "late")):
        (values,) = saved[name]
        found += [
            Patch(where, values[-1]),
            Patch(where, values[:2], positions=[1, 0]),
            Patch(where, values[0], positions="2:", strength=0.5),
        ]
    after = Probe("after", "residual(7)")
    return [await outcome(client, model, interventions=[edit, after]) for edit in found]


@scenario
async def declared_heads(client: Client, model: Model) -> Any:
    """Heads of an early and a late layer, read, scaled, ablated and replaced; with one of them alone and among all."""
    found = []
    for layer in (1, 6):
        size = model.tree.attention[layer].head_size
        last = model.tree.attention[layer].heads - 1
        where, mean = f"heads({layer})", np.linspace(-1, 1, size, dtype=np.float32)
        for edit in (
            HeadAblate(where, [0, last]),
            HeadAblate(where, last, keep=2.0, mean=mean),
            Patch(where, np.stack([mean, -mean]), heads=[last, 1], positions=[0, -1]),
        ):
            reads = [HeadProbe("heads", where), HeadProbe("one", where, heads=last, reduce="norm")]
            found.append(await outcome(client, model, interventions=[edit, *reads, Probe("after", "residual(7)")]))
            found.append(await outcome(client, model, interventions=[edit, Probe("after", "residual(7)")]))
    return found


@scenario
async def attention_patterns(client: Client, model: Model) -> Any:
    """Of all and of some heads, the greatest weights and whole, of the prompt and of what is generated."""
    found = []
    for layer in (1, 6):
        where, last = f"heads({layer})", model.tree.attention[layer].heads - 1
        patterns = [
            AttentionPattern("top", where, top_k=4),
            AttentionPattern("whole", where, heads=[last, 0], top_k=0),
            AttentionPattern("prompt", where, heads=1, top_k=0, positions="prompt"),
        ]
        came_to = await outcome(client, model, interventions=patterns)
        for _, saves, _ in came_to["choices"]:
            # Equal weights have no order.
            saves["top"] = [one["weights"] for one in saves["top"]]
        found.append(came_to)
    return found


@scenario
async def declared_stop(client: Client, model: Model) -> Any:
    weight = np.ones(model.info.hidden_size, np.float32)
    found = []
    for layer in (1, 6):
        probe = Probe("score", f"residual({layer})", weight * 0)
        stop = StopWhen("score", above=-1.0)
        found.append(await outcome(client, model, interventions=[probe, stop], max_tokens=40))
    return found


@scenario
async def declared_and_a_block(client: Client, model: Model) -> Any:
    interventions = [Steer("residual(1)", direction(model), scale=3.0), Probe("late", "residual(6)")]
    return await outcome(client, model, blocks.arithmetic, interventions=interventions)


@scenario
async def declared_errors(client: Client, model: Model) -> Any:
    found = []
    for layer in (1, 6):
        wrong = Probe("x", f"model.layers.{layer}.mlp", np.ones(7, np.float32))
        came_to = await outcome(client, model, interventions=[wrong])
        found.append([came_to["status"], came_to["error"]])
    return found


@scenario
async def declared_conditions(client: Client, model: Model) -> Any:
    vector, found = direction(model), []
    for when in (
        When(probe="score", above=-0.5, release=-2.0),
        When(probe="score", below=0.5, start=1, stop=5),
        When(every=2),
        When(text=" "),
        When(part="answer"),
    ):
        interventions = [
            Probe("score", "residual(2)", vector),
            Steer("residual(3)", vector, scale=3.0, when=when),
            Probe("after", "residual(3)", when=when),
        ]
        found.append(await outcome(client, model, interventions=interventions))
    return [[one["status"], *(choice[:2] for choice in one["choices"])] for one in found]


@scenario
async def declared_hold(client: Client, model: Model) -> Any:
    vector, found = direction(model), []
    for more in ({}, {"gain": 0.1, "proportional": 0.05}, {"gain": 0.1, "when": When(part="answer")}):
        probe = Probe("value", "residual(3)", vector)
        hold = Hold("strength", "residual(3)", vector, "value", 2.0, min=-4.0, max=4.0, **more)
        found.append(await outcome(client, model, interventions=[probe, hold, Probe("after", "residual(3)", vector)]))
    return found


@scenario
async def declared_features(client: Client, model: Model) -> Any:
    width = model.info.hidden_size
    encoder, decoder = np.random.default_rng(3).normal(size=(2, 48, width)).astype(np.float32) / 16
    found = []
    for kind in ({}, {"architecture": "jumprelu", "threshold": np.full(48, 0.2, np.float32)}):
        sae = SparseAutoencoder(encoder, decoder, **kind)
        reads = [Features("chosen", "residual(2)", sae, indices=[1, 7]), Probe("after", "residual(2)")]
        edit = SteerFeatures("residual(2)", sae, [1, 7], scale=0.5, add=2.0)
        found.append(await outcome(client, model, interventions=[reads[0], edit, reads[1]]))
    return found


@scenario
async def declared_maps_and_subspaces(client: Client, model: Model) -> Any:
    width = model.info.hidden_size
    basis = np.random.default_rng(4).normal(size=(3, width)).astype(np.float32)
    reads = [
        Lens("lens", "residual(2)", np.eye(width, dtype=np.float32), top_k=1),
        Coordinates("coordinates", "residual(*)", basis),
        Probe("moments", "residual(6)", reduce="moments"),
    ]
    edits = [Project("residual(3)", basis, remove=True), Project("residual(5)", basis, strength=0.25)]
    # The tokens are given: without a subspace, the demo model finds some about as likely as each other.
    given = [266, 14, 671, 8, 66, 12]
    return await outcome(client, model, interventions=[*edits, *reads], forced_tokens=given)


# --- steered while it runs --------------------------------------------------------------------------------------------


@scenario
async def live(client: Client, model: Model) -> Any:
    """A change holds from one step on, on all ranks: the run that knew the values beforehand is the same."""
    vector, sampling = direction(model), {**GREEDY, "max_tokens": 200}
    async with client.trace(model, PROMPT, blocks.steered(direction=vector), live={"alpha": 0.0}, **sampling) as trace:
        items = await steer_along(trace, [3.0, -2.0, 5.5, 0.5, -4.0], 7, in_turn=True)
        result = await trace.result()
    check_order(items)
    values = schedule_of(items, 0.0, 200)
    assert len(set(values)) == 6
    assert result.saves["used"][:200] == [[value, value] for value in values]
    async with client.trace(model, PROMPT, blocks.scheduled(direction=vector, schedule=values), **sampling) as trace:
        known = await trace.result()
    assert result.token_ids == known.token_ids
    assert not same(result.saves["seen"][:200], known.saves["seen"][:200])
    return len(result.saves["seen"]) - 200


@scenario
async def live_declared(client: Client, model: Model) -> Any:
    vector, sampling = direction(model), {**GREEDY, "max_tokens": 60}
    interventions = [
        Steer("residual(2)", vector, scale=Live("alpha")),
        Steer("residual(5)", vector, scale=Live("alpha")),
        Probe("seen", "residual(7)"),
    ]
    async with (
        held_up(client, model),
        client.trace(model, PROMPT, interventions=interventions, live={"alpha": 0.0}, **sampling) as trace,
    ):
        items = await steer_along(trace, [3.0, -2.0, 4.5], 9, in_turn=True)
        result = await trace.result()
    check_order(items)
    values = schedule_of(items, 0.0, 60)
    assert len(set(values)) == 4
    return len(result.saves["seen"])
