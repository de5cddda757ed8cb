"""The short forms of interventions and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracewire import Hold, Live, LogitLens, Probe, Steer, When
from tracewire.cli.specs import (
    DECLARE,
    LENS,
    PROBE,
    STEER,
    declare_specs,
    declared,
    lens_spec,
    named_value,
    probe_spec,
    steer_spec,
    values_by_name,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a vector of two numbers and a matrix."""
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", np.array([1.0, -2.0]))
    np.save("matrix.npy", np.ones((2, 2)))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "at", "scale", "live", "positions"),
    [
        ("residual(4)@direction.npy", "residual(4)", 1.0, {}, "all"),
        ("residual(4)@direction.npy*8", "residual(4)", 8.0, {}, "all"),
        ("residual(*)@direction.npy*-0.5", "residual(*)", -0.5, {}, "all"),
        ("model.layers.*.mlp@direction.npy*alpha", "model.layers.*.mlp", Live("alpha"), {"alpha": 0.0}, "all"),
        ("residual(2:6)@direction.npy*alpha=8", "residual(2:6)", Live("alpha"), {"alpha": 8.0}, "all"),
        ("residual(4)@direction.npy*8,positions=generated", "residual(4)", 8.0, {}, "generated"),
    ],
)
def test_steer(folder: Path, text: str, at: str, scale: Any, live: dict[str, float], positions: str) -> None:
    spec = steer_spec(text)
    assert isinstance(spec.one, Steer)
    assert (spec.one.at, spec.one.scale, spec.live, spec.one.positions) == (at, scale, live, positions)
    assert spec.one.vector.tolist() == [1.0, -2.0]
    assert spec.one.vector.dtype == np.float32
    assert spec.option == f"--steer '{text}'"


def test_probe(folder: Path) -> None:
    probe = probe_spec("projection=residual(4)@direction.npy,positions=generated,activation=sigmoid").one
    assert isinstance(probe, Probe)
    assert (probe.name, probe.at, probe.positions, probe.activation) == (
        "projection",
        "residual(4)",
        "generated",
        "sigmoid",
    )
    assert probe.weight.tolist() == [1.0, -2.0]
    assert probe_spec("residual(*),reduce=norm").one == Probe(name="", at="residual(*)", reduce="norm")
    assert probe_spec("p=residual(0)@matrix.npy").one.weight.shape == (2, 2)  # type: ignore[attr-defined]


def test_lens() -> None:
    assert lens_spec("residual(*)").one == LogitLens(name="", at="residual(*)")
    assert lens_spec("l=residual(2),top_k=3,positions=all").one == LogitLens(
        name="l", at="residual(2)", top_k=3, positions="all"
    )


@pytest.mark.parametrize(
    ("convert", "text", "says"),
    [
        (
            steer_spec,
            "residual(4)",
            "expected AT@VECTOR[*FACTOR], as in 'residual(4)@direction.npy*8'; got 'residual(4)'",
        ),
        (steer_spec, "@direction.npy", "expected AT@VECTOR"),
        (steer_spec, "residual(4)@none.npy*8", "none.npy: No such file"),
        (steer_spec, "residual(4)@matrix.npy", "matrix.npy: expected one vector, got an array of shape [2, 2]"),
        (steer_spec, "residual(4)@direction.npy*2x", "the factor after '*' is a number, or a live parameter"),
        (steer_spec, "residual(4)@direction.npy*alpha=x", "alpha: expected a number as its first value, got 'x'"),
        (steer_spec, "residual(4)@direction.npy,scale=3", "after a comma: expected positions=..., got 'scale=3'"),
        (steer_spec, "residual(4)@direction.npy,positions=none", "positions: expected one of last, all, prompt"),
        (probe_spec, "=", "expected [NAME=]AT[@VECTOR], as in"),
        (probe_spec, "p=residual(4)@", "expected [NAME=]AT[@VECTOR], as in"),
        (probe_spec, "p=residual(4),reduce=median", "reduce: expected one of none, mean, norm, l1, max, moments"),
        (lens_spec, "residual(4)@direction.npy", "expected [NAME=]AT, as in"),
        (lens_spec, "residual(4),top_k=0", "top_k: expected a number of tokens, got '0'"),
        (named_value, "alpha", "expected NAME=VALUE, as in alpha=8"),
        (named_value, "=8", "expected NAME=VALUE"),
        (named_value, "direction=@none.npy", "none.npy: No such file"),
    ],
)
def test_what_is_wrong_is_named_with_an_example(
    folder: Path, convert: Callable[[str], Any], text: str, says: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        convert(text)
    assert says in str(caught.value)


def test_the_examples_of_the_help_are_read(folder: Path) -> None:
    for convert, (_, example) in ((steer_spec, STEER), (probe_spec, PROBE), (lens_spec, LENS)):
        assert convert(example).one.at == "residual(*)" if convert is lens_spec else "residual(4)"


def test_any_intervention_in_json(folder: Path) -> None:
    (spec,) = declare_specs(DECLARE[1])
    assert spec.one == Probe("p", "residual(4)", when=When(every=2))
    hold = (
        '{"do": "hold", "name": "s", "at": "residual(1)", "vector": [1, 0], "probe": "p", "target": {"live": "x"}, '
        '"min": -1, "max": 1}'
    )
    (folder / "both.json").write_text(f"[{DECLARE[1]}, {hold}]")
    _, second = declare_specs("@both.json")
    assert isinstance(second.one, Hold)
    assert second.one.target == Live("x")
    for text, says in [
        ("{", "expected JSON|@FILE"),
        ("@none.json", "none.json"),
        ('{"do": "hold"}', "declare[0]: Object missing required field"),
        ('{"do": "prob", "name": "p"}', "declare[0].do: expected one of probe, logit_lens, "),
        ('{"do": "prob", "name": "p"}', ", got 'prob'; did you mean 'probe'?"),
        ('{"name": "p"}', "declare[0].do: expected one of probe, logit_lens, "),
        ('{"do": ["probe"]}', ", got ['probe']"),
        ('{"do": "probe", "nme": "p", "at": "a"}', "declare[0].nme: unknown field; probe has name, at, "),
        ('{"do": "probe", "name": "p", "at": "a", "how": 1}', "declare[0].how: unknown field"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            declare_specs(text)
        assert says in str(error.value)


def test_values(folder: Path) -> None:
    assert [named_value(text) for text in ("a=8", "a=8.5", "a=true", "a=code", 'a="8"', "a=[1, 2]", "a=x=y")] == [
        ("a", 8),
        ("a", 8.5),
        ("a", True),
        ("a", "code"),
        ("a", "8"),
        ("a", [1, 2]),
        ("a", "x=y"),
    ]
    assert named_value("a=@direction.npy")[1].tolist() == [1.0, -2.0]
    assert values_by_name([("a", 1), ("b", 2), ("a", 3)]) == {"a": 3, "b": 2}


def test_what_options_declare_together(folder: Path) -> None:
    specs = [
        steer_spec("residual(4)@direction.npy*alpha"),
        probe_spec("residual(1)"),
        probe_spec("probe2=residual(2)"),
        probe_spec("residual(3)"),
        lens_spec("residual(3)"),
    ]
    found = declared(specs, {"alpha": 8, "layer": 3})
    assert [getattr(one, "name", "") for one in found.interventions] == ["", "probe", "probe2", "probe3", "lens"]
    assert found.options[1] == "--probe 'residual(1)'"
    assert found.live == {"alpha": 8.0, "layer": 3}
    # The factor of a vector can have a fraction later; another number stays what it is.
    assert [type(value) for value in found.live.values()] == [float, int]
