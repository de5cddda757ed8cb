"""Errors of the SDK."""

from __future__ import annotations

import tracewire
from tracewire import TraceRejected, TracewireError, UnknownModel, UntransportableVariable


async def test_errors_have_one_base() -> None:
    for name in tracewire.__all__:
        value = getattr(tracewire, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, TracewireError), name
    assert issubclass(UntransportableVariable, TraceRejected)
    assert issubclass(UnknownModel, LookupError)
