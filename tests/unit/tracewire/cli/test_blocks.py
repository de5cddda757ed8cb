"""Blocks are loaded from Python files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire.cli.blocks import load_block

ONE = "import tracewire\n\n@tracewire.intervention\ndef watch(model, tracer, live):\n    x = [].save()\n"
TWO = f"{ONE}\n@tracewire.intervention\ndef other(model, tracer, live):\n    y = [].save()\n\ndef plain():\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of one block, one of two, and one that imports a neighbour."""
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "near.py").write_text("from two import other\n")
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "text.md").write_text("# A page\nwith some words\n")
    (tmp_path / "raising.py").write_text("x = int('y')\n")
    (tmp_path / "lost.py").write_text("\nimport nowhere_at_all\n")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("one.py", "watch"),
        ("one.py::watch", "watch"),
        ("one.py:watch", "watch"),
        ("two.py::other", "other"),
        ("near.py", "other"),
    ],
)
def test_a_block_is_named_or_the_only_one(folder: Path, where: str, name: str) -> None:
    assert load_block(str(folder / where)).name == name


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("two.py", "several interventions, or none: name one, as FILE.py::NAME (it has: other, watch)"),
        ("none.py", "(it has: none)"),
        ("two.py::plain", "no intervention 'plain' (it has: other, watch)"),
        ("absent.py::x", "expected a Python file, got "),
        ("absent", "absent', which does not exist (the form is FILE.py[::NAME])"),
        ("", "which is no file"),
        ("text.md", "text.md:2: SyntaxError: "),
        ("raising.py", "raising.py:1: ValueError: invalid literal for int()"),
        ("lost.py", "lost.py:2: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, where: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_block(str(folder / where))
    assert says in str(caught.value)
