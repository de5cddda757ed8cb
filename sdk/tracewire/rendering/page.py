"""A trace, a result or saves as HTML without scripts and as text.

A notebook keeps both, and shows them where no kernel runs. Front ends take scripts and style sheets out of notebooks
that they do not trust, and so do sites that show them: all styles stand at the elements, and plots are images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from .plots import plot, sparkline
from .previews import Preview, number, preview, series

__all__ = ["Mark", "Page", "SequenceShown", "as_html", "as_text", "saves_html", "saves_text"]

#: How many tokens have a colour. Of a longer text, the last ones are shown.
_TOKENS = 4096
#: How many plots a sequence has, how many rows a table has, and how many sequences a page has.
_PLOTS, _ROWS, _SEQUENCES = 3, 64, 4
_ABOVE, _BELOW = "255,140,40", "70,140,255"
_MONO = "font-family:monospace"
_MUTED = "color:#808890"


class Mark(msgspec.Struct, frozen=True):
    """A change of live parameters: the first token under it, and what a person reads."""

    index: int
    label: str


class SequenceShown(msgspec.Struct):
    """One sampled sequence of one prompt.

    Attributes:
        title: what tells it from the others, or "".
        pieces: the text of each token, or the whole text as one piece.
        tokens: the number of tokens.
        saves: the saved values by name.
        marks: where it was steered, in order.
    """

    title: str = ""
    pieces: Sequence[str] = ()
    tokens: int = 0
    saves: Mapping[str, Any] = msgspec.field(default_factory=dict)
    marks: Sequence[Mark] = ()


class Page(msgspec.Struct):
    """What a rendering shows: a heading with a status, a problem if there is one, and sequences."""

    title: str
    status: str
    details: str = ""
    problem: str = ""
    sequences: Sequence[SequenceShown] = ()
    shared: Mapping[str, Any] = msgspec.field(default_factory=dict)


def as_html(page: Page, key: str = "") -> str:
    """The page as HTML. A live view that stands beside it, as the cell's next output, finds it by `key`.

    Where JupyterLab opens the notebook again, the live view's model is gone, and its output says so. A style hides that
    output.
    """
    place, style = "", ""
    if key:
        place = f' data-tracewire="{escape(key)}"'
        output = ".jp-OutputArea-child"
        gone = f"{output}:has([{place.strip()}]) + {output}:not(:has(.tracewire-view))"
        style = f"<style>{gone} {{ display: none }}</style>"
    parts = [f'<div class="tracewire-static"{place}>{style}', _heading(page)]
    if page.problem:
        parts.append(f'<div style="color:#d0402b">{escape(page.problem)}</div>')
    parts += [_sequence_html(one) for one in page.sequences[:_SEQUENCES]]
    if (left := len(page.sequences) - _SEQUENCES) > 0:
        parts.append(f'<div style="{_MUTED}">and {left} more</div>')
    if page.shared:
        parts.append(f'<div style="{_MUTED}">shared</div>{saves_html(page.shared)}')
    return "".join(parts) + "</div>"


def as_text(page: Page) -> str:
    """The page as text: the heading, the text and a line for each save."""
    lines = [f"{page.title}: {page.status}" + (f", {page.details}" if page.details else "")]
    if page.problem:
        lines.append(page.problem)
    for one in page.sequences[:_SEQUENCES]:
        if one.title:
            lines.append(one.title)
        text = "".join(one.pieces)
        lines += [text] if text else []
        lines += saves_text(one.saves).splitlines()
    return "\n".join(lines + saves_text(page.shared).splitlines())


def saves_html(saves: Mapping[str, Any]) -> str:
    """A table of saves: name, kind, dtype, shape and a preview of each."""
    if not saves:
        return ""
    heads = "".join(_cell(name, "th") for name in ("save", "kind", "dtype", "shape", "values"))
    rows = [_row(str(name), value) for name, value in list(saves.items())[:_ROWS]]
    if (left := len(saves) - _ROWS) > 0:
        rows.append(f'<tr><td colspan="5" style="{_MUTED}">and {left} more</td></tr>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def saves_text(saves: Mapping[str, Any]) -> str:
    """A line for each save: name, kind, dtype, shape and a preview."""
    rows = [(str(name), preview(value)) for name, value in list(saves.items())[:_ROWS]]
    wide = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:{wide}}  {_joined(one)}" for name, one in rows]
    return "\n".join([*lines, f"  and {len(saves) - _ROWS} more"] if len(saves) > _ROWS else lines)


def _joined(one: Preview) -> str:
    return "  ".join(part for part in (one.kind, one.dtype, one.shape, one.text) if part)


def _heading(page: Page) -> str:
    details = f' <span style="{_MUTED}">{escape(page.details)}</span>' if page.details else ""
    return f"<div><b>{escape(page.title)}</b> {escape(page.status)}{details}</div>"


def _row(name: str, value: Any) -> str:
    one = preview(value)
    numbers = series(value)
    image = f'<img src="{sparkline(numbers)}" alt=""> ' if numbers and len(numbers) > 1 else ""
    cells = [_cell(text) for text in (one.kind, one.dtype, one.shape)]
    last = f'<td style="text-align:left">{image}{escape(one.text)}</td>'
    return f"<tr>{_cell(name, 'th')}{''.join(cells)}{last}</tr>"


def _cell(text: str, kind: str = "td") -> str:
    return f'<{kind} style="text-align:left">{escape(text)}</{kind}>'


def _sequence_html(one: SequenceShown) -> str:
    scalars = {name: found for name, value in one.saves.items() if (found := series(value)) is not None}
    coloured = next((name for name, found in scalars.items() if len(found) == len(one.pieces) > 1), None)
    parts = [f'<div style="{_MUTED}">{escape(one.title)}</div>'] if one.title else []
    parts.append(_text_html(one, coloured, scalars.get(coloured or "", [])))
    for name in [name for name, found in scalars.items() if len(found) > 1][:_PLOTS]:
        marks = [mark.index for mark in one.marks]
        title = f'<span style="{_MONO}">{escape(name)}</span>'
        image = f'<img src="{plot(scalars[name], marks)}" alt="{escape(name)} by token">'
        parts.append(f'<div style="display:inline-block;margin-right:16px">{title}<br>{image}</div>')
    return "".join(parts) + saves_html(one.saves)


def _text_html(one: SequenceShown, name: str | None, values: Sequence[float | None]) -> str:
    if not one.pieces:
        return ""
    first = max(0, len(one.pieces) - _TOKENS)
    low, high = _bounds([value for value in values if value is not None and math.isfinite(value)])
    marks = {mark.index: mark.label for mark in one.marks}
    body = [f'<span style="{_MUTED}">… {first} tokens before … </span>'] if first else []
    for index in range(first, len(one.pieces)):
        if index in marks:
            body.append(f'<span style="color:#a05fd0"><b>[{escape(marks[index])}]</b></span>')
        text = escape(one.pieces[index])
        value = values[index] if name is not None else None
        if value is None or not math.isfinite(value):
            body.append(text)
            continue
        colour, depth = _colour(value, low, high)
        title = escape(f"token {index}, {name} {number(value)}")
        body.append(f'<span style="background-color:rgba({colour},{depth:.2f})" title="{title}">{text}</span>')
    key = f'<div style="{_MUTED}">coloured by {escape(name)}, {number(low)} to {number(high)}</div>' if name else ""
    return f'<pre style="white-space:pre-wrap;{_MONO}">{"".join(body)}</pre>{key}'


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The range of the colours: about 0 if the values have both signs."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return (-max(-low, high), max(-low, high)) if low < 0 < high else (low, high)


def _colour(value: float, low: float, high: float) -> tuple[str, float]:
    if low < 0 < high:
        return (_BELOW if value < 0 else _ABOVE), min(1.0, abs(value) / high)
    return _ABOVE, (value - low) / (high - low) if high > low else 0.0
