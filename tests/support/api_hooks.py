"""Hooks of schemathesis for the cases of `tests.support.api_cases`: half of them name what exists."""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis

__all__ = ["EXISTS", "RUNS", "before_call", "map_body", "map_path_parameters"]

#: What the examples of the API's document name, by path parameter. A trace `mine` is also the response `resp_mine`.
EXISTS = {"trace_id": "mine", "response_id": "resp_mine", "name": "gpu-0", "model": "demo"}
#: The engine that runs the traces.
RUNS = "gpu-1"


def _chosen(value: Any) -> bool:
    """Half of all values, the same ones each time."""
    return zlib.crc32(json.dumps(value, sort_keys=True, default=repr).encode()) % 2 == 0


def _edits(intervention: Any) -> bool:
    return not isinstance(intervention, dict) or intervention.get("do") not in ("probe", "logit_lens", "stop_when")


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Name what exists."""
    if not isinstance(path_parameters, dict) or not _chosen(path_parameters):
        return path_parameters
    exists = dict(EXISTS)
    if "/edits/" in context.operation.path:
        exists["name"] = "calm"
    return {name: exists.get(name, value) for name, value in path_parameters.items()}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Drain no engine that other cases need. Schemathesis finds its name in the answers."""
    if case.path.endswith("/drain") and case.path_parameters.get("name") == RUNS:
        case.path_parameters["name"] = EXISTS["name"]


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Name the model that is served, and give a trace one prompt."""
    if not isinstance(body, dict) or "model" not in body or not _chosen(body):
        return body
    body = {**body, "model": EXISTS["model"]}
    for holder in (body, body.get("tracewire")):
        if isinstance(holder, dict) and isinstance(holder.get("interventions"), list):
            # A scripted engine has no workers that would read anything.
            holder["interventions"] = [one for one in holder["interventions"] if _edits(one)]
    if context.operation.path == "/traces":
        body = {name: value for name, value in body.items() if name not in ("prompts", "messages")}
        body.setdefault("prompt", "x")
    return body
