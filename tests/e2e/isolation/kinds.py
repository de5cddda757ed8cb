"""The kinds of hostile and careless blocks, as data: a name, the source, and what the offender's trace should meet.

A source's line that ends with `#!` is the line that the offender's error should name. In a source, `{folder}` stands
for a folder with a file `victim` that the engine's user can write, and `{port}` for the port of the engine's Redis.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["CANARY", "Kind", "Meets", "by_step", "marked_line", "once"]

#: What the offender's trace should come to. `error`: its own error, at the marked line if there is one. `ends`: an end
#: of any kind that is the trace's own. `finishes`: a normal end.
Meets = Literal["error", "ends", "finishes"]

#: A secret in the engine's environment, and in the file `{folder}/victim`. No offender may save it.
CANARY = "canary-5c8e1f"


@dataclass(frozen=True)
class Kind:
    """One kind of hostile or careless block.

    Attributes:
        name: of the kind, unique.
        source: the block's source.
        meets: what the offender's trace should come to.
        error: a regular expression for the error's type, if it is known in both modes.
        inline: whether inline mode contains the kind: the innocents and later traces are unharmed, on the same engine.
        patience_s: how long the kind's batch may take before the engine counts as hung, in seconds.
    """

    name: str
    source: str
    meets: Meets = "error"
    error: str = ""
    inline: bool = True
    patience_s: float = 25.0


def once(code: str, *, at: int = 3, before: str = "") -> str:
    """The source of a block that reads layer 2 each step and runs `code` in the step `at`, with `h`, its own rows.

    `before` runs first, outside the loop.
    """
    head = textwrap.dedent(before).strip("\n")
    loop = "for step in tracer.iter[:]:\n    o = model.model.layers[2].output\n    h = o[0]\n"
    body = f"    if step == {at}:\n" + textwrap.indent(textwrap.dedent(code).strip("\n"), " " * 8)
    return (head + "\n" if head else "") + loop + body + "\n"


def by_step(code: str, *, before: str = "") -> str:
    """The source of a block that reads layer 2 each step and runs `code` in each, with `h`, its own rows."""
    head = textwrap.dedent(before).strip("\n")
    loop = "for step in tracer.iter[:]:\n    o = model.model.layers[2].output\n    h = o[0]\n"
    return (head + "\n" if head else "") + loop + textwrap.indent(textwrap.dedent(code).strip("\n"), " " * 4) + "\n"


def marked_line(source: str) -> int | None:
    """The number of the line that ends with `#!`, from 1; `None` if there is none."""
    return next((at for at, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith("#!")), None)


def unique(kinds: Iterable[Kind]) -> dict[str, Kind]:
    """The kinds by name.

    Raises:
        ValueError: two kinds have one name.
    """
    found: dict[str, Kind] = {}
    for kind in kinds:
        if kind.name in found:
            raise ValueError(f"two kinds are named {kind.name!r}")
        found[kind.name] = kind
    return found
