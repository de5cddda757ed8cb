"""Plots as images: what is drawn, and where."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import pytest

from tracewire.rendering.plots import plot, sparkline


def svg(address: str) -> str:
    kind, _, data = address.partition(",")
    assert kind == "data:image/svg+xml;base64"
    text = base64.b64decode(data).decode()
    ElementTree.fromstring(text)
    return text


def points(text: str) -> list[tuple[str, float, float]]:
    """The pen and the place of each point of the line."""
    (path,) = re.findall(r'<path d="([^"]*)" fill="none" stroke="#3f7fdc"', text)
    return [(pen, float(x), float(y)) for pen, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_a_sparkline_goes_from_left_to_right_and_up() -> None:
    assert points(svg(sparkline([0.0, 1.0, 2.0], 102, 12))) == [("M", 1, 11), ("L", 51, 6), ("L", 101, 1)]


def test_gaps_and_odd_numbers_interrupt_the_line() -> None:
    found = points(svg(sparkline([0.0, None, 2.0, float("nan"), float("inf"), 1.0])))
    assert [pen for pen, _, _ in found] == ["M", "M", "M"]


@pytest.mark.parametrize("values", [[], [None], [1.0], [3.0, 3.0]])
def test_little_is_drawn_too(values: list[float | None]) -> None:
    assert len(points(svg(plot(values)))) == len([one for one in values if one is not None])


def test_a_plot_has_its_range_and_marks() -> None:
    text = svg(plot([-1.5, 0.0, 4.0], [1, 99]))
    assert re.findall(r">([^<>]+)</text>", text) == ["4", "-1.5", "0", "2"]
    marks = re.findall(r'd="M([\d.]+) 6v66" stroke="#a05fd0"', text)
    assert marks == ["231.0", "414.0"]


def test_a_long_line_has_a_bounded_number_of_points() -> None:
    assert 256 <= len(points(svg(plot([float(one) for one in range(100_000)])))) <= 512
