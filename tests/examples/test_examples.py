"""The examples import what is public only, and the demo's verdict looks at what it claims."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire import messages

EXAMPLES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_an_example_imports_of_ours_what_is_public_only(path: Path) -> None:
    modules: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module or "")
    ours = {module for module in modules if module.partition(".")[0].startswith("tracewire")}
    assert ours <= {"tracewire"}


def test_no_event_shares_its_name_with_another_class() -> None:
    """A consumer tells events apart by class: one of that name that never comes would match none, without a word."""
    events = {name for name in tracewire.__all__ if _is_event(getattr(tracewire, name))}
    assert {"Accepted", "Output", "Shared", "Steered", "Final"} <= events
    for name in events & set(messages.__all__):
        assert getattr(messages, name) is getattr(tracewire, name), name


def _is_event(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, messages.Event)


def loaded(example: str) -> ModuleType:
    """An example's `run.py`, which does not run when it is imported."""
    return module_of(ROOT / "examples" / example / "run.py")


def module_of(path: Path) -> ModuleType:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    sys.modules.pop("blocks", None)
    return module


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The demo's module."""
    return loaded("demo")


TOKEN_IDS = list(range(64))


COLLECTED = {"probability": "aa", "projection": "bb"}


def reports() -> dict[str, dict[str, Any]]:
    """What the three consumers of the demo report when all is well."""
    whole = {"outputs": 40, "tokens": 64, "token_digest": tracewire.digest(TOKEN_IDS).hex()}
    return {
        "service": {"name": "service", **whole, "digests": dict(COLLECTED)},
        "late": {"name": "late", **whole, "digests": dict(COLLECTED)},
        "narrow": {"name": "narrow", **whole, "digests": {"projection": "bb"}},
    }


def test_the_demo_finds_nothing_wrong_where_all_received_everything(demo: ModuleType) -> None:
    assert demo.problems(list(reports().values()), TOKEN_IDS, COLLECTED) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("late", {"outputs": 0}, "late: no output"),
        ("narrow", {"outputs": 0, "tokens": 0}, "narrow: 0 of 64 tokens"),
        ("late", {"tokens": 63}, "late: 63 of 64 tokens"),
        ("service", {"tokens": 65}, "service: 65 of 64 tokens"),
        ("late", {"token_digest": "00"}, "late: other tokens than the trace's"),
        ("late", {"digests": {"projection": "bb"}}, "late: folded ['projection'], not ['probability', 'projection']"),
        ("narrow", {"digests": {}}, "narrow: folded [], not ['projection']"),
        ("narrow", {"digests": {"projection": "cc"}}, "narrow: another projection than nnsight collected"),
    ],
)
def test_the_demo_says_who_lacks_what(demo: ModuleType, name: str, change: dict[str, Any], said: str) -> None:
    told = reports()
    told[name] |= change
    assert said in demo.problems(list(told.values()), TOKEN_IDS, COLLECTED)


@pytest.mark.parametrize("name", ["service", "late", "narrow"])
def test_the_demo_says_who_reported_nothing(demo: ModuleType, name: str) -> None:
    told = reports()
    del told[name]
    assert demo.problems(list(told.values()), TOKEN_IDS, COLLECTED) == [f"{name}: no report"]


def test_the_demo_says_that_the_trace_itself_is_short(demo: ModuleType) -> None:
    assert "the trace has 63 tokens, not 64" in demo.problems(list(reports().values()), TOKEN_IDS[:63], COLLECTED)
    assert "nnsight collected [], not ['probability', 'projection']" in demo.problems([], TOKEN_IDS, {})


#: A consumer that says that it received nothing.
EMPTY = """
import json
print("connected", flush=True)
input()
print(json.dumps({"name": "late", "outputs": 0, "tokens": 0, "token_digest": "", "digests": {}}), flush=True)
"""


@pytest.mark.parametrize("lacking", [False, True], ids=["all received everything", "one received nothing"])
async def test_the_demo_s_verdict_is_of_what_its_consumers_report(demo: ModuleType, lacking: bool) -> None:
    """Its service and its watchers, each in a process of its own, on a scripted engine."""
    direction = np.load(demo.MODEL / "direction.npy")
    facts = json.loads((demo.MODEL / "direction.json").read_text())

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(demo.TOKENS):
            await stage.save(f" {number}", {"projection": number / 2, "probability": 1 / (1 + number)})
        await stage.final()

    watcher = (sys.executable, str(demo.HERE / "watch.py"))
    async with EmbeddedServer.start() as server:
        narrow_command = (*watcher, "--url", server.url, "--name", "narrow", "--only", "projection")
        late_command = (sys.executable, "-c", EMPTY) if lacking else (*watcher, "--url", server.url, "--name", "late")
        info = engine_info("demo", hidden_size=len(direction), layer_count=facts["layer"] + 1)
        async with (
            BusEngine.running(server.url, "tw", script, info),
            demo.started(*late_command) as late,
            demo.started(*narrow_command) as narrow,
        ):
            figures = await demo.follow(server.url, direction, facts, late, narrow)
    assert [consumer["name"] for consumer in figures["consumers"]] == ["service", "late", "narrow"]
    assert figures["agree"] is not lacking
    if lacking:
        assert "late: no output" in figures["problems"]
    else:
        assert figures["problems"] == []
        assert [consumer["tokens"] for consumer in figures["consumers"]] == [64, 64, 64]


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"tokens": 0}, False),
        ({"tokens": 199}, False),
        ({"status": "failed"}, False),
        ({"restarts": 0}, False),
        ({"same tokens": False}, False),
    ],
)
def test_two_hosts_went_on_only_if_the_whole_trace_did(change: dict[str, Any], good: bool) -> None:
    went_on = loaded("two_hosts").went_on
    came_to = {"restarts": 1, "same tokens": True, "status": "finished", "tokens": 200}
    assert went_on(came_to | change) is good
