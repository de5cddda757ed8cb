"""A Griffe extension: of `dtype, revision: of its weights.` in a docstring, each attribute is an item of its own.

Griffe would take the second name for the first one's type.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["GroupedAttributes"]

#: An item of a section, with several names: its indentation, its names and its text, with further lines.
_ITEM = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)


class GroupedAttributes(Extension):
    """Gives each attribute of a group the text of the group."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Take an object that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _ITEM.sub(_apart, obj.docstring.value)


def _apart(match: re.Match[str]) -> str:
    indentation, group, text = match.groups()
    names = group.split(", ")
    others = {name: ", ".join(f"`{other}`" for other in names if other != name) for name in names}
    return "\n".join(f"{indentation}{name}: with {others[name]}: {text}" for name in names)
