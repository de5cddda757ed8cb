"""A gateway before a scripted engine, with all that the examples of its document name, and cases by schemathesis."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from tests.support import scripted_engine
from tests.support.gateways import Served, serving
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_engine.adapter.engine_api import Prepared

__all__ = ["Found", "documented", "run_cases"]

#: What the document's examples name.
MODEL, ENGINE, TRACE, PROMPT = "demo", "gpu-0", "mine", "def add(a, b):"
_CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance",),
)


class Brief(ScriptedEngine):
    """A scripted engine whose requests have 8 tokens at most."""

    async def prepare(self, *arguments: Any, **named: Any) -> Prepared:
        """See `ScriptedEngine`."""
        prepared = await super().prepare(*arguments, **named)
        prompt, tokens, *rest = prepared.params
        return msgspec.structs.replace(prepared, params=(prompt, min(tokens, 8), *rest))


@asynccontextmanager
async def documented(url: str, prefix: str, **settings: Any) -> AsyncIterator[Served]:
    """A gateway with a model, engine, trace, response and standing intervention of the names in the examples."""
    async with (
        Bus.open(url, prefix=prefix) as bus,
        scripted_engine.serving(
            bus, Brief(partial(anyio.sleep, 0.001)), scripted_engine.info(MODEL, engine="gpu-1", layer_count=4)
        ),
        serving(url, prefix, **{"patience_s": 5.0, "accept_s": 2.0, **settings}) as served,
    ):
        # In the registry only: cases have it drain, again and again.
        spare = scripted_engine.info(MODEL, engine=ENGINE, state="draining", edits=2**31, layer_count=4)
        await bus.registry.register(spare, ttl_s=3600)
        client = served.gateway.client
        await until(client.models.list)
        trace = client.trace(MODEL, PROMPT, scripted_engine.acts, trace_id=TRACE, max_tokens=8, detach=True)
        async with trace as running:
            await running.result()
        yield served


@dataclass(frozen=True)
class Found:
    """What schemathesis has found: how many cases it ran, and its report, if any of them failed."""

    cases: int
    failures: str


async def run_cases(served: Served, folder: Path, *phases: str, examples: int, seed: int) -> Found:
    """Run cases against a gateway, in phases of schemathesis; `examples` is how many of each route are drawn."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--no-color"]
    command += ["--checks", ",".join(_CHECKS), "--phases", ",".join(phases), "--max-examples", str(examples)]
    command += [
        "--generation-database",
        "none",
        "--request-timeout",
        "60",
        "--continue-on-failure",
        "--warnings",
        "off",
    ]
    # A stream without an end: `test_any_resume_point_is_answered` has its cases.
    command += ["--exclude-path", "/events", "--suppress-health-check", "all"]
    command += ["--seed", str(seed)]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.support.api_hooks",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = await anyio.run_process(command, check=False, cwd=folder, env=environment)
    text = done.stdout.decode() + done.stderr.decode()
    found = re.search(r"(\d+) generated", text)
    return Found(int(found[1]) if found else 0, text if done.returncode else "")
