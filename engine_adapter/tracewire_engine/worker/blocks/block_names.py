"""The module that classes of blocks say they are from.

Annotations in a block are text. `dataclasses` looks the text of `ClassVar`, `InitVar` and `KW_ONLY` up in the module of
the class, by name, and fails without a module. So this one has these names, and nothing else.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import KW_ONLY, InitVar
from typing import ClassVar

__all__ = ["KW_ONLY", "ClassVar", "InitVar", "dataclasses", "typing"]
