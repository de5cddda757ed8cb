"""Attention heads: where they are, and what is refused before an engine hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tracewire_bus.domain.test_intervention_checks import HIDDEN, PATHS
from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.domain.intervention_checks import check, decode_interventions, find_sites, normalize
from tracewire_bus.domain.patch_checks import check_prompt
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.domain.value_checks import DeclarationError
from tracewire_bus.wire.messages import (
    AttentionInfo,
    AttentionPattern,
    EngineInfo,
    Features,
    HeadAblate,
    HeadProbe,
    Live,
    ModuleInfo,
    Patch,
    Probe,
    Steer,
)

HEADS, SIZE = 3, 4


def tree(heads: tuple[int, ...] = (HEADS, HEADS, HEADS, 0)) -> ModuleTree:
    """Of four layers with so many heads each; 0: the engine does not know."""
    paths = [*PATHS, *(f"model.layers.{layer}.attn.out" for layer in range(4))]
    info = EngineInfo(engine="e", model="m", layers="model.layers", layer_count=4, hidden_size=HIDDEN)
    info.modules = [ModuleInfo(path=path, cls="Layer") for path in paths]
    info.attention = [
        AttentionInfo(layer, f"model.layers.{layer}.attn.attn", f"model.layers.{layer}.attn.out", count, 1, SIZE)
        for layer, count in enumerate(heads)
        if count
    ]
    return ModuleTree(info)


def checked(*interventions: Any, live: dict[str, Any] | None = None, heads: tuple[int, ...] = (3, 3, 3, 0)) -> Any:
    return check(decode_interventions(normalize(interventions)), tree(heads), hidden_size=HIDDEN, live=live or {})


@pytest.mark.parametrize(
    ("at", "layers", "pattern"), [("heads(1)", [1], False), ("heads(-2)", [2], False), ("heads(0:2)", [0, 1], True)]
)
def test_heads_are_at_the_input_of_the_output_projection(at: str, layers: list[int], pattern: bool) -> None:
    sites, several = find_sites(tree(), at)
    assert [site.location for site in sites] == [f"model.layers.{layer}.attn.out.input" for layer in layers]
    assert {(site.heads, site.head_size) for site in sites} == {(HEADS, SIZE)}
    assert several is pattern


def test_all_kinds_take_heads_as_a_location_of_all_heads_side_by_side() -> None:
    checked(
        Probe("p", "heads(1)", weight=np.ones(HEADS * SIZE)),
        Steer("heads(1)", np.ones(HEADS * SIZE)),
        HeadProbe("h", "heads(0:3)"),
        HeadProbe("one", "heads(0)", heads=2, reduce="norm"),
        HeadAblate("heads(1)", [2, 0]),
        HeadAblate("heads(1)", np.array([1]), keep=Live("keep"), mean=np.ones(SIZE)),  # type: ignore[arg-type]
        HeadAblate("heads(1)", [2, 0], mean=np.ones((2, SIZE))),
        Patch("heads(1)", np.ones((1, SIZE)), heads=1),
        Patch("heads(1)", np.ones((2, 2, SIZE)), heads=[0, 1], positions=[0, 1]),
        Patch("heads(1)", np.ones(HEADS * SIZE)),
        live={"keep": 0.5},
    )


def test_an_autoencoder_of_heads_has_their_width() -> None:
    def sae(width: int, at: str = "") -> SparseAutoencoder:
        return SparseAutoencoder(np.ones((5, width)), np.ones((5, width)), at=at)

    checked(Features("f", "heads(1)", sae(HEADS * SIZE, "heads(1)")))
    for wrong, says in ((sae(HIDDEN), r"there have 12 features"), (sae(HEADS * SIZE, "heads(2)"), r"is of heads\(2\)")):
        with pytest.raises(DeclarationError, match=says) as error:
            checked(Features("f", "heads(1)", wrong))
        assert error.value.field == "interventions[0].sae"


@pytest.mark.parametrize(
    ("one", "field", "says"),
    [
        (HeadProbe("h", "heads(3)"), "at", "does not know the attention heads of model.layers.3, a Layer"),
        (HeadProbe("h", "heads(*)"), "at", "heads(3): the engine does not know"),
        (HeadProbe("h", "heads(9)"), "at", "4 layers"),
        (HeadProbe("h", "residual(1)"), "at", "expected heads(...)"),
        (HeadAblate("model.layers.1.mlp", 0), "at", "expected heads(...)"),
        (Patch("residual(1)", np.ones((1, SIZE)), heads=0), "at", "expected heads(...)"),
        (HeadProbe("h", "heads(1)", heads=3), "heads", "3 heads, 0 to 2, got 3"),
        (HeadProbe("h", "heads(1)", heads=[-1]), "heads", "0 to 2, got -1"),
        (HeadAblate("heads(1)", []), "heads", "one or more"),
        (HeadAblate("heads(1)", [1, 1]), "heads", "each once"),
        (HeadAblate("heads(1)", None), "heads", "a head's number"),  # type: ignore[arg-type]
        (HeadAblate("heads(1)", "all"), "heads", "a head's number"),  # type: ignore[arg-type]
        (HeadAblate("heads(1)", [0, 1], mean=np.ones((1, SIZE))), "mean", "expected [4] or [2, 4] for 2 heads"),
        (HeadAblate("heads(1)", 0, mean=np.ones(SIZE + 1)), "mean", "got [5]"),
        (HeadAblate("heads(1)", 0, mean=np.full(SIZE, np.inf)), "mean", "finite"),
        (HeadAblate("heads(1)", 0, keep=Live("keep")), "keep", "was not declared"),
        (Patch("heads(1)", np.ones((2, SIZE)), heads=[0]), "values", "values of 1 heads"),
        (Patch("heads(1)", np.ones((1, SIZE + 1)), heads=[0]), "values", "3 heads of 4"),
        (Patch("heads(1)", np.ones(SIZE), heads=[0]), "values", "[heads, head_size] or [positions, heads, head_size]"),
        (Patch("heads(1)", np.ones((2, 1, SIZE)), heads=[0]), "values", "a row for each of 1 positions, got 2"),
        (Steer("heads(1)", np.ones(HIDDEN)), "vector", "'heads(1)' has 3 heads of 4, together 12"),
        (AttentionPattern("a", "heads(3)"), "at", "does not know the attention heads"),
        (AttentionPattern("a", "residual(1)"), "at", "expected heads(...)"),
        (AttentionPattern("a", "heads(1)", heads=4), "heads", "3 heads, 0 to 2, got 4"),
        (AttentionPattern("a", "heads(1)", top_k=-1), "top_k", "expected 0 (the whole pattern) to 1024"),
        (AttentionPattern("a", "heads(1)", top_k=2000), "top_k", "got 2000"),
        (HeadProbe("h", "heads(1)", reduce="mean"), "reduce", "'none', 'norm'"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(one: Any, field: str, says: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        checked(one)
    assert caught.value.field == f"interventions[0].{field}"
    assert says in caught.value.message


def test_a_pattern_is_at_the_module_that_computes_the_attention() -> None:
    ((sites, several),) = checked(AttentionPattern("a", "heads(0:2)"))
    assert [site.location for site in sites] == [f"model.layers.{layer}.attn.attn.input" for layer in (0, 1)]
    assert several


def test_a_pattern_that_cannot_be_computed_is_refused_with_the_reason() -> None:
    known = tree()
    known.attention[1].opaque = "it has attention sinks beside the positions"
    plain = normalize([AttentionPattern("a", "heads(0:2)")])
    with pytest.raises(DeclarationError, match="of layer 1 cannot be computed: it has attention sinks") as caught:
        check(plain, known, hidden_size=HIDDEN, live={})
    assert caught.value.field == "interventions[0].at"
    check(normalize([HeadProbe("h", "heads(0:2)")]), known, hidden_size=HIDDEN, live={})


def test_layers_with_other_heads_are_named_apart() -> None:
    with pytest.raises(DeclarationError, match="layer 0 has 3 heads of 4, and layer 2 has 5 of 4"):
        checked(HeadProbe("h", "heads(0:3)"), heads=(3, 3, 5, 0))


def test_a_model_of_which_no_heads_are_known() -> None:
    with pytest.raises(DeclarationError, match=r"does not know the attention heads of model\.layers\.1"):
        checked(HeadAblate("heads(1)", 0), heads=(0, 0, 0, 0))


def test_rows_of_heads_are_counted_against_the_prompt() -> None:
    values = np.ones((2, 1, SIZE), np.float32)
    plain = decode_interventions(normalize([Patch("heads(1)", values, heads=0, positions="prompt")]))
    check_prompt(plain, 2)
    with pytest.raises(DeclarationError, match="a row for each of 3 positions, got 2"):
        check_prompt(plain, 3)
    # One row for all of a prompt of any length.
    check_prompt(decode_interventions(normalize([Patch("heads(1)", values[0], heads=0, positions="prompt")])), 3)
