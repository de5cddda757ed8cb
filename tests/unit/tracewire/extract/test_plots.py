"""SVGs of lines: well formed, with every point, and safe for any text."""

from __future__ import annotations

from xml.etree import ElementTree

from tracewire.extract.plots import lines_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_plot_has_each_point_of_each_line() -> None:
    text = lines_svg("a < b & c", "layer", [0, 1, 2], {"score": [0.5, 0.75, 1.0], "flat": [1, 1, 1]})
    plot = ElementTree.fromstring(text)
    assert plot.get("aria-label") == "a < b & c"
    assert [len(line.get("points", "").split()) for line in plot.iter(f"{SVG}polyline")] == [3, 3]
    titles = [title.text for title in plot.iter(f"{SVG}title")]
    assert titles == ["0.5", "0.75", "1", "1", "1", "1"]
    assert "score: 0.5 to 1" in "".join(plot.itertext())


def test_one_point_is_a_plot() -> None:
    ElementTree.fromstring(lines_svg("one", "layer", [4], {"score": [0.5]}))
