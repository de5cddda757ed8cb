"""The file of approved blocks: read again when it has changed, and never half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire_bus.domain.approvals import Approvals, ApprovalsError


def test_an_approval_is_seen_by_who_reads_the_file_already(tmp_path: Path) -> None:
    file = tmp_path / "approved.json"
    reader, writer = Approvals(file), Approvals(file)
    assert reader.hashes() == frozenset()
    writer.add("watch", "ab", "block watch\n", "ann")
    assert reader.hashes() == {"ab"}
    assert [(one.name, one.by) for one in reader.read()] == [("watch", "ann")]
    writer.add("watch", "cd", "block watch\n    x = 1\n")
    writer.add("watch", "ab", "block watch\n", "ann")
    assert [one.hash for one in reader.read()] == ["cd", "ab"]
    assert writer.remove("ab")
    assert not writer.remove("ab")
    assert reader.hashes() == {"cd"}
    file.unlink()
    assert reader.hashes() == frozenset()
    assert list(tmp_path.iterdir()) == []


def test_the_difference_is_to_what_was_approved_last_under_the_name(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path / "approved.json")
    assert approvals.difference("watch", "block watch\n") == ""
    approvals.add("watch", "ab" * 32, "block watch\n    x = 1\n")
    approvals.add("other", "cd" * 32, "block other\n")
    found = approvals.difference("watch", "block watch\n    x = 2\n")
    assert "-    x = 1\n+    x = 2\n" in found


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "approved.json"
    file.write_text('{"approved": [{"hash": 1}]}')
    with pytest.raises(ApprovalsError, match=r"approved\.json: Expected"):
        Approvals(file).hashes()
    with pytest.raises(ApprovalsError, match="no-folder"):
        Approvals(tmp_path / "no-folder" / "f").add("a", "b", "c")
