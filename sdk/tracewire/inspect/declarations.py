"""Lists of declared interventions, as objects or in their JSON form, and files of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracewire.checks import shown
from tracewire.errors import TraceRejected
from tracewire.gateway.json_values import interventions_of
from tracewire_bus.wire.messages import DeclaredIntervention

__all__ = ["interventions_in", "read_file"]

_FILE = "a .json or .toml file"


def interventions_in(value: Any, field: str) -> list[DeclaredIntervention]:
    """The interventions of a list, or the only one.

    Raises:
        TraceRejected: it is none, or one of them is malformed; the error's field begins with `field`.
    """
    given = [value] if isinstance(value, Mapping | DeclaredIntervention) else value
    if not isinstance(given, list | tuple):
        raise TraceRejected(field, f"expected a list of interventions, or {_FILE} with one, got {shown(value)}")
    found: list[DeclaredIntervention] = []
    for index, one in enumerate(given):
        where = f"{field}[{index}]"
        if isinstance(one, Mapping):
            try:
                found += interventions_of([dict(one)], field)
            except TraceRejected as error:
                raise TraceRejected(error.field.replace(f"{field}[0]", where, 1), error.message) from None
        elif isinstance(one, DeclaredIntervention):
            found.append(one)
        else:
            raise TraceRejected(where, f"expected an intervention such as tracewire.Steer(...), got {shown(one)}")
    return found


def read_file(path: Path, field: str) -> tuple[list[DeclaredIntervention], dict[str, Any]]:
    """The interventions of a file, and the first values of its live parameters.

    A JSON file has one intervention, a list of them, or an object with the keys `interventions` and `live`. A TOML file
    has the tables `[[interventions]]` and `[live]`.

    Raises:
        TraceRejected: there is no such file, or its contents are wrong; the error's field begins with `field`.
    """
    try:
        text = path.read_text()
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise TraceRejected(field, f"expected {_FILE}: {path}: {error}") from None
    if not isinstance(given, dict) or "do" in given:
        return interventions_in(given, field), {}
    live = given.get("live", {})
    if given.keys() - {"interventions", "live"} or not isinstance(live, dict):
        raise TraceRejected(field, f"expected the keys interventions and live in {path}, got {shown(sorted(given))}")
    return interventions_in(given.get("interventions", []), field), live
