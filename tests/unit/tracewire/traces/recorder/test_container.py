"""The file of a recording: what is damaged, foreign or of a later form is said to be so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire.errors import InvalidRecording
from tracewire.traces.recorder import container
from tracewire.traces.recorder.container import Content, parse_content, read_content, write_content


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.twrec"
    write_content(path, Content(trace="t", model="m", made_at=1.5, events=[("final", "2.5", b"x" * 100)]))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    content = read_content(path)
    assert (content.trace, content.made_at, content.events) == ("t", 1.5, [("final", "2.5", b"x" * 100)])
    assert [one.name for one in path.parent.iterdir()] == ["t.twrec"]


def test_damage_at_any_byte_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InvalidRecording, match=r"t.twrec: (it is damaged|expected a recording|it has the form)"):
            read_content(path)
    for size in (0, 5, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidRecording):
            read_content(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(InvalidRecording, match=f"expected {len(whole)} bytes, got {len(whole) + 1}"):
        read_content(path)


def test_a_later_form_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", 2)
    write_content(path, Content(trace="t", model="m", made_at=0.0))
    monkeypatch.setattr(container, "VERSION", 1)
    with pytest.raises(InvalidRecording, match="it has the form 2, and this version of Tracewire reads up to 1"):
        read_content(path)


def test_a_foreign_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{}")
    with pytest.raises(InvalidRecording, match="the file is none"):
        read_content(path)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_content(tmp_path / "nowhere" / "t.twrec", Content(trace="t", model="m", made_at=0.0))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_content(tmp_path / "folder", Content(trace="t", model="m", made_at=0.0))
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("part", ["events", "submission", "arrays", "one event"])
def test_values_are_counted_before_they_are_decoded(tmp_path: Path, part: str) -> None:
    many = b"\xdd" + (1000).to_bytes(4, "big") + b"\x80" * 1000
    content = Content(trace="t", model="m", made_at=0.0)
    match part:
        case "events":
            content.events = [("event", "2.6", b"")] * 300
        case "one event":
            content.events = [("event", "2.6", many)]
        case "submission":
            content.submission = many
        case "arrays":
            content.arrays = {str(one): b"" for one in range(600)}
    write_content(tmp_path / "file", content)
    data = (tmp_path / "file").read_bytes()
    assert parse_content(data, "file", values=2000) == content
    with pytest.raises(InvalidRecording, match="more than 1000 values"):
        parse_content(data, "file", values=1000)
    # Without a limit, a file of one's own may have any number.
    assert parse_content(data, "file") == content
