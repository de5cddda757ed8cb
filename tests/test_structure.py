"""The structure of the packages is measured rightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import structure


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package in a tree of its own, which is what is measured."""
    folder = tmp_path / "src" / "pack"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setattr(structure, "PACKAGES", {"pack": "src"})
    return folder


def test_lengths_are_counted_and_excused_with_a_reason(package: Path) -> None:
    body = "\n".join(f"        x = {number}" for number in range(60))
    (package / "long.py").write_text(
        f"class A:\n    def f(self, a, b, *, c):\n{body}\n\n    @staticmethod\n    def g(a):\n        pass\n\n"
        f"# whole: a table\ndef h():\n{body}\n"
    )
    found = structure.figures()
    assert found["function"]["over"] == [[61, "pack.long.A.f"]]
    assert found["function"]["excused"] == [[61, "pack.long.h", "a table"]]
    assert found["class"]["longest"] == [66, "pack.long.A"]
    assert found["parameters"]["longest"] == [3, "pack.long.A.f"]


def test_circles_are_found_wherever_a_module_is_imported(package: Path) -> None:
    (package / "a.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .room.b import B\n\nclass A: ...\n"
    )
    (package / "room").mkdir()
    (package / "room" / "__init__.py").touch()
    (package / "room" / "b.py").write_text("def f():\n    from pack.a import A\n")
    (package / "c.py").write_text("from . import a\nimport pack.room.b\n")
    assert structure.figures()["circles"] == [["pack.a", "pack.room.b"]]


def test_a_module_has_its_test_at_the_mirrored_path(package: Path) -> None:
    for name in ("a", "b"):
        (package / f"{name}.py").write_text("def f():\n    return 1\n")
    (package / "c.py").write_text('X = 1\n\nclass P:\n    def f(self):\n        """Nothing."""\n        ...\n')
    mirrored = package.parents[1] / "tests" / "unit" / "pack"
    mirrored.mkdir(parents=True)
    (mirrored / "test_a.py").touch()
    found = structure.figures()
    assert found["untested"] == ["pack.b"]
    assert found["modules"] == {"src/pack": 3}


def test_what_is_too_long_says_why_and_nothing_goes_round_in_a_circle() -> None:
    found = structure.figures()
    assert {kind: found[kind]["over"] for kind in ("class", "function", "parameters")} == {
        "class": [],
        "function": [],
        "parameters": [],
    }
    assert found["circles"] == []
    assert found["untested"] == []
