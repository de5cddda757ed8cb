"""The tables of `docs/nnsight.md` name tests that there are."""

from __future__ import annotations

import re

from tests.support import ROOT

PAGE = ROOT / "docs" / "nnsight.md"


def test_every_test_that_the_page_names_is_there() -> None:
    # A name without a folder is one of nnsight's own files.
    named = re.findall(r"`(?:tests/)?([\w/]+/test_\w+\.py)(?:::(test_\w+))?`", PAGE.read_text())
    assert len(named) > 80
    assert not re.findall(r"`test_\w+\.py::\w+`", PAGE.read_text())
    missing = []
    for file, test in named:
        path = ROOT / "tests" / file
        if not path.exists() or (test and f"def {test}(" not in path.read_text()):
            missing.append(f"{file}::{test}")
    assert missing == []
