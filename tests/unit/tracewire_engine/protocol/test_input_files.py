"""Files of large values are named by what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import input_path, used_file, vector_path
from tracewire_engine.worker.remote_inputs import SharedInputs


def test_equal_arrays_share_a_file_and_others_do_not() -> None:
    one, same, other = (
        ArrayRef("int8", (4,), digest * 16, blob) for digest, blob in [(b"a", "x"), (b"a", "y"), (b"b", "x")]
    )
    assert input_path(Path("/inputs"), one) == input_path(Path("/inputs"), same)
    assert input_path(Path("/inputs"), one) != input_path(Path("/inputs"), other)
    assert input_path(Path("/inputs"), one).parent == Path("/inputs")


def test_a_vector_and_a_variable_of_one_content_have_files_of_their_own() -> None:
    """A variable's file ends with the last trace that uses it."""
    vector = ArrayRef("int8", (4,), b"a" * 16, f"vector-{(b'a' * 16).hex()}")
    assert vector_path(Path("/inputs"), vector).parent == Path("/inputs")
    assert vector_path(Path("/inputs"), vector) != input_path(Path("/inputs"), vector)


def test_a_file_that_one_adapter_removes_is_taken_from_another(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "one").write_bytes(folder.name.encode())

    def read(path: Path) -> bytes:
        if path.parent == folders[0]:
            path.unlink()
        return path.read_bytes()

    inputs = SharedInputs(folders)
    assert used_file(lambda: inputs / "one", read) == b"second"
    (folders[1] / "one").unlink()
    with pytest.raises(FileNotFoundError):
        used_file(lambda: inputs / "one", read)


def test_an_error_of_a_file_that_is_there_is_raised(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x")

    def refused(path: Path) -> None:
        raise ValueError(path.name)

    with pytest.raises(ValueError, match="one"):
        used_file(lambda: tmp_path / "one", refused)
