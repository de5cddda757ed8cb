"""Plots of scores as SVG, without a library: one or more lines over numbers, each on its own scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["lines_svg"]

_WIDTH, _HEIGHT, _MARGIN, _TOP = 460, 200, 44, 26
_COLOURS = ("#1f6fb4", "#c2410c", "#3f7d20", "#7a3e9d")


def lines_svg(title: str, label: str, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> str:
    """An SVG of lines over the same numbers `xs`. The legend has the range of each line."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>',
    ]
    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    parts.append(f'<path d="M{_MARGIN} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>')
    low, high = min(xs), max(xs)
    places = [_MARGIN + (right - _MARGIN) * (x - low) / ((high - low) or 1) for x in xs]
    step = max(1, len(xs) // 10)
    parts += [
        f'<text x="{place:.1f}" y="{bottom + 14}" text-anchor="middle">{x:g}</text>'
        for place, x in list(zip(places, xs, strict=True))[::step]
    ]
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        least, most = min(values), max(values)
        heights = [bottom - (bottom - _TOP - 6) * (value - least) / ((most - least) or 1) for value in values]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{value:.4g}</title></circle>'
            for x, y, value in zip(places, heights, values, strict=True)
        ]
        legend = f"{name}: {least:.3g} to {most:.3g}"
        parts.append(
            f'<text x="{right}" y="{15 + 13 * number}" text-anchor="end" fill="{colour}">{escape(legend)}</text>'
        )
    return "".join([*parts, "</svg>"])
