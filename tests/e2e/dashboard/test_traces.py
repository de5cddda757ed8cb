"""What a person sees and does of one trace: tokens, plots, marks, sliders, pause and cancel, the scrubber."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.e2e.dashboard.conftest import Stand, Steps
from tests.support.browser import violations
from tests.support.gateways import Served
from tests.support.scripted_engine import info, serving
from tests.support.shown_engine import HOSTILE, LAYERS, ShownEngine, projection_at, token_at
from tests.support.until import until
from tracewire_bus.bus import Bus

Opened = Callable[..., Any]


def text_of(tokens: int, alpha: float = 0.0, prompt: str = "Read", first: int = 0) -> str:
    return "".join(token_at(prompt, index, alpha) for index in range(first, tokens))


async def drawn(page: Page) -> str:
    """The text of all tokens in the page, marks left out."""
    return await page.evaluate("[...document.querySelectorAll('.block .t')].map((one) => one.textContent).join('')")


async def count(page: Page, tokens: int) -> None:
    """Wait until the page has so many tokens."""
    await expect(page.locator(".block .t")).to_have_count(tokens)


async def steps_of(page: Page) -> list[int]:
    """The step of the colour of each token."""
    classes = await page.evaluate("[...document.querySelectorAll('.block .t')].map((one) => one.className)")
    found = []
    for name in classes:
        step = next((part for part in name.split() if part[0] in "pn" and part[1:].isdecimal()), "p0")
        found.append(int(step[1:]) * (1 if step[0] == "p" else -1))
    return found


async def colours(page: Page, expected: list[int]) -> None:
    """Wait until the tokens have the colours of these steps."""

    async def coloured() -> bool:
        return await steps_of(page) == expected

    await until(coloured)


async def cancelled(stand: Stand, page: Page) -> None:
    """Let the engine step until it has taken the order to cancel."""

    async def is_over() -> bool:
        stand.steps.let(1)
        return await page.locator(".panel .badge").inner_text() == "cancelled"

    await until(is_over)


async def test_tokens_are_coloured_and_a_slider_changes_text_and_plot(
    stand: Stand, served: Served, opened: Opened
) -> None:
    await stand.trace("mine")
    stand.steps.let(40)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 40)
        assert await drawn(page) == text_of(40)
        # A wave about 0 from -6 to 6, on a scale of eight steps on each side.
        expected = [round(projection_at(index, 0.0) / 6 * 8) for index in range(40)]
        await colours(page, expected)
        assert min(expected) < 0 < max(expected)
        plot = page.get_by_role("group", name="Plot of projection")
        await expect(plot.locator("output")).to_have_text(f"{projection_at(39, 0.0):.4g}")
        before = await plot.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")

        await page.get_by_role("button", name="anonymous").click()
        await page.get_by_label("Your name").fill("Ada <b>")
        await page.get_by_role("button", name="Use", exact=True).click()
        await count(page, 40)
        await page.get_by_label("alpha", exact=True).fill("5")
        await stand.steered(5.0)
        stand.steps.let(10)
        await count(page, 50)
        assert await drawn(page) == text_of(40) + text_of(50, 5.0, first=40)
        mark = page.locator(".mark")
        await expect(mark).to_have_text("alpha = 5 · anonymous/Ada <b>")
        # It stands before the first token under the change.
        assert await mark.evaluate("(mark) => mark.nextSibling.index") == 40
        await expect(page.locator(".history .steer")).to_contain_text("anonymous/Ada <b>: alpha 0 → 5, from token 40")
        await expect(plot.locator("output")).to_have_text(f"{projection_at(49, 5.0):.4g}")

        async def redrawn() -> bool:
            return before != await plot.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")

        await until(redrawn)


async def test_a_slider_follows_what_others_steer(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine")
    stand.steps.let(3)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 3)
        slider = page.get_by_label("alpha", exact=True)
        await expect(slider).to_have_value("0")
        await stand.client.steer("mine", alpha=-25.0)
        await stand.steered(-25.0)
        stand.steps.let(1)
        await expect(slider).to_have_value("-25")
        await expect(page.get_by_label("alpha, as a number")).to_have_value("-25")
        await expect(page.locator(".mark")).to_have_text("alpha = -25 · tester")


async def test_pause_resume_and_cancel(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine")
    stand.steps.let(5)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 5)
        badge = page.locator(".panel .badge")
        await expect(badge).to_have_text("running")
        await page.get_by_role("button", name="Pause").click()
        await expect(badge).to_have_text("paused")
        steps = stand.engine.steps
        stand.steps.let(5)
        await until(lambda: stand.engine.steps >= steps + 5)
        await count(page, 5)
        await page.get_by_role("button", name="Resume").click()
        await expect(badge).to_have_text("running")
        stand.steps.let(5)
        await count(page, 10)
        await page.get_by_role("button", name="Cancel").click()
        await cancelled(stand, page)
        await expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
        await expect(page.locator(".history")).to_contain_text("anonymous paused the trace.")
        # What has ended takes no change any more.
        await expect(page.get_by_label("alpha", exact=True)).to_be_disabled()
    assert (await stand.client.subscribe("mine").until_done()) == "cancelled"


async def test_a_recording_is_opened_scrubbed_and_played(
    stand: Stand, served: Served, opened: Opened, tmp_path: Path
) -> None:
    """It is shown as its trace is, of which no bus knows any more. What is no recording says so."""
    await stand.trace("mine", 40)
    stand.steps.let(10)
    await until(lambda: stand.engine.steps == 10)
    version = await stand.client.steer("mine", alpha=2.0, by="Ada")
    await stand.steered(2.0)
    stand.steps.let(30)
    recording = await stand.client.record("mine")
    file, wrong = tmp_path / "mine.twrec", tmp_path / "wrong.twrec"
    recording.save(file)
    wrong.write_bytes(file.read_bytes()[:-3])
    async with opened(f"{served.url}/dashboard/") as page:
        await page.get_by_role("link", name="Open a recording").click()
        await expect(page).to_have_title("Open a recording · Tracewire")
        await page.get_by_label("File").set_input_files(wrong)
        await expect(page.get_by_role("alert").first).to_contain_text("wrong.twrec: it is damaged")
        await page.get_by_label("File").set_input_files(file)
        await expect(page.locator(".panel h2")).to_have_text("mine")
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        await count(page, 40)
        whole = await drawn(page)
        assert whole == recording.state().text
        scrubber = page.get_by_label("Shown tokens")
        for tokens in (7, 0, 23):
            await scrubber.fill(str(tokens))
            await count(page, tokens)
            assert whole.startswith(await drawn(page))
            await expect(page.locator(".scrubber output")).to_have_text(f"{tokens} of 40 tokens")
        await page.get_by_role("button", name="Play").click()
        await count(page, 40)
        assert await drawn(page) == whole
        (steering,) = recording.steering()
        assert (steering.by, version) == ("Ada", 1)
        await expect(page.get_by_role("region", name="History")).to_contain_text(f"from token {steering.index}")
        await expect(page.get_by_label("alpha", exact=True)).to_be_disabled()
        assert await violations(page) == []


async def test_a_finished_trace_is_scrubbed_and_played(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine", 40)
    stand.steps.let(40)
    assert await stand.client.subscribe("mine").until_done() == "finished"
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        await count(page, 40)
        scrubber = page.get_by_label("Shown tokens")
        for tokens in (7, 0, 23, 39):
            await scrubber.fill(str(tokens))
            await count(page, tokens)
            assert await drawn(page) == text_of(tokens)
            await expect(page.locator(".scrubber output")).to_have_text(f"{tokens} of 40 tokens")
        plot = page.get_by_role("group", name="Plot of projection").locator("output")
        await expect(plot).to_have_text(f"{projection_at(38, 0.0):.4g}")
        await page.get_by_role("button", name="Latest").click()
        await count(page, 40)
        await scrubber.fill("30")
        await page.get_by_role("button", name="Play").click()
        await count(page, 40)
        assert await drawn(page) == text_of(40)


async def test_the_heat_map_and_the_values_of_a_picked_token(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine", 20)
    stand.steps.let(20)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 20)
        heat = page.get_by_role("region", name="Heat map of layers by tokens")
        await expect(heat.locator("canvas")).to_have_attribute(
            "aria-label", f"Heat map of lens: {LAYERS} rows by 20 tokens"
        )
        await heat.focus()
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        # The last layer says what was sampled.
        read = page.locator(".heat .read")
        await expect(read).to_contain_text(f'lens, row {LAYERS - 1}, token 18: "{token_at("Read", 18, 0.0)}"')
        await page.get_by_role("combobox", name="Heat map").select_option("norm")
        await page.keyboard.press("Tab")
        await expect(heat.locator("canvas")).to_have_attribute(
            "aria-label", f"Heat map of norm: {LAYERS} rows by 20 tokens"
        )
        await page.get_by_role("region", name="Text").last.focus()
        await page.keyboard.press("Home")
        for _ in range(4):
            await page.keyboard.press("ArrowRight")
        await expect(page.locator(".picked")).to_have_text(token_at("Read", 4, 0.0))
        await page.locator("summary").click()
        row = page.get_by_role("row").filter(has_text="projection")
        await expect(row.locator("td")).to_have_text(f"{projection_at(4, 0.0):.4g}")


async def test_what_heads_attend_to_is_a_heat_map(stand: Stand, served: Served, opened: Opened) -> None:
    prompt = "@ prompt of four"
    await stand.trace("mine", 10, prompt)
    stand.steps.let(10)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 10)
        await page.get_by_role("combobox", name="Heat map").select_option("attends")
        heat = page.get_by_role("region", name="Heat map of heads by tokens")
        await expect(heat.locator("canvas")).to_have_attribute("aria-label", "Heat map of attends: 2 rows by 10 tokens")
        await heat.focus()
        read = page.locator(".heat .read")
        # The last head looks at the last token: the one before the token that is sampled.
        await page.keyboard.press("ArrowLeft")
        last = token_at(prompt, 8, 0.0)
        await expect(read).to_have_text(f'attends, row 1, token 9: "{last}" at position 12 0.75')
        await page.keyboard.press("ArrowDown")
        await expect(read).to_have_text('attends, row 0, token 9: " @" at position 0 0.9')
        for _ in range(9):
            await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowUp")
        await expect(read).to_have_text('attends, row 1, token 0: " four" at position 3 0.75')
        await expect(page.locator(".heat .sampled")).to_be_hidden()
        await page.locator("summary").click()
        row = page.get_by_role("row").filter(has_text="attends.0")
        await expect(row.locator("td")).to_have_text('" @" 0.9   " four" 0.1')


async def test_a_hostile_text_stays_text(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine", prompt="<")
    stand.steps.let(30)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 30)
        assert await drawn(page) == "".join(HOSTILE) * 5
        await stand.client.steer("mine", alpha=1.0, by="<img src=x onerror=alert(2)>")
        await stand.steered(1.0)
        stand.steps.let(1)
        await expect(page.locator(".mark")).to_have_text("alpha = 1 · <img src=x onerror=alert(2)>")
        await stand.client.cancel("mine", "<script>alert(3)</script>", by="<b>")
        await cancelled(stand, page)
        assert await page.evaluate("document.querySelectorAll('.panel img, .panel script, .panel b > *').length") == 0
        assert await page.title() == "mine · Tracewire"
        # The list shows the end of the text, and the error.
        await page.get_by_role("link", name="Traces", exact=True).click()
        await expect(page.get_by_role("row").filter(has_text="mine")).to_be_visible()
        assert await page.evaluate("document.querySelectorAll('tbody img, tbody script').length") == 0


async def test_a_gateway_that_comes_back_loses_and_repeats_no_token(stand: Stand, opened: Opened) -> None:
    await stand.trace("mine", 60)
    async with stand.gateway() as first:
        stand.steps.let(15)
        opening = opened(f"{first.url}/dashboard/#/trace/mine")
        page = await opening.__aenter__()
        await count(page, 15)
        status = page.locator("#connection")
        await expect(status).to_have_text("Live")
    await expect(status).to_have_text("Reconnecting")
    # The trace goes on.
    stand.steps.let(20)
    await until(lambda: stand.engine.steps >= 35)
    async with stand.gateway():
        await expect(status).to_have_text("Live")
        await count(page, 35)
        stand.steps.let(25)
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        await count(page, 60)
        assert await drawn(page) == text_of(60)
        await colours(page, [round(projection_at(index, 0.0) / 6 * 8) for index in range(60)])
        await opening.__aexit__(None, None, None)


async def test_a_long_text_is_drawn_in_part_and_all_of_it_can_be_reached(
    stand: Stand, served: Served, opened: Opened
) -> None:
    await stand.trace("mine", 4600)
    stand.steps.let(4600)
    assert await stand.client.subscribe("mine").until_done() == "finished"
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await expect(page.locator(".scrubber output")).to_have_text("4600 of 4600 tokens")
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        seen = await drawn(page)
        assert text_of(4600).endswith(seen)
        shown = await page.locator(".block .t").count()
        assert 1000 < shown <= 4096

        async def first() -> int:
            return await page.evaluate("document.querySelector('.block .t')?.index ?? -1")

        async def moved(before: int) -> bool:
            return 0 <= await first() < before

        earlier = page.get_by_role("button", name="Show tokens before")
        while await earlier.is_visible():
            before = await first()
            await earlier.click()
            await until(lambda before=before: moved(before))
            assert await page.locator(".block .t").count() <= 4096
        assert text_of(4600).startswith(await drawn(page))


@pytest.mark.parametrize("stand", [{"retain_events": 16}], indirect=True)
async def test_what_was_trimmed_comes_as_a_state(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine")
    await stand.client.steer("mine", alpha=2.0)
    await stand.steered(2.0)
    for _ in range(100):
        stand.steps.let(1)
        steps = stand.engine.steps
        await until(lambda steps=steps: stand.engine.steps > steps)
    events = [event.type async for event in first_events(stand, 1)]
    assert events == ["gap"]
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await expect(page.locator(".scrubber output")).to_have_text("100 of 100 tokens")
        assert await drawn(page) == text_of(100, 2.0)
        await expect(page.get_by_label("alpha", exact=True)).to_have_value("2")
        await expect(page.locator(".history")).to_contain_text("Earlier events were trimmed")
        heat = page.get_by_role("region", name="Heat map of layers by tokens").locator("canvas")
        await expect(heat).to_have_attribute("aria-label", f"Heat map of lens: {LAYERS} rows by 100 tokens")


async def first_events(stand: Stand, count: int) -> AsyncIterator[Any]:
    """The first events of the trace `mine` that can still be read."""
    async with stand.client.subscribe("mine") as events:
        async for event in events:
            yield event
            count -= 1
            if not count:
                return


async def test_a_trace_that_begins_anew_is_drawn_anew(
    stand: Stand, served: Served, opened: Opened, embedded: str, prefix: str
) -> None:
    await stand.trace("mine", 40)
    stand.steps.let(10)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await count(page, 10)
        stand.engine.die()
        await expect(page.locator(".panel .badge")).to_have_text("waiting")
        steps = Steps()
        async with Bus.open(embedded, prefix=prefix) as bus, serving(bus, ShownEngine(steps), info("tiny")):
            await expect(page.locator(".about")).to_contain_text("attempt\u00a02")
            steps.let(4)
            await count(page, 4)
            assert await drawn(page) == text_of(4)
            steps.let(36)
            await expect(page.locator(".panel .badge")).to_have_text("finished")
            assert await drawn(page) == text_of(40)


async def test_each_prompt_and_choice_can_be_chosen(stand: Stand, served: Served, opened: Opened) -> None:
    async with served.http() as http:
        body = {"model": "tiny", "prompts": ["Read", "<"], "sampling": {"max_tokens": 8}, "trace_id": "mine"}
        assert (await http.post("/traces", json=body)).status_code == 202
    await until(lambda: stand.engine.tracked == 2)
    stand.steps.let(8)
    async with opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        await count(page, 8)
        assert await drawn(page) == text_of(8)
        # Nothing was saved, and so nothing is plotted.
        await expect(page.get_by_role("heading", name="Plots")).to_be_hidden()
        await page.get_by_role("combobox", name="Choice").select_option("prompt 2, choice 1")

        async def is_other() -> bool:
            return await drawn(page) == text_of(8, prompt="<")

        await until(is_other)
