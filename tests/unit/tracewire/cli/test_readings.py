"""Saves as short texts and plots."""

from __future__ import annotations

import numpy as np
import pytest

from tracewire.cli.readings import Readings, items_of, line_of, sparkline, value_text


@pytest.mark.parametrize(
    ("numbers", "width", "bars"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 1, 2, 3], 2, "▁█"),
        ([5, 5], 8, "▄▄"),
        ([], 8, ""),
        ([1, float("nan"), 2, float("inf")], 8, "▁·█·"),
        ([float("nan")], 8, "·"),
    ],
)
def test_plots(numbers: list[float], width: int, bars: str) -> None:
    assert sparkline(numbers, width) == bars


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (0.123456, "0.1235"),
        (np.float32(2.5), "2.5"),
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
        ("word", "'word'"),
        ({"token_ids": np.array([5, 6]), "logits": np.array([2.0, 1.0])}, "5 6"),
        ({"features": np.array([30, 7, -1]), "activations": np.array([2.5, 0.25, 0.0])}, "30:2.5 7:0.25"),
        ({"features": np.array([[1], [2]]), "activations": np.array([[1.0], [3.0]])}, "2:3"),
        ({"features": np.array([-1]), "activations": np.array([0.0])}, "no feature"),
        ({"token_ids": np.array([5]), "token_strings": [" the"]}, "' the'"),
        ({"token_ids": np.array([[5], [6]]), "token_strings": [[" a", " b"], [" ", "c"]]}, "a ' '"),
    ],
)
def test_a_value_is_a_short_text(value: object, text: str) -> None:
    assert value_text(value) == text


def test_numbers_are_plotted_over_time_and_arrays_over_their_elements() -> None:
    readings = Readings()
    readings.feed({"a": [1.0, 3.0], "layers": [np.array([1.0, 2.0, 3.0])], "big": [np.zeros((4, 4))], "flag": True})
    readings.feed({"a": [2.0], "layers": [np.array([3.0, 2.0, 1.0])]})
    shown = {name: (reading.plot(8), reading.text) for name, reading in readings.by_name.items()}
    assert shown == {
        "a": ("▁█▅", "2"),
        "layers": ("█▅▁", "[3, 2, 1]"),
        "big": ("", "float64[4, 4]"),
        "flag": ("", "True"),
    }
    readings.clear()
    assert readings.by_name == {}


def test_the_items_and_the_line_of_an_event() -> None:
    delta = {"a": [1.0, 2.0], "b": 3}
    assert list(items_of(delta)) == [("a", 1.0), ("a", 2.0), ("b", 3)]
    assert line_of(delta) == "a=2  b=3"
