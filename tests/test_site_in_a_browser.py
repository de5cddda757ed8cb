"""The documentation site in a browser: its search works, it asks no other host, and its tables fit narrow windows."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.support.browser import browser as started_browser
from tests.support.browser import patient_page, violations

#: A page of each kind, with the widest tables among them.
PAGES = (
    "index.html",
    "tutorial.html",
    "nnsight.html",
    "conventions.html",
    "performance.html",
    "troubleshooting.html",
    "reference/commands.html",
    "reference/engine-command.html",
    "reference/http.html",
    "reference/python/client.html",
)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """URL of the site, as a plain web server serves it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A Chromium without a window."""
    async with started_browser() as browser:
        yield browser


async def test_the_search_finds_an_error_and_asks_no_other_host(url: str, browser: Browser) -> None:
    page = await patient_page(browser)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"{url}/index.html")
    await page.locator(".md-search__input").fill("evicts keys")
    found = page.locator(".md-search-result__link", has_text="This Redis evicts keys")
    await expect(found.first).to_be_visible(timeout=30_000)
    await found.first.click()
    await expect(page).to_have_url(f"{url}/troubleshooting.html?h=evicts+keys#this-redis-evicts-keys")
    assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == []
    await page.close()


#: Widths of windows: of a telephone, a tablet, and a screen.
WIDTHS = (390, 800, 1400)
_CUT = (
    "[...document.querySelectorAll('article table')].filter(one => one.scrollWidth > "
    "one.closest('article').clientWidth + 1).length"
)


async def test_no_page_is_wider_than_its_window(url: str, browser: Browser) -> None:
    for width in WIDTHS:
        page = await patient_page(browser, viewport={"width": width, "height": 900})
        # Tables are cut first where the navigation stands beside them, and the window is narrow.
        for name in PAGES if width == 800 else PAGES[::2]:
            await page.goto(f"{url}/{name}")
            assert await page.evaluate("document.documentElement.scrollWidth") == width, name
            cut = await page.evaluate(_CUT)
            assert width < 800 or cut == 0, f"{name}: {cut} tables are wider than the page"
        await page.close()


async def test_the_pages_are_accessible_in_both_schemes(url: str, browser: Browser) -> None:
    page = await patient_page(browser, color_scheme="light")
    for name in ("tutorial.html", "nnsight.html", "reference/http.html"):
        await page.goto(f"{url}/{name}")
        # The theme gives its search dialog no name.
        assert [one for one in await violations(page) if not one.endswith("['.md-search']")] == [], name
    await page.close()
    # Nothing but colours differs in the other scheme, and one page has each kind of element.
    page = await patient_page(browser, color_scheme="dark")
    await page.goto(f"{url}/tutorial.html")
    assert await page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert await violations(page, "color-contrast") == []
    await page.close()
