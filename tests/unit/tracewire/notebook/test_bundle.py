"""The widget's ES module: it has all that it needs, and nothing is fetched."""

from __future__ import annotations

import re

import pytest

from tests.support.browser import browser
from tracewire.notebook import bundle as module
from tracewire.notebook.bundle import bundle


def test_it_imports_nothing_and_has_each_module_once() -> None:
    text = bundle()
    assert re.findall(r"^(?:import|export)\b.*$", text, re.MULTILINE) == ["export default m_widget.widget;"]
    names = re.findall(r"^const m_(\w+) = ", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"style", "trace_panel", "plots", "heat_map", "widget"} <= set(names)
    # What only a page of the gateway needs stays out.
    assert not {"api", "connection", "main", "settings", "list_view"} & set(names)


async def test_a_browser_runs_it() -> None:
    async with browser() as chromium:
        page = await chromium.new_page()
        blob = "URL.createObjectURL(new Blob([text], {type: 'text/javascript'}))"
        load = f"async (text) => Object.keys((await import({blob})).default)"
        assert await page.evaluate(load, bundle()) == ["initialize", "render"]


@pytest.mark.parametrize("line", ['import x from "./dom.js";', "export let x = 1;", 'import "./dom.js";'])
def test_another_form_of_import_or_export_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"odd.js: the bundle cannot take {line!r}")):
        module._function("odd", f"const a = 1;\n{line}\n", {})
