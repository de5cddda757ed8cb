"""Engines of one model beside each other: what must agree, and what is told where it differs."""

from __future__ import annotations

from tests.support.bus_engine import engine_info
from tracewire_bus.domain.fleet import differences, disagreements


def test_engines_of_other_sizes_do_not_serve_the_same_model() -> None:
    one = engine_info()
    assert disagreements(one, engine_info()) == []
    assert disagreements(one, engine_info(hidden_size=16, vocabulary=8)) == [
        "vocabulary 4096, not 8",
        "hidden_size 8, not 16",
    ]


def test_a_size_that_an_engine_does_not_know_agrees_with_any() -> None:
    assert disagreements(engine_info(hidden_size=0), engine_info()) == []


def test_what_differs_is_told_in_words() -> None:
    one = engine_info()
    assert differences([one]) == []
    assert differences([one, engine_info(), engine_info(dtype="float32", max_model_len=64)]) == [
        "dtype",
        "longest sequence",
    ]
