"""Model arguments, as Inspect's command line and as Python give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai._util.config import parse_cli_args

import tracewire
from tracewire import Live, Probe, Steer, TraceRejected
from tracewire.inspect.model_args import arguments_of, named_refusals

BLOCK = """import tracewire

@tracewire.intervention
def watch(model, tracer, live, layer=1):
    hs = model.residual(layer).output.save()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a vector and a block, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", np.arange(8.0, dtype=np.float32))
    Path("probes.py").write_text(BLOCK)
    return tmp_path


def typed(*given: str) -> dict[str, Any]:
    """What Inspect makes of `-M` options."""
    return parse_cli_args(given)


def test_the_short_forms_of_tracewire_run_are_taken_from_a_command_line() -> None:
    found = arguments_of(
        typed(
            "url=redis://localhost:6379/1",
            "prefix=mine",
            "steer=residual(3)@direction.npy*alpha=2,positions=last",
            "probe=first=residual(1),reduce=norm,positions=all,residual(2)@direction.npy",
            "lens=residual(*),top_k=3",
            "live=alpha=4",
            "block=probes.py::watch",
            "set=layer=2",
            "priority=3",
            "ignore_eos=true",
        )
    )
    steer, first, second, lens = found.interventions
    assert isinstance(steer, Steer)
    assert isinstance(first, Probe)
    assert isinstance(second, Probe)
    assert (steer.at, steer.scale, steer.positions) == ("residual(3)", Live("alpha"), "last")
    assert (first.name, first.reduce, first.positions) == ("first", "norm", "all")
    assert (second.name, second.at) == ("probe", "residual(2)")
    assert np.array_equal(second.weight, np.arange(8.0))
    assert (lens.top_k, found.names) == (3, ["steer", "probe", "probe", "lens"])
    assert (found.url, found.client, found.live) == ("redis://localhost:6379/1", {"prefix": "mine"}, {"alpha": 4.0})
    assert found.block is not None
    assert found.block.name == "watch"
    options = found.trace_options()
    assert (options["priority"], options["ignore_eos"], options["token_strings"]) == (3, True, True)
    assert options["live"] == {"alpha": 4.0}


def test_a_vector_of_the_library_is_named_with_its_version() -> None:
    (steer,) = arguments_of(typed("steer=residual(12)@calm@3*2.0")).interventions
    assert (steer.at, steer.vector, steer.scale) == ("residual(12)", "calm@3", 2.0)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_declares_interventions_and_first_values(suffix: str) -> None:
    if suffix == "json":
        steer = {"do": "steer", "at": "residual(2)", "vector": [1, 2], "scale": {"live": "alpha"}}
        text = json.dumps({"interventions": [steer], "live": {"alpha": 0.5}})
    else:
        text = '[[interventions]]\ndo = "steer"\nat = "residual(2)"\nvector = [1, 2]\nscale = {live = "alpha"}\n'
        text += "[live]\nalpha = 0.5\n"
    Path(f"steering.{suffix}").write_text(text)
    found = arguments_of({"interventions": f"steering.{suffix}"})
    (steer_,) = found.interventions
    assert (steer_.at, list(steer_.vector), steer_.scale) == ("residual(2)", [1, 2], Live("alpha"))
    assert found.live == {"alpha": 0.5}


def test_python_gives_objects_json_forms_and_blocks() -> None:
    @tracewire.intervention
    def watch(model, tracer, live):
        hs = model.residual(1).output.save()

    probe = Probe("p", "residual(1)")
    found = arguments_of({"interventions": [probe, {"do": "probe", "name": "q", "at": "residual(2)"}], "block": watch})
    assert found.interventions[0] is probe
    assert [one.name for one in found.interventions] == ["p", "q"]
    assert found.block is watch
    assert arguments_of({}, "redis://base").url == "redis://base"
    assert arguments_of({"live": {"alpha": 1.0}}).live == {"alpha": 1.0}
    assert arguments_of({"interventions": {"do": "probe", "name": "q", "at": "residual(2)"}}).interventions


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ster": 1}, "model argument ster: expected one of block, engine_keys, .*; did you mean 'steer'?"),
        ({"temperature": 1}, "model argument temperature: the provider takes it from Inspect's generation options"),
        ({"url": 5}, "model argument url: expected the URL of a Redis, .* got 5"),
        ({"steer": "residual(3)"}, r"model argument steer: expected AT@VECTOR\[\*FACTOR\], as in"),
        ({"steer": 5}, "model argument steer: expected the form of `tracewire run --steer`, or a list .* got 5"),
        ({"probe": ["residual(1)", 5]}, "model argument probe: expected the form of"),
        ({"lens": "residual(1),top_k=x"}, "model argument lens: top_k: expected a number of tokens"),
        ({"live": "alpha"}, "model argument live: expected NAME=VALUE"),
        ({"live": {1: 2}}, "model argument live: expected names of variables"),
        ({"set": "layer=1"}, "model argument set: expected variables of a block: give block as well"),
        ({"block": "nothing.py"}, "model argument block: expected a Python file, got 'nothing.py'"),
        ({"block": "probes.py::no"}, "model argument block: probes.py has no intervention 'no'"),
        ({"block": 5}, "model argument block: expected FILE.py.*, or a function under @tracewire.intervention, got 5"),
        ({"block": "probes.py", "set": "depth=1"}, "model argument set: .*depth"),
        ({"interventions": 5}, "model argument interventions: expected a list of interventions, .* got 5"),
        ({"interventions": [5]}, r"model argument interventions\[0\]: expected an intervention such as"),
        ({"interventions": "no.json"}, "model argument interventions: expected a .json or .toml file: no.json: "),
        (
            {"interventions": [{"do": "probe", "name": "p", "at": "x"}, {"do": "stear"}]},
            r"model argument interventions\[1\]\.do: expected one of .* did you mean 'steer'",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceRejected, match=says) as raised:
        arguments_of(given)
    assert raised.value.field.startswith("model argument ")


def test_a_file_with_other_keys_is_refused() -> None:
    Path("a.toml").write_text("steer = 1\n")
    with pytest.raises(TraceRejected, match=r"expected the keys interventions and live in a\.toml"):
        arguments_of({"interventions": "a.toml"})


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("interventions[1].at", "model argument probe"),
        ("priority", "model argument priority"),
        ("interventions[7].at", "interventions[7].at"),
        ("messages[0]", "messages[0]"),
    ],
)
def test_a_refusal_names_the_argument(field: str, named: str) -> None:
    arguments = arguments_of({"steer": "residual(3)@direction.npy", "probe": "residual(9)", "priority": 1})
    with pytest.raises(TraceRejected) as raised, named_refusals(arguments):
        raise TraceRejected(field, "no")
    assert raised.value.field == named
