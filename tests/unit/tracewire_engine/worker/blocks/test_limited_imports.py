"""A block whose permit limits its imports gets no other package, however it asks."""

from __future__ import annotations

import pytest

from tracewire_engine.worker.blocks.limited_imports import limited_builtins


@pytest.mark.parametrize("source", ["import os", "from os import path", "__import__('os')", "from . import x"])
def test_others_are_refused(source: str) -> None:
    with pytest.raises(ImportError, match="--code-imports"):
        exec(source, {"__builtins__": limited_builtins(["math"])})


def test_allowed_ones_are_imported_with_all_that_they_import_themselves() -> None:
    scope = {"__builtins__": limited_builtins(["math", "json"])}
    exec("import math\nimport json.decoder\nfrom json import loads\nx = loads('1') + math.pi", scope)
    assert scope["x"] > 4  # type: ignore[operator]
