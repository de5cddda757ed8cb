"""Static renderings: what they show, and that no text of a trace becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np

from tracewire.rendering.page import Mark, Page, SequenceShown, as_html, as_text, saves_html, saves_text

HOSTILE = "<img src=x onerror=alert(1)>\"'&"


class Read(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page(**fields: object) -> Page:
    pieces = [" a", " b", " c"]
    given = {"pieces": pieces, "tokens": 3, "saves": {"norm": [1.0, 2.0, 3.0]}, **fields}
    return Page("Trace mine", "running", "3 tokens", sequences=[SequenceShown(**given)])


def depths(html: str) -> list[tuple[str, float]]:
    return [(colour, float(depth)) for colour, depth in re.findall(r"rgba\((\d+),\d+,\d+,([\d.]+)\)", html)]


def test_tokens_are_coloured_by_the_first_scalar_save() -> None:
    html = as_html(page())
    assert depths(html) == [("255", 0.0), ("255", 0.5), ("255", 1.0)]
    assert "coloured by norm, 1 to 3" in html
    assert 'title="token 2, norm 3"' in html


def test_a_range_of_both_signs_has_two_colours() -> None:
    html = as_html(page(saves={"text": ["x", "y", "z"], "p": [-4.0, 0.0, 2.0]}))
    assert depths(html) == [("70", 1.0), ("255", 0.0), ("255", 0.5)]


def test_what_has_no_number_has_no_colour() -> None:
    assert depths(as_html(page(saves={"norm": [None, float("nan"), 1.0]}))) == [("255", 0.0)]
    assert depths(as_html(page(saves={"norm": [1.0, 2.0]}))) == []
    assert depths(as_html(page(pieces=[" a b c"]))) == []


def test_marks_stand_before_their_token() -> None:
    read = Read(as_html(page(marks=[Mark(1, "alpha = 5 · ada")])))
    assert " a[alpha = 5 · ada] b c" in read.text


def test_nothing_becomes_markup() -> None:
    shown = page(pieces=[HOSTILE] * 3, marks=[Mark(0, HOSTILE)], saves={HOSTILE: HOSTILE}, title=HOSTILE)
    shown.title = shown.status = shown.details = shown.problem = HOSTILE
    shown.shared = {HOSTILE: [HOSTILE]}
    read = Read(as_html(shown, HOSTILE))
    allowed = {"div", "style", "b", "span", "pre", "table", "thead", "tbody", "tr", "th", "td", "br", "img"}
    assert {tag for tag, _ in read.tags} <= allowed
    assert [attributes for tag, attributes in read.tags if tag == "img" and attributes["src"] == "x"] == []
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    assert read.text.count(HOSTILE) >= 7


def test_a_long_text_and_many_saves_are_bounded() -> None:
    shown = page(pieces=["x"] * 10_000, saves={"norm": [1.0] * 10_000} | {f"s{one}": one for one in range(100)})
    html = as_html(shown)
    assert html.count('<span style="background-color') == 4096
    assert "5904 tokens before" in html
    assert "and 37 more" in html


def test_many_sequences_are_bounded() -> None:
    shown = page()
    shown.sequences = [SequenceShown(title=f"choice {one}", pieces=["x"]) for one in range(6)]
    assert re.findall(r"choice \d|and \d more", as_html(shown)) == [
        *(f"choice {one}" for one in range(4)),
        "and 2 more",
    ]


def test_the_text() -> None:
    shown = page(saves={"norm": [1.0, 2.0, 3.0], "rows": np.ones((2, 2), np.float16)})
    shown.problem = "it failed"
    assert as_text(shown).splitlines() == [
        "Trace mine: running, 3 tokens",
        "it failed",
        " a b c",
        "  norm  list of 3  float  1, 2, 3",
        "  rows  array  float16  [2, 2]  1, 1, 1, 1",
    ]


def test_no_saves() -> None:
    assert (saves_html({}), saves_text({})) == ("", "")


def test_only_what_has_a_live_view_hides_its_neighbour() -> None:
    assert "<style>" not in as_html(page())
    assert '.jp-OutputArea-child:has([data-tracewire="k"])' in as_html(page(), "k")
