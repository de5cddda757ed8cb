"""The page as a whole: the list, the form, keys, the keyboard, what axe-core finds, and the first paint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.e2e.dashboard.conftest import Stand
from tests.support.browser import violations
from tests.support.gateways import Served
from tests.support.shown_engine import token_at
from tests.support.until import until
from tracewire.gateway import trace_routes
from tracewire.gateway.keys import entry_of
from tracewire.gateway.problems import Problem

Opened = Callable[..., Any]


async def test_the_list_shows_traces_as_they_come_and_end(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("early", 10)
    async with opened(f"{served.url}/dashboard/") as page:
        early = page.get_by_role("row").filter(has_text="early")
        await expect(early.locator(".badge")).to_have_text("running")
        await expect(page.locator("#connection")).to_have_text("Live")
        await stand.trace("late", 10_000)
        late = page.get_by_role("row").filter(has_text="late")
        await expect(late.locator(".badge")).to_have_text("running")
        # The newest stands first, and shows the end of its text as it grows.
        await expect(page.locator("tbody tr").first).to_contain_text("late")
        await expect(page.locator("tbody tr")).to_have_count(2)
        stand.steps.let(5)
        await expect(late.locator(".tail")).to_contain_text(token_at("Read", 4, 0.0))
        stand.steps.let(5)
        await expect(early.locator(".badge")).to_have_text("finished")
        await expect(early.locator(".number")).to_have_text("10")
        await page.get_by_label("State").select_option("finished")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_label("State").select_option("")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await page.get_by_label("Select all traces").check()
        await page.get_by_role("button", name="Side by side (2)").click()
        await expect(page.locator(".beside .panel")).to_have_count(2)
        await expect(page.locator(".beside .panel .badge")).to_have_text(["running", "finished"])
        await page.get_by_role("button", name="Close late").click()
        await expect(page.locator(".panel")).to_have_count(1)


async def test_older_traces_come_by_the_page(stand: Stand, served: Served, opened: Opened) -> None:
    for number in range(60):
        await stand.trace(f"t{number}", 1)
    async with opened(f"{served.url}/dashboard/") as page:
        await expect(page.locator("tbody tr")).to_have_count(50)
        await page.get_by_role("button", name="Show older traces").click()
        await expect(page.locator("tbody tr")).to_have_count(60)
        await expect(page.get_by_role("button", name="Show older traces")).to_be_hidden()


async def test_what_stands_behind_many_others_is_found(
    stand: Stand, served: Served, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.trace("early")
    for number in range(5):
        await stand.trace(f"t{number}", 1)
    stand.steps.let(2)
    for number in range(5):
        await stand.client.subscribe(f"t{number}").until_done()
    monkeypatch.setattr(trace_routes, "_ENTRIES", 2)
    async with opened(f"{served.url}/dashboard/") as page:
        await page.get_by_label("State").select_option("running")
        await expect(page.get_by_role("row").filter(has_text="early")).to_have_count(1)


async def test_the_form_starts_a_trace(stand: Stand, served: Served, opened: Opened, tmp_path: Path) -> None:
    direction = tmp_path / "direction.json"
    direction.write_text("[1, 0, 0, 0, 0, 0, 0, 0]")
    async with opened(f"{served.url}/dashboard/#/start") as page:
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        await page.get_by_label("Prompt").fill("Say ")
        await page.get_by_label("Most tokens").fill("12")
        await page.get_by_label("Trace id").fill("bad id")
        await page.get_by_role("button", name="Start").click()
        await expect(page.get_by_role("alert")).to_contain_text("trace_id")
        await expect(page.get_by_label("Trace id")).to_be_focused()
        await page.get_by_label("Trace id").fill("formed")
        await page.get_by_label("Direction", exact=True).set_input_files(direction)
        await page.get_by_label("Location").fill("residual(9)")
        await page.get_by_role("button", name="Start").click()
        await expect(page.get_by_role("alert")).to_contain_text("residual(9)")
        await page.get_by_label("Location").fill("residual(2)")
        # A scripted engine reads nothing.
        await page.get_by_label("Logit lens at each layer").uncheck()
        await page.get_by_label("Probe the projection").uncheck()
        await page.get_by_role("button", name="Start").click()
        await expect(page.locator(".panel h2")).to_have_text("formed")
        stand.steps.let(12)
        await expect(page.locator(".panel .badge")).to_have_text("finished")
        await expect(page.get_by_label("alpha", exact=True)).to_have_value("0")
        await expect(page.locator(".block .t")).to_have_count(12)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of two keys."""
    file = tmp_path / "keys.toml"
    reader, all_but = frozenset({"read"}), frozenset({"read", "steer", "submit"})
    file.write_text(entry_of("reader-key", "reader", reader, "") + entry_of("writer-key", "writer", all_but, ""))
    return file


