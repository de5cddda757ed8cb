"""The library: vectors, probes and autoencoders under names and versions, which interventions name.

`client.library` puts, finds and removes entries. `files` reads and writes the files of other tools. docs/library.md
describes both.
"""

from __future__ import annotations

from .entry import LibraryEntry
from .resource import Library

__all__ = ["Library", "LibraryEntry"]
