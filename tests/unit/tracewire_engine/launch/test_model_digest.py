"""The digest of a model changes with its files, and samples large ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tracewire_engine.launch import model_digest
from tracewire_engine.launch.model_digest import digest_of_files, weights_digest


def _model(folder: Path, data: bytes = b"x" * 4000, config: str = "{}", name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    header = b'{"w": {}}'
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def _changed(data: bytes, place: int) -> bytes:
    return data[:place] + b"y" + data[place + 1 :]


def test_any_change_of_a_small_model_shows(tmp_path: Path) -> None:
    data = b"x" * 4000
    digests = [
        digest_of_files(_model(tmp_path / "a", data)),
        *(digest_of_files(_model(tmp_path / f"b{place}", _changed(data, place))) for place in (0, 1999, 3999)),
        digest_of_files(_model(tmp_path / "c", data, config='{"layers": 2}')),
        digest_of_files(_model(tmp_path / "d", data, name="other.safetensors")),
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of_files(_model(tmp_path / "e", data)) == digests[0]


def test_a_large_file_is_sampled_at_both_ends_and_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digest, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(model_digest, "_SAMPLES", 3)
    monkeypatch.setattr(model_digest, "_SAMPLE_BYTES", 10)
    data = b"x" * 4000
    same = digest_of_files(_model(tmp_path / "a", data))
    assert digest_of_files(_model(tmp_path / "between", _changed(data, 1000))) == same
    for place in (0, 1996, 3999):
        assert digest_of_files(_model(tmp_path / f"b{place}", _changed(data, place))) != same
    # The header is read whole.
    assert digest_of_files(_model(tmp_path / "longer", data + b"x")) != same


def test_what_has_no_files_has_no_digest(tmp_path: Path) -> None:
    assert digest_of_files(tmp_path) == ""
    _model(tmp_path / "m")
    config = SimpleNamespace(model=str(tmp_path / "m"), revision=None)
    assert weights_digest(config, "dummy") == ""
    assert weights_digest(config, "auto") == digest_of_files(tmp_path / "m")
    assert weights_digest(SimpleNamespace(model="nobody/such-model-of-a-test", revision=None), "auto") == ""


def test_a_file_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digest, "_WHOLE_BYTES", 10)
    (tmp_path / "odd.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"odd.safetensors: expected safetensors"):
        digest_of_files(tmp_path)
