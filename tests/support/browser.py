"""A browser for tests: Debian's Chromium, driven by Playwright, and axe-core's findings of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

__all__ = ["PATIENCE_MS", "browser", "chromium", "patient_page", "violations"]

#: How long a test waits for a page, in milliseconds: other tests may keep the cores busy.
PATIENCE_MS = 120_000

_AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"


def chromium() -> str:
    """The path of Chromium. `NO_CHROMIUM=1` skips what needs one, on a machine that cannot install it."""
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("NO_CHROMIUM"):
            pytest.skip("NO_CHROMIUM is set, and there is no chromium")
        pytest.fail("chromium is missing: install Debian's package chromium, or set NO_CHROMIUM=1 to leave this out")
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A Chromium without a window."""
    found = chromium()
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=found, args=options)
        expect.set_options(timeout=PATIENCE_MS)
        yield started
        await started.close()


async def patient_page(browser: Browser, **options: Any) -> Page:
    """A new page, for which a test waits long."""
    page = await browser.new_page(**options)
    page.set_default_timeout(PATIENCE_MS)
    return page


async def violations(page: Page, *rules: str) -> list[str]:
    """What axe-core finds of serious or critical impact, by these rules or by all: each rule with the elements."""
    if not await page.evaluate("Boolean(window.axe)"):
        await page.evaluate(_AXE.read_text())
    options: dict[str, Any] = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found: dict[str, Any] = await page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{one['id']} ({one['impact']}): {', '.join(str(node['target']) for node in one['nodes'][:5])}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
