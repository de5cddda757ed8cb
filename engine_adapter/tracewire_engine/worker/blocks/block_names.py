"""The module that classes defined in a block name as their `__module__`.

Annotations in a block are text. To recognise `ClassVar`, `InitVar` and `KW_ONLY` in such text, `dataclasses` looks the
names up in the module of the class, and fails if there is no such module. This module holds these names and nothing
else.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import KW_ONLY, InitVar
from typing import ClassVar

__all__ = ["KW_ONLY", "ClassVar", "InitVar", "dataclasses", "typing"]