async def use_key(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Use", exact=True).click()


async def test_a_key_is_asked_for_and_its_rights_count(stand: Stand, opened: Opened, keys: Path) -> None:
    await stand.trace("mine")
    stand.steps.let(3)
    async with stand.gateway(keys=keys) as served, opened(f"{served.url}/dashboard/#/trace/mine") as page:
        await expect(page.get_by_role("dialog")).to_contain_text("The gateway asks for a key.")
        await use_key(page, "wrong")
        await expect(page.get_by_role("dialog")).to_contain_text("The gateway does not know this key.")
        await use_key(page, "reader-key")
        await expect(page.locator(".block .t")).to_have_count(3)
        reason = "The key “reader” lacks the right “steer”."
        for one in (page.get_by_role("button", name="Pause"), page.get_by_label("alpha", exact=True)):
            await expect(one).to_be_disabled()
            await expect(one).to_have_attribute("title", reason)
        await expect(page.get_by_role("region", name="Live parameters")).to_contain_text(reason)
        # The tab remembers the key, and nothing else does.
        await page.reload()
        await expect(page.locator(".block .t")).to_have_count(3)
        assert "reader-key" not in str(await page.evaluate("({...localStorage})"))
        await page.get_by_role("button", name="reader").click()
        await use_key(page, "writer-key")
        await expect(page.get_by_role("button", name="Pause")).to_be_enabled()
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator(".history")).to_contain_text("writer paused the trace.")


async def test_a_key_that_has_reached_its_limit_is_told_and_goes_on(
    stand: Stand, opened: Opened, tmp_path: Path
) -> None:
    await stand.trace("mine")
    stand.steps.let(3)
    file = tmp_path / "keys.toml"
    entry = entry_of("k", "reader", frozenset({"read"}), "")
    file.write_text(entry + "requests_per_minute = 1\n")
    async with stand.gateway(keys=file) as served, opened(f"{served.url}/dashboard/") as page:
        await expect(page.get_by_role("dialog")).to_contain_text("The gateway asks for a key.")
        async with served.http("k") as http:
            assert (await http.get("/key")).status_code == 200
        await use_key(page, "k")
        await expect(page.get_by_role("alert")).to_contain_text("has used its 1 requests a minute")
        file.write_text(entry + "requests_per_minute = 30\n")
        await expect(page.locator("#connection")).to_have_text("Live")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await expect(page.get_by_role("alert")).to_be_hidden()
        # A stream that is refused for a moment comes by itself, too.
        caller = served.gateway.keys.caller("Bearer k")
        with pytest.raises(Problem):
            while True:
                served.gateway.limits.order(caller)
        await page.evaluate("location.hash = '#/trace/mine'")
        await expect(page.locator(".block .t")).to_have_count(3)


async def focused(page: Page) -> str:
    """The label of the element that has the focus, or its text."""
    one = "document.activeElement"
    return await page.evaluate(f"{one}.getAttribute('aria-label') ?? {one}.textContent")


