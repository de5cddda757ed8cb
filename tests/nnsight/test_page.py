"""The tables of `docs/nnsight.md` name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "nnsight.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(test_\w+))?`", PAGE.read_text())
    assert len(named) > 80
    missing = []
    for file, test in named:
        if "/" not in file and not (TESTS / "nnsight" / file).exists():
            # One of nnsight's own.
            assert not test, f"{file}::{test}"
            continue
        path = TESTS / (file if "/" in file else f"nnsight/{file}")
        if not path.exists() or (test and f"def {test}(" not in path.read_text()):
            missing.append(f"{file}::{test}")
    assert missing == []
