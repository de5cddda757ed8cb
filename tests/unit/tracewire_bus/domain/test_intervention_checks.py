"""Declared interventions as messages: where they apply, and what is refused before an engine hears of it."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from tracewire_bus.domain.intervention_checks import (
    DeclarationError,
    check,
    check_content,
    check_encoded,
    decode_interventions,
    find_sites,
    normalize,
    substitute_live,
)
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.store.vectors import reference_to
from tracewire_bus.wire.arrays import decode_array
from tracewire_bus.wire.codec import decode_submission, encode
from tracewire_bus.wire.messages import (
    Ablate,
    Clamp,
    EngineInfo,
    Live,
    LogitLens,
    ModuleInfo,
    Probe,
    Steer,
    StopWhen,
    Submission,
)
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef, encode_ref

HIDDEN = 8


PATHS = ["", "model", "model.embed", "model.layers"] + [
    path for index in range(4) for path in (f"model.layers.{index}", f"model.layers.{index}.mlp")
]


V = np.ones(HIDDEN, np.float32)


def tree(taps: list[str] | None = None) -> ModuleTree:
    info = EngineInfo(engine="e", model="m", layers="model.layers", layer_count=4, hidden_size=HIDDEN, taps=taps or [])
    info.modules = [ModuleInfo(path=path, cls="Module") for path in PATHS]
    return ModuleTree(info)


def checked(*interventions: Any, live: dict[str, Any] | None = None, taps: list[str] | None = None) -> Any:
    return check(decode_interventions(normalize(interventions)), tree(taps), hidden_size=HIDDEN, live=live or {})


@pytest.mark.parametrize(
    ("at", "paths", "pattern"),
    [
        ("residual(2)", ["model.layers.2"], False),
        ("residual(-1)", ["model.layers.3"], False),
        ("residual(*)", [f"model.layers.{index}" for index in range(4)], True),
        ("residual(1:3)", ["model.layers.1", "model.layers.2"], True),
        ("model.layers.3.mlp", ["model.layers.3.mlp"], False),
        ("model.layers.3.mlp.output", ["model.layers.3.mlp"], False),
        ("model.layers.*.mlp", [f"model.layers.{index}.mlp" for index in range(4)], True),
    ],
)
def test_where(at: str, paths: list[str], pattern: bool) -> None:
    sites, several = find_sites(tree(), at)
    assert [site.path for site in sites] == paths
    assert several is pattern
    assert {site.value for site in sites} == {"residual" if at.startswith("residual") else "output"}


def test_a_star_stands_for_any_text_within_a_step() -> None:
    chosen = random.Random(5)
    known = tree()
    for _ in range(2000):
        at = list(chosen.choice([path for path in known.paths if path]))
        for _ in range(chosen.randrange(1, 6)):
            at[chosen.randrange(len(at))] = "*"
        pattern = "".join(at)
        shape = re.compile(re.sub(r"(\\\*)+", "[^.]*", re.escape(pattern)))
        wanted = [path for path in known.paths if shape.fullmatch(path)]
        try:
            found = [site.path for site in find_sites(known, pattern)[0]]
        except ValueError:
            found = []
        assert found == wanted, pattern


@pytest.mark.parametrize("at", ["model." + "*" * 300 + "#", "model." + "*e*" * 4 + "#", "*o*d*" * 100 + "#.norm"])
def test_many_stars_are_matched_in_linear_time(at: str) -> None:
    with pytest.raises(ValueError, match="no module"):
        find_sites(tree(), at)


def test_a_location_is_of_a_bounded_length() -> None:
    with pytest.raises(ValueError, match="at most 1000 characters, got 1001"):
        find_sites(tree(), "a" * 1001)


def test_an_input_is_a_location_of_its_own() -> None:
    (site,), _ = find_sites(tree(), "model.layers.0.mlp.input")
    assert site.location == "model.layers.0.mlp.input"


@pytest.mark.parametrize(
    ("one", "field", "says"),
    [
        (Probe("p", "residual(9)"), "at", "4 layers"),
        (Probe("p", "residual(4:9)"), "at", "empty"),
        (Probe("p", "residual(x)"), "at", "'x'"),
        (Probe("p", "model.layers.7.mlp"), "at", "model.layers.3.mlp"),
        (Probe("p", "model.*.nothing"), "at", "no module"),
        (Probe("1p", "residual(0)"), "name", "1p"),
        (Probe("p", "residual(0)", weight=np.ones(5)), "weight", "hidden size is 8"),
        (Probe("p", "residual(0)", weight=np.full(8, np.nan)), "weight", "finite"),
        (Probe("p", "residual(0)", weight=np.ones((2, 8)), bias=np.ones(3)), "bias", "[3]"),
        (Probe("p", "residual(0)", bias=1.0), "bias", "weight"),
        (Probe("p", "residual(0)", weight=V, reduce="norm"), "reduce", "norm"),
        (Probe("p", "residual(0)", positions="first"), "positions", "first"),  # type: ignore[arg-type]
        (Probe("p", "residual(0)", weight=["a"]), "weight", "numbers"),
        (Steer("residual(0)", None), "vector", "expected an array"),
        (Steer("residual(0)", np.ones((2, 8))), "vector", "[hidden]"),
        (Steer("residual(0)", V, scale="big"), "scale", "a number or Live"),  # type: ignore[arg-type]
        (Steer("residual(0)", V, scale=float("nan")), "scale", "NaN"),
        (Steer("residual(0)", V, scale=Live("beta")), "scale", "beta"),
        (Steer("residual(0)", V, scale=Live("name")), "scale", "a number"),
        (Steer("residual(0)", Live("alpha")), "vector", "an array"),
        (Clamp("residual(0)", V), "min", "bound"),
        (LogitLens("l", "model.layers.0.mlp"), "at", "residual"),
        (LogitLens("l", "residual(0)", top_k=0), "top_k", "1 to"),
        (StopWhen("p", above=1.0), "probe", "no probe"),
        ("steer", "", "str"),
    ],
)
def test_what_is_refused_and_by_which_name(one: Any, field: str, says: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        checked(Ablate("residual(0)"), one, live={"alpha": 1.0, "name": "x"})
    assert raised.value.field == ("interventions[1]" + (f".{field}" if field else ""))
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("probe", "stop", "field"),
    [
        (Probe("p", "residual(0)"), StopWhen("p", above=1.0), "probe"),
        (Probe("p", "residual(*)", weight=V), StopWhen("p", above=1.0), "probe"),
        (Probe("p", "residual(0)", weight=V, positions="all"), StopWhen("p", above=1.0), "probe"),
        (Probe("p", "residual(0)", weight=np.ones((2, 8))), StopWhen("p", above=1.0, output=2), "output"),
        (Probe("p", "residual(0)", weight=V), StopWhen("p"), "above"),
        (Probe("p", "residual(0)", weight=V), StopWhen("p", above=1.0, steps=0), "steps"),
    ],
)
def test_stop_conditions_need_a_number_each_step(probe: Probe, stop: StopWhen, field: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        checked(probe, stop)
    assert raised.value.field == f"interventions[1].{field}"


def checked_by_reference(*interventions: Any, live: dict[str, Any]) -> None:
    """As clients and engines check interventions whose arrays are references: the contents apart."""
    plain, contents = [], []
    for index, one in enumerate(normalize(interventions)):
        refs = {}
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if isinstance(value, msgspec.msgpack.Ext):
                payload = bytes(value.data)
                refs[name] = encode_ref(reference_to(payload))
                contents.append((decode_array(memoryview(payload)), f"interventions[{index}].{name}"))
        plain.append(msgspec.structs.replace(one, **refs))
    check(decode_interventions(plain), tree(), hidden_size=HIDDEN, live=live)
    for array, field in contents:
        check_content(array, field)


WRONG = [
    np.full(HIDDEN, np.nan),
    np.full(HIDDEN, np.inf),
    np.ones((2, 2, HIDDEN)),
    np.ones(HIDDEN - 1),
    np.ones(0),
    1.0,
]


@pytest.mark.parametrize("wrong", WRONG, ids=["nan", "infinite", "cube", "narrow", "empty", "number"])
@pytest.mark.parametrize(
    "make",
    [
        lambda wrong: Steer("residual(0)", wrong),
        lambda wrong: Clamp("residual(0)", wrong, min=0.0),
        lambda wrong: Ablate("residual(0)", wrong),
        lambda wrong: Probe("q", "residual(0)", weight=wrong),
        lambda wrong: Probe("q", "residual(0)", weight=np.ones((3, HIDDEN)), bias=wrong),
    ],
    ids=["steer", "clamp", "ablate", "weight", "bias"],
)
def test_by_reference_the_same_is_refused_with_the_same_words(make: Any, wrong: Any) -> None:
    good, one = Probe("p", "residual(0)", weight=V), make(wrong)
    outcomes = []
    for checks in (checked, checked_by_reference):
        try:
            checks(good, one, live={})
            outcomes.append(None)
        except DeclarationError as error:
            outcomes.append((error.field, error.message))
    assert outcomes[0] == outcomes[1]
    # A number is a bias of a probe, too.
    assert outcomes[0] is not None or (isinstance(one, Probe) and wrong == 1.0)


def test_by_reference_what_fits_is_accepted() -> None:
    checked_by_reference(
        Probe("p", "residual(0)", weight=np.ones((3, HIDDEN)), bias=np.ones(3)),
        Steer("residual(1)", V, scale=Live("scale")),
        Ablate("residual(2)", np.ones((2, HIDDEN))),
        Clamp("residual(2)", V, max=1.0),
        StopWhen("p", above=1.0, output=2),
        live={"scale": 1.0},
    )


def test_a_reference_to_the_blob_of_a_trace_is_refused() -> None:
    for blob in ("ab12", "vector-ab12", f"vector-{bytes(16).hex()}/../x"):
        with pytest.raises(DeclarationError, match="load it first") as caught:
            checked(Steer("residual(0)", ArrayRef("float32", (HIDDEN,), bytes(16), blob)))
        assert caught.value.field == "interventions[0].vector"


def test_a_name_is_saved_once_and_lists_are_bounded() -> None:
    with pytest.raises(DeclarationError, match="twice"):
        checked(Probe("p", "residual(0)"), LogitLens("p", "residual(1)"))
    with pytest.raises(DeclarationError, match="at most"):
        checked(*[Ablate("residual(0)")] * 65)


def test_live_parameters_of_any_names_are_answered() -> None:
    with pytest.raises(DeclarationError, match="not declared"):
        checked(Steer("residual(0)", V, scale=Live("alpha")), live={1: 2.0, "beta": 1.0})  # type: ignore[dict-item]


def test_an_untapped_location_is_refused() -> None:
    taps = ["model.layers.2.output"]
    checked(Probe("p", "residual(2)"), Probe("q", "model.layers.2"), taps=taps)
    for at in ("residual(1)", "residual(*)", "model.layers.2.mlp", "model.layers.2.input"):
        with pytest.raises(DeclarationError, match="not a tap"):
            checked(Probe("p", at), taps=taps)


def test_they_travel_and_live_parameters_are_put_in() -> None:
    given = [
        Probe("p", "residual(0)", weight=[1.0] * 8, bias=np.float32(2.0)),
        Steer("residual(1)", Live("v"), scale=Live("alpha")),
        StopWhen("p", above=Live("alpha"), steps=2),
    ]
    submission = Submission(trace="t", model="m", invokes=[], interventions=normalize(given))
    probe, steer, stop = decode_submission(encode(submission)).interventions
    assert isinstance(probe, Probe)
    assert probe.weight.tolist() == [1.0] * 8
    assert probe.bias == 2.0
    live = {"v": V, "alpha": 0.5}
    places = check([probe, steer, stop], tree(), hidden_size=HIDDEN, live=live)
    assert [len(sites) for sites, _ in places] == [1, 1, 0]
    settled = substitute_live(steer, live)
    assert isinstance(settled, Steer)
    assert settled.vector is V
    assert settled.scale == 0.5
    assert substitute_live(stop, live) == StopWhen("p", above=0.5, steps=2)


def test_what_has_been_found_to_fit_is_told_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def counted(interventions: Any, *args: Any, **options: Any) -> Any:
        looked.append(interventions)
        return check(interventions, *args, **options)

    monkeypatch.setattr("tracewire_bus.domain.intervention_checks.check", counted)
    here, there = tree(), tree(taps=["model.layers.1.output"])

    def look(at: str, live: Any, *trees: ModuleTree, hidden_size: int = HIDDEN) -> int:
        before = len(looked)
        steer = Steer(at, np.ones(HIDDEN, np.float32), scale=Live("scale"))
        check_encoded(normalize([steer]), pack({"scale": live}), trees, hidden_size=hidden_size)
        return len(looked) - before

    assert [look("residual(1)", 1.0, here) for _ in range(3)] == [1, 0, 0]
    # In another model, of other parameters, of another width, and elsewhere it is something else.
    assert look("residual(1)", 1.0, here, there) == 2
    assert look("residual(1)", 1.0, here, there) == 0
    assert look("residual(1)", 2.0, here) == 1
    with pytest.raises(DeclarationError, match="scale"):
        look("residual(1)", "much", here)
    with pytest.raises(DeclarationError, match="hidden size"):
        look("residual(1)", 1.0, here, hidden_size=HIDDEN + 1)
    # What does not fit is not remembered to.
    for _ in range(2):
        with pytest.raises(DeclarationError, match="tap"):
            look("residual(2)", 1.0, here, there)
    monkeypatch.setattr("tracewire_bus.domain.intervention_checks._CACHED_LISTS", 2)
    for number in range(5):
        assert look("residual(1)", float(number + 10), here) == 1
    assert len(here.fitting_interventions) <= 2


def test_what_was_checked_before_vouches_for_no_value_of_another_type() -> None:
    """The checks of types are remembered, and `True` equals `1`."""
    for _ in range(2):
        normalize([LogitLens("lens", "residual(1)", top_k=1)])
        with pytest.raises(DeclarationError, match="expected an integer, got True"):
            normalize([LogitLens("lens", "residual(1)", top_k=True)])
        with pytest.raises(DeclarationError, match=r"expected an integer, got \[1\]"):
            normalize([LogitLens("lens", "residual(1)", top_k=[1])])  # type: ignore[arg-type]
