"""Public names say that they are the package's, and keep the module that their annotations are from."""

from __future__ import annotations

import typing

import pytest

import tracewire
from tracewire.public import publish


def test_names_that_others_made_are_left_alone() -> None:
    assert pytest.Item.__module__ != "tracewire"
    publish([pytest.Item, 5])
    assert pytest.Item.__module__ != "tracewire"


def test_annotations_are_looked_up_where_they_were_written() -> None:
    module = "tracewire.public"
    one = type("One", (), {"__module__": module, "__annotations__": {"many": "Iterable[int]"}})
    publish([one])
    assert one.__module__ == "tracewire"
    assert typing.get_type_hints(one) == {"many": typing.get_type_hints(publish)["values"].__origin__[int]}


def test_every_public_class_is_named_for_the_package() -> None:
    named = [getattr(tracewire, name) for name in tracewire.__all__]
    classes = [one for one in named if isinstance(one, type)]
    assert len(classes) > 20
    assert {one.__module__ for one in classes} == {"tracewire"}
