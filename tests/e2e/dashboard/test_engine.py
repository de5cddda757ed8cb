"""The dashboard before a real engine: a trace from the form, its lens, and steering that changes the text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from statistics import mean
from typing import Any

import pytest
from playwright.async_api import expect

from tests.support import ROOT
from tests.support.gateways import Served, serving
from tests.support.until import until
from tracewire import AttentionPattern, Client, Model, Output, Steered

DIRECTION = ROOT / "examples" / "demo_model" / "direction.npy"


@pytest.fixture
async def served(engine_bus: str, model: Model) -> AsyncIterator[Served]:
    """A gateway of the shared engine's bus."""
    async with serving(engine_bus, "tw") as served:
        yield served


async def test_a_person_starts_watches_and_steers_a_trace(
    served: Served, client: Client, opened: Callable[..., Any]
) -> None:
    async with opened(f"{served.url}/dashboard/#/start") as page:
        await expect(page.get_by_label("Model")).to_have_value("demo")
        await page.get_by_label("Prompt").fill("This module provides")
        await page.get_by_label("Most tokens").fill("1500")
        await page.get_by_label("Go on behind the end-of-text token").check()
        await page.get_by_label("Trace id").fill("by-hand")
        await page.get_by_label("Direction", exact=True).set_input_files(DIRECTION)
        await page.get_by_role("button", name="Start").click()
        await expect(page.locator(".panel h2")).to_have_text("by-hand")
        # Held until the person has steered: on a busy machine a browser is slower than the engine.
        async for item in client.subscribe("by-hand"):
            if isinstance(item, Output) and item.index > 20:
                break
        await client.pause("by-hand")
        tokens = page.locator(".block .t")
        await expect(tokens.nth(20)).to_be_attached()
        # Steered while it runs: the mark stands before the token that the engine names.
        await page.get_by_label("alpha, as a number").fill("20")
        await page.get_by_label("alpha, as a number").press("Enter")

        async def is_steered() -> bool:
            return (await client.get_live("by-hand")).version > 0

        await until(is_steered)
        await client.resume("by-hand")
        # Held again before it can end.
        steered: list[Any] = []
        async for item in client.subscribe("by-hand"):
            if isinstance(item, Steered) or (steered and isinstance(item, Output)):
                steered.append(item)
            if len(steered) > 100:
                break
        await client.pause("by-hand")
        mark = page.locator(".mark")
        await expect(mark).to_have_text("alpha = 20 · anonymous")
        first = await mark.evaluate("(mark) => mark.nextSibling.index")
        await expect(tokens.nth(first + 20)).to_be_attached()
        plot = page.get_by_role("group", name="Plot of projection").locator("output")

        async def risen() -> bool:
            text = await plot.inner_text()
            return text.lstrip("-").replace(".", "").isdecimal() and float(text) > 10

        await until(risen)
        heat = page.get_by_role("region", name="Heat map of layers by tokens").locator("canvas")
        assert (await heat.get_attribute("aria-label") or "").startswith("Heat map of lens: 8 rows by")
        await page.get_by_role("button", name="Cancel").click()
        await expect(page.locator(".panel .badge")).to_have_text("cancelled")
        state = await client.get_state("by-hand")
        drawn = "[...document.querySelectorAll('.block .t')].map((one) => one.textContent).join('')"

        async def is_whole() -> bool:
            return await page.evaluate(drawn) == state.text

        await until(is_whole)
        projection = [float(value) for value in state.saves["projection"]]
        assert len(projection) == len(state.token_ids)
        # 20 times the direction, which has the length 1, is what was added.
        assert mean(projection[first:]) - mean(projection[:first]) > 10


async def test_what_the_heads_of_a_model_attend_to(
    served: Served, client: Client, model: Model, opened: Callable[..., Any]
) -> None:
    pattern = AttentionPattern("attends", "heads(2)", top_k=4)
    options: dict[str, Any] = {"interventions": [pattern], "token_strings": True, "temperature": 0.0}
    trace = client.trace(model, "import os\nimport", max_tokens=6, ignore_eos=True, **options)
    accepted = await trace.accepted()
    result = await trace.result()
    item = await result.load("attends")
    heads = model.tree.attention[2].heads
    strings = [*accepted.prompt_token_strings[0], *(result.token_strings or [])]
    position, weight = int(item[-1]["positions"][-1][0]), float(item[-1]["weights"][-1][0])
    async with opened(f"{served.url}/dashboard/#/trace/{trace.id}") as page:
        heat = page.get_by_role("region", name="Heat map of heads by tokens")
        await expect(heat.locator("canvas")).to_have_attribute(
            "aria-label", f"Heat map of attends: {heads} rows by 6 tokens"
        )
        await heat.focus()
        await page.keyboard.press("ArrowLeft")
        token = json.dumps(strings[position], ensure_ascii=False)
        shown = f"attends, row {heads - 1}, token 5: {token} at position {position} {weight:.4g}"
        await expect(page.locator(".heat .read")).to_have_text(shown)
