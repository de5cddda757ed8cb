"""The dashboard's files, and what they are sent with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.gateways import Served
from tracewire.gateway.dashboard_files import FOLDER, POLICY, is_dashboard
from tracewire.gateway.keys import entry_of


async def test_browsers_are_sent_to_the_dashboard_and_other_clients_are_not(served: Served) -> None:
    async with served.http() as http:
        page = await http.get("/", headers={"Accept": "text/html,*/*"}, follow_redirects=True)
        assert (page.url.path, page.status_code) == ("/dashboard/", 200)
        assert (await http.get("/dashboard", follow_redirects=True)).text == page.text
        plain = await http.get("/")
        assert (plain.status_code, plain.headers["content-type"]) == (404, "application/problem+json")
        assert (await http.get("/dashboard/none.js")).status_code == 404


async def test_files_are_asked_for_again_and_sent_only_if_they_have_changed(served: Served) -> None:
    async with served.http() as http:
        first = await http.get("/dashboard/js/main.js")
        again = await http.get("/dashboard/js/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (first.headers["Cache-Control"], again.status_code, again.content) == ("no-cache", 304, b"")
    assert first.headers["Content-Type"].startswith("text/javascript")
    assert first.headers["Content-Security-Policy"] == again.headers["Content-Security-Policy"] == POLICY
    assert first.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_page_needs_no_key_and_nothing_else_is_open(gateway: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("k", "k", frozenset({"read"}), ""))
    async with gateway(keys=file) as served, served.http() as http:
        assert (await http.get("/dashboard/")).status_code == 200
        for path in ("/traces", "/dashboardx", "/dashboard/../traces", "/key", "/ws"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/dashboard/%2e%2e/app.py")).status_code in (401, 404)
    assert is_dashboard("/dashboard/x")
    assert not is_dashboard("/dashboards")


def test_the_policy_allows_no_code_in_markup_and_the_page_has_none() -> None:
    assert "unsafe" not in POLICY
    page = (FOLDER / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|javascript:", page)
    ours = [*(FOLDER / "js").glob("*.js"), FOLDER / "index.html", FOLDER / "dashboard.css"]
    for path in ours:
        text = path.read_text()
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        # The namespace of SVG is a name and no address.
        assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", "")), path


def test_the_page_fetches_all_modules_ahead() -> None:
    page = (FOLDER / "index.html").read_text()
    modules = {path.name for path in (FOLDER / "js").glob("*.js")}
    assert set(re.findall(r'href="js/(\w+\.js)"', page)) == modules - {"main.js"}
    for path in (FOLDER / "js").glob("*.js"):
        assert set(re.findall(r'from "\./(\w+\.js)"', path.read_text())) <= modules


def test_the_library_for_plots_comes_with_its_version_and_licence() -> None:
    vendor = FOLDER / "vendor"
    assert "(v1.6.32)" in (vendor / "uPlot.iife.min.js").read_text()[:100]
    assert "Leon Sorokin" in (vendor / "uPlot.LICENSE").read_text()
