"""Lists and files of declared interventions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracewire import Probe, TraceRejected
from tracewire.inspect.declarations import interventions_in, read_file


def test_one_intervention_is_a_list_of_one() -> None:
    probe = Probe("p", "residual(1)")
    assert interventions_in(probe, "given") == [probe] == interventions_in([probe], "given")
    (found,) = interventions_in({"do": "probe", "name": "p", "at": "residual(1)"}, "given")
    assert (found.name, found.at) == ("p", "residual(1)")


def test_an_error_names_the_field_of_the_item() -> None:
    wrong = {"do": "probe", "name": "p", "at": "residual(1)", "reduce": "nrm"}
    with pytest.raises(TraceRejected) as raised:
        interventions_in([Probe("q", "residual(1)"), wrong], "given")
    assert raised.value.field == "given[1].reduce"


def test_a_json_file_may_have_a_list_or_one_intervention(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ('[{"do": "probe", "name": "p", "at": "x"}]', '{"do": "probe", "name": "p", "at": "x"}'):
        path.write_text(text)
        (found,), live = read_file(path, "given")
        assert (found.name, live) == ("p", {})


def test_a_file_that_is_no_json_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[")
    with pytest.raises(TraceRejected, match=r"given: expected a \.json or \.toml file: .*a\.json: .*line 1"):
        read_file(path, "given")