async def tab_to(page: Page, name: str) -> None:
    """Press the tab key until an element of this name has the focus."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await focused(page) == name:
            return
        labels = await page.evaluate("[...document.activeElement.labels ?? []].map((one) => one.textContent)")
        if name in labels:
            return
    raise AssertionError(f"the tab key does not reach {name!r}")


async def test_the_keyboard_alone_opens_a_trace_and_steers_it(stand: Stand, served: Served, opened: Opened) -> None:
    await stand.trace("mine")
    stand.steps.let(4)
    async with opened(f"{served.url}/dashboard/") as page:
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.keyboard.press("Tab")
        assert await focused(page) == "Skip to the content"
        await tab_to(page, "mine")
        await page.keyboard.press("Enter")
        await expect(page.locator(".block .t")).to_have_count(4)
        await tab_to(page, "alpha")
        # A fiftieth of the range of 10 for each press.
        for _ in range(25):
            await page.keyboard.press("ArrowRight")
        await expect(page.get_by_label("alpha", exact=True)).to_have_value("5")
        await stand.steered(5.0)
        stand.steps.let(1)
        await expect(page.locator(".block .t").last).to_have_text(token_at("Read", 4, 5.0))
        await expect(page.locator(".mark").last).to_have_text("alpha = 5 · anonymous")


async def seen(page: Page) -> list[str]:
    """What axe-core finds of a view in light, and of its colours in dark."""
    await page.emulate_media(color_scheme="light")
    found = await violations(page)
    await page.emulate_media(color_scheme="dark")
    return found + await violations(page, "color-contrast")


async def test_axe_finds_nothing_serious(stand: Stand, served: Served, opened: Opened) -> None:
    for name in ("mine", "other"):
        await stand.trace(name)
    stand.steps.let(60)
    await until(lambda: stand.engine.steps >= 60)
    await stand.client.steer("mine", alpha=6.0)
    await stand.steered(6.0)
    stand.steps.let(20)
    async with opened(f"{served.url}/dashboard/") as page:
        await expect(page.locator("tbody tr")).to_have_count(2)
        assert await seen(page) == []
        await page.goto(f"{served.url}/dashboard/#/trace/mine")
        await expect(page.locator(".mark")).to_be_visible()
        await expect(page.locator(".block .p8, .block .p7").first).to_be_visible()
        await page.locator("summary").click()
        assert await seen(page) == []
        await page.goto(f"{served.url}/dashboard/#/traces/mine,other,nowhere")
        await expect(page.get_by_role("alert").filter(has_text="nowhere")).to_be_visible()
        assert await seen(page) == []
        await page.goto(f"{served.url}/dashboard/#/start")
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        await page.get_by_text("More, in JSON").click()
        assert await seen(page) == []
        await page.get_by_role("button", name="anonymous").click()
        assert await seen(page) == []


async def test_the_theme_is_chosen_and_remembered(served: Served, opened: Opened) -> None:
    async with opened(f"{served.url}/dashboard/", color_scheme="light") as page:
        surface = "getComputedStyle(document.querySelector('.bar')).backgroundColor"
        light = await page.evaluate(surface)
        await page.get_by_label("Theme").select_option("dark")
        dark = await page.evaluate(surface)
        assert dark != light
        await page.reload()
        assert await page.evaluate(surface) == dark


async def test_a_first_paint_is_measured(served: Served, opened: Opened, record_property: Any) -> None:
    async with opened(f"{served.url}/dashboard/") as page:
        await expect(page.get_by_text("No trace was submitted")).to_be_visible()
        entries = await page.evaluate("performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])")
        painted = dict(entries)
        assert painted.keys() >= {"first-paint", "first-contentful-paint"}
        record_property("first_paint_ms", painted)
        # Everything comes from the gateway.
        names = await page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
        assert [name for name in names if not name.startswith(served.url)] == []
        print(f"first paint: {painted}, {len(names)} files")
