"""Traces in notebooks: what a person sees and does in JupyterLab, and what a saved notebook shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from playwright.async_api import Browser, FrameLocator, Page, expect

from tests.e2e.dashboard.conftest import Stand
from tests.support import vscode
from tests.support.browser import patient_page
from tests.support.jupyter import Lab, kernel_environment, notebook, running_lab
from tests.support.shown_engine import projection_at, token_at
from tests.support.until import until
from tests.support.vscode import editor

ASYNC = "import tracewire\nclient = await tracewire.connect({url!r}, prefix={prefix!r}, name='ada')"
BLOCKING = "import tracewire\nclient = tracewire.blocking.Client({url!r}, prefix={prefix!r}, name='ada').connect()"
TRACE = """
from tests.support.scripted_engine import acts
client.trace("tiny", "Read", acts(), max_tokens={tokens}, live={{"alpha": 0.0}}, trace_id="mine", token_strings=True)
"""

#: The text of 40 tokens, of which the last 10 are steered.
TEXT = "".join(token_at("Read", index, 0.0 if index < 30 else 5.0) for index in range(40))


@pytest.fixture(scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """The JupyterLab of these tests."""
    async with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def connecting(stand: Stand, form: str) -> str:
    """A cell that connects a client."""
    return form.format(url=stand.url, prefix=stand.prefix)


async def opened(browser: Browser, url: str) -> Page:
    """A page of a notebook whose kernel is ready."""
    page = await patient_page(browser, viewport={"width": 1280, "height": 1100})
    await page.goto(url)
    await expect(page.get_by_text("| Idle")).to_be_visible()
    return page


async def run_cells(page: Page, count: int) -> None:
    """Run the cells from the first on, as a person does."""
    await page.locator(".jp-CodeCell .cm-content").first.click()
    for _ in range(count):
        await page.keyboard.press("Shift+Enter")


def static(page: Page | FrameLocator) -> Any:
    """The static rendering."""
    return page.locator(".tracewire-static")


async def steer_by_hand(stand: Stand, page: Page | FrameLocator) -> None:
    """See the text and the plot grow, move the slider, and see both change."""
    tokens, plot = page.locator(".tracewire-view .block .t"), page.get_by_role("group", name="Plot of projection")
    await expect(page.locator(".badge")).to_have_text("running")
    stand.steps.let(30)
    await expect(tokens).to_have_count(30)
    await expect(plot.locator("output")).to_have_text(f"{projection_at(29, 0.0):.4g}")
    await expect(page.locator(".block .p8, .block .p7").first).to_be_visible()
    await expect(static(page)).to_be_hidden()
    for _ in range(25):
        await page.get_by_role("slider", name="alpha").press("ArrowRight")
    await stand.steered(5.0)
    stand.steps.let(10)
    await expect(tokens).to_have_count(40)
    assert "".join(await tokens.all_text_contents()) == TEXT
    await expect(page.locator(".mark").last).to_have_text("alpha = 5 · ada")
    await expect(plot.locator("output")).to_have_text(f"{projection_at(39, 5.0):.4g}")


async def cancel_by_hand(stand: Stand, page: Page | FrameLocator) -> None:
    """Pause, resume and cancel."""
    badge = page.locator(".badge")
    await page.get_by_role("button", name="Pause").click()
    await expect(badge).to_have_text("paused")
    await page.get_by_role("button", name="Resume").click()
    await expect(badge).to_have_text("running")
    await page.get_by_role("button", name="Cancel").click()

    async def is_over() -> bool:
        stand.steps.let(1)
        return await badge.inner_text() == "cancelled"

    await until(is_over)


@pytest.mark.parametrize(
    ("form", "again"),
    [
        pytest.param(ASYNC, False, id="async"),
        pytest.param(ASYNC, True, id="async, opened again", marks=pytest.mark.full),
        pytest.param(BLOCKING, True, id="blocking, opened again", marks=pytest.mark.full),
    ],
)
async def test_a_trace_is_watched_steered_and_kept(
    form: str, again: bool, stand: Stand, lab: Lab, browser: Browser
) -> None:
    name = f"{stand.prefix}.ipynb"
    url = lab.add(name, connecting(stand, form), TRACE.format(tokens=10_000), "await _.until_done()")
    page = await opened(browser, url)
    # The last cell runs until the trace ends, and the view works meanwhile: not while a blocking client has the thread.
    await run_cells(page, 2 if form is BLOCKING else 3)
    if form is ASYNC:
        await expect(page.get_by_text("| Busy")).to_be_visible()
    await steer_by_hand(stand, page)
    await cancel_by_hand(stand, page)
    await expect(static(page)).to_contain_text("cancelled")
    await page.keyboard.press("Control+s")
    await until(lambda: "cancelled by ada" in lab.text(name))
    if again:
        # While the kernel runs, the view is there.
        await page.reload()
        await expect(page.locator(".badge")).to_have_text("cancelled")
    await page.close()
    await lab.end_kernels()
    if again:
        await check_opened_again(browser, url)


async def check_opened_again(browser: Browser, url: str) -> None:
    """Open a saved notebook with another kernel."""
    # The static rendering is there, and nothing says that a widget is missing.
    page = await opened(browser, url)
    await expect(static(page)).to_contain_text(TEXT.splitlines()[0])
    await expect(static(page)).to_contain_text("alpha = 5 · ada")
    await expect(static(page).get_by_role("img", name="projection by token")).to_be_visible()
    await expect(static(page).get_by_role("row", name="norm")).to_contain_text("float32")
    await expect(page.get_by_text("model not found")).to_be_hidden()
    await page.close()


@pytest.mark.full
@pytest.mark.skipif(vscode.NPM is None, reason="npm is not installed")
async def test_vs_code_shows_and_steers_a_trace(stand: Stand, lab: Lab, browser: Browser, tmp_path: Path) -> None:
    page = await vscode.opened(browser, lab.url, vscode.bundled(tmp_path))
    await vscode.run(page, [connecting(stand, ASYNC), TRACE.format(tokens=10_000), "await _.until_done()"])
    await steer_by_hand(stand, page)
    await cancel_by_hand(stand, page)
    await expect(static(page)).to_contain_text("cancelled")
    # The view has VS Code's colours.
    await expect(page.locator(".tracewire-view")).to_have_attribute("data-theme", "dark")
    assert await page.evaluate("vscode.problems") == []
    await page.close()
    await lab.end_kernels()


@pytest.mark.full
@pytest.mark.skipif(bool(editor.MISSING), reason=editor.MISSING)
async def test_the_editor_shows_and_steers_a_trace(stand: Stand, browser: Browser, tmp_path: Path) -> None:
    """VS Code itself."""
    (folder := tmp_path / "lab").mkdir()
    async with editor.running_editor(tmp_path) as code, running_lab(folder, [editor.SCRIPTS]) as lab:
        cells = (connecting(stand, ASYNC), TRACE.format(tokens=10_000), "await _.until_done()")
        page = await code.opened(browser, lab.url, *cells)
        view = await code.run_all(page)
        await steer_by_hand(stand, view)
        await cancel_by_hand(stand, view)
        await expect(static(view)).to_contain_text("cancelled")
        await page.keyboard.press("Control+s")
        await until(lambda: "cancelled by ada" in code.text())
        await page.close()


WAIT = """
from tests.support.until import until
from tracewire.notebook import live
await until(lambda: not live._running)
"""


@pytest.mark.parametrize("form", [ASYNC, BLOCKING], ids=["async", "blocking"])
async def test_a_notebook_that_runs_without_a_browser(form: str, stand: Stand, tmp_path: Path) -> None:
    state = "client.get_state('mine')"
    cells = (TRACE.format(tokens=3), WAIT, state if form is BLOCKING else f"await {state}", "_.saves")
    made = notebook(connecting(stand, form), *cells)
    stand.steps.let(3)
    run = nbclient.NotebookClient(made, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    await run.async_execute(env=kernel_environment())
    nbformat.validate(made)
    (shown, view), (found,), (saves,) = (made.cells[at].outputs for at in (1, 3, 4))
    assert "application/vnd.jupyter.widget-view+json" in view.data
    text = "".join(token_at("Read", at, 0.0) for at in range(3))
    for output in (shown, found):
        assert "<b>Trace mine</b> finished" in output.data["text/html"]
        assert text in output.data["text/plain"]
        assert "norm" in output.data["text/plain"]
    assert "float32" in saves.data["text/html"]
