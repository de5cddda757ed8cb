"""The documentation site is built as `make docs` builds it, and every link, anchor and image of it leads somewhere."""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

import tracewire
import tracewire.blocking
import tracewire.harvest
from tests.support import ROOT
from tests.support.cells import blocks
from tracewire.cli.main import build_parser
from tracewire.gateway.app import create_app
from tracewire.gateway.settings import Settings

#: The page's messages are cut where they vary. A shorter piece would be found anywhere.
_LEAST = 12


class _Page(HTMLParser):
    """What a page of the site names: its anchors, its links, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in found:
            self.loaded.add(found["src"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.add(found.get("href", ""))


@cache
def page(path: Path) -> _Page:
    return _Page(path)


def broken(folder: Path) -> list[str]:
    """The links and loaded files of the site's pages that lead nowhere or, if they are loaded, elsewhere."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        here = page(path)
        for target in sorted(here.links | here.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in here.loaded:
                    found.append(f"{path.relative_to(folder)} loads {target}")
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.startswith("/"):
                # The page for an unknown path may stand anywhere.
                there = folder / unquote(parts.path).lstrip("/")
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                found.append(f"{path.relative_to(folder)}: {target}")
            elif parts.fragment and there.suffix == ".html" and unquote(parts.fragment) not in page(there).anchors:
                found.append(f"{path.relative_to(folder)}: {target} has no such anchor")
    return found


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 60
    assert broken(site) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a> <a href="#no">c</a> <a href="a.html#yes">d</a> <h1 id="yes">e</h1>'
        '<script src="https://example.org/x.js"></script> <a href="https://example.org">f</a>'
    )
    assert sorted(broken(tmp_path)) == [
        "a.html loads https://example.org/x.js",
        "a.html: #no has no such anchor",
        "a.html: b.html",
    ]


def test_every_page_is_on_the_site_and_in_its_navigation(site: Path) -> None:
    links = {link.partition("#")[0] for link in page(site / "index.html").links}
    for source in (ROOT / "docs").rglob("*.md"):
        built = str(source.relative_to(ROOT / "docs").with_suffix(".html"))
        assert built in links or built == "index.html", built
    assert {"tour.html", "contributing.html", "security.html", "changelog.html", "examples/programs.html"} <= links


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = {anchor for path in (site / "reference" / "python").glob("*.html") for anchor in page(path).anchors}
    modules = {"blocking", "harvest", "__version__"}
    names = {f"tracewire.{name}" for name in tracewire.__all__ if name not in modules}
    names |= {f"tracewire.blocking.{name}" for name in tracewire.blocking.__all__}
    names |= {f"tracewire.harvest.{name}" for name in tracewire.harvest.__all__}
    assert names - anchors == set()
    assert {"tracewire.Client.trace", "tracewire.Result.to_numpy", "tracewire.blocking.Trace.result"} <= anchors


def test_attributes_that_a_docstring_groups_have_their_own_types(site: Path) -> None:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (site / "reference" / "python" / "resources.html").read_text()))
    assert re.search(r"hidden_size \( int \) . with layer_count : number of decoder layers", text)


def commands(parser: argparse.ArgumentParser, name: str) -> dict[str, argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        return {name: parser}
    return {
        word: one
        for action in nested
        for choice, below in action.choices.items()
        for word, one in commands(below, f"{name} {choice}").items()
    }


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text()
    for name, parser in commands(build_parser(), "tracewire").items():
        assert f"<code>{name}</code>" in text, name
        for option in parser._option_string_actions:
            assert option in ("-h", "--help") or f">{option}" in text, f"{name} {option}"
    engine = (site / "reference" / "engine-command.html").read_text()
    for option in ("--block-timeout", "--tap", "--retention", "--tool-call-parser"):
        assert f"<code>{option}" in engine


def test_every_route_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "http.html").read_text()
    paths = create_app(Settings()).openapi()["paths"]
    assert len(paths) > 15
    for path, item in paths.items():
        for method in item:
            assert f"{method.upper()} <code>{path}</code>" in text, f"{method} {path}"


def test_the_search_finds_pages_of_each_kind(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for location in ("tutorial.html", "reference/commands.html#", "reference/http.html#", "troubleshooting.html#"):
        assert f'"location":"{location}' in index
    assert '"location":"files/' not in index


def test_the_navigation_names_readers_in_the_order_of_their_needs() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    sections = [next(iter(one)) for one in yaml.safe_load(text)["nav"] if isinstance(one, dict)]
    assert sections == ["Home", "Start", "How-to", "Concepts", "Reference", "Operate", "Internals"]


def literals() -> set[str]:
    """The text literals of the packages, with a mark where an f-string has a value."""
    found = set()
    for folder in ("bus", "sdk", "engine_adapter"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values]
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def missing(messages: list[str]) -> list[str]:
    """The messages that have a piece, between two `...`, that no text of the packages has."""
    known = literals()
    return [
        message
        for message in messages
        for piece in message.strip().split("...")
        if len(piece.strip(" ,;:'()")) >= _LEAST and not any(piece in text for text in known)
    ]


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_source() -> None:
    messages = blocks(ROOT / "docs" / "troubleshooting.md", "text")
    assert len(messages) > 25
    for message in messages:
        assert max(map(len, message.strip().split("..."))) >= _LEAST, message
    assert missing(messages) == []
    assert missing(["the block ran for ... s within one dance"]) != []
