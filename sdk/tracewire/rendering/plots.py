"""Small plots of numbers as images in SVG, which a saved notebook shows without any script."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

from .previews import number

__all__ = ["plot", "sparkline"]

#: Colours that can be read on a light and on a dark page.
_LINE, _AXIS, _MARK = "#3f7fdc", "#808890", "#a05fd0"
#: How many points a plot has at most.
_POINTS = 512

Numbers = Sequence[float | None]


def sparkline(values: Numbers, width: int = 120, height: int = 18) -> str:
    """A line without axes: a `data:` address of an SVG image."""
    low, high = _range(values)
    return _image(width, height, _path(values, low, high, (1, 1, width - 2, height - 2)))


def plot(values: Numbers, marks: Sequence[int] = (), width: int = 420, height: int = 90) -> str:
    """A line over the index of tokens with its range, and a dashed line at each mark: a `data:` address of an image."""
    low, high = _range(values)
    box = (48, 6, width - 54, height - 24)
    x, y, wide, tall = box
    last = max(1, len(values) - 1)
    text = f'font-family="sans-serif" font-size="10" fill="{_AXIS}"'
    parts = [
        f'<path d="M{x} {y}v{tall}h{wide}" fill="none" stroke="{_AXIS}" stroke-opacity=".5"/>',
        f'<text x="{x - 4}" y="{y + 8}" text-anchor="end" {text}>{escape(number(high))}</text>',
        f'<text x="{x - 4}" y="{y + tall}" text-anchor="end" {text}>{escape(number(low))}</text>',
        f'<text x="{x}" y="{height - 5}" {text}>0</text>',
        f'<text x="{x + wide}" y="{height - 5}" text-anchor="end" {text}>{len(values) - 1}</text>',
    ]
    for mark in marks:
        at = x + wide * min(mark, last) / last
        parts.append(f'<path d="M{at:.1f} {y}v{tall}" stroke="{_MARK}" stroke-dasharray="4 3"/>')
    return _image(width, height, "".join(parts) + _path(values, low, high, box))


def _range(values: Numbers) -> tuple[float, float]:
    known = [one for one in values if one is not None and math.isfinite(one)]
    return (min(known), max(known)) if known else (0.0, 0.0)


def _path(values: Numbers, low: float, high: float, box: tuple[float, float, float, float]) -> str:
    x, y, wide, tall = box
    last, spread = max(1, len(values) - 1), high - low
    step = max(1, math.ceil(len(values) / _POINTS))
    words, pen = [], "M"
    for index in range(0, len(values), step):
        value = values[index]
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        part = (value - low) / spread if spread else 0.5
        words.append(f"{pen}{x + wide * index / last:.1f} {y + tall * (1 - part):.1f}")
        pen = "L"
    return f'<path d="{"".join(words)}" fill="none" stroke="{_LINE}" stroke-width="1.5" stroke-linejoin="round"/>'


def _image(width: int, height: int, body: str) -> str:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{body}</svg>"
    )
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
