"""Files of large values are named by what they hold."""

from __future__ import annotations

from pathlib import Path

from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import input_path, vector_path


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
