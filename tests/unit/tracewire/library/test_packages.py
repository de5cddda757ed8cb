"""A package that is not installed is named with the extra that installs it."""

from __future__ import annotations

import pytest

import tracewire
from tracewire.library.packages import package


def test_it_names_the_extra() -> None:
    assert package("json").loads("1") == 1
    with pytest.raises(tracewire.LibraryMissing, match=r"this file needs nowhere: pip install 'tracewire\[library\]'"):
        package("nowhere.at.all")
