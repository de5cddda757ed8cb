"""vLLM's second model runner on a CPU, by Triton's interpreter: each feature, and what the first runner comes to.

A step takes ten times as long as on the first runner. So the features are shown by tests that other modules have for
the first runner: one run of pytest, in which all engines use the second one.
"""

# mypy: ignore-errors

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tracewire
from tests.support import ROOT
from tests.support.engine_process import ENVIRONMENT, EngineProcess
from tests.support.parallel.layouts import Served, served
from tests.support.parallel.scenarios import SCENARIOS, same
from tests.support.runners import RUNNER, interpreted

pytestmark = pytest.mark.full

_E2E = "tests/e2e/"

#: By feature, the tests that show it: modules, or single tests of some.
FEATURES = {
    "blocks": ["tracing/test_last_token.py", "tracing/test_infinite.py"],
    "logprobs, structured output and n": ["tracing/test_sampling.py"],
    "declared interventions": ["tracing/test_declared.py"],
    "live steering": ["steering/test_steering.py"],
    "pauses": ["steering/test_pause.py"],
    "edits": ["edits/test_edits.py"],
    "LoRA": ["models/test_lora.py"],
    "preempted KV": ["models/test_preemption.py"],
    "drafts": [
        f"speculation/{name}"
        for name in (
            "test_ngrams.py::test_requests_of_all_kinds_come_to_what_they_do_without_drafts",
            "test_declared.py::test_a_change_while_it_runs_holds_from_the_token_that_the_event_names",
            "test_draft_models.py::test_requests_of_all_kinds_come_to_what_they_do_without_drafts[draft_model]",
            "test_draft_models.py::test_requests_of_all_kinds_come_to_what_they_do_without_drafts[eagle]",
            "test_draft_models.py::test_requests_of_all_kinds_come_to_what_they_do_without_drafts[eagle3]",
        )
    ],
}

#: What is sampled at a temperature: the runners draw other numbers.
DRAWN = {"several_choices"}


@pytest.fixture(scope="module")
async def second(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine on the second runner."""
    folder = tmp_path_factory.mktemp("second")
    async with served(folder, "--model-runner", "second", cores="auto", environment=interpreted()) as engine:
        yield engine


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in DRAWN])
async def test_second_runner_comes_to_what_the_first_does(
    name: str, second: Served, engine: EngineProcess, engine_bus: str
) -> None:
    async with second.client() as client:
        ours = await SCENARIOS[name](client, await client.models.get("demo", timeout=60))
    async with tracewire.connect(engine_bus) as other:
        theirs = await SCENARIOS[name](other, await other.models.get("demo", timeout=60))
    assert not same(theirs, ours)


#: Sampling params beyond what the second runner holds of a request, by the field that is at fault.
BEYOND = {
    "seed": {"seed": 2**63},
    "allowed_token_ids": {"allowed_token_ids": list(range(1200))},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1200), 1.0)},
    "stop_token_ids": {"min_tokens": 2, "stop_token_ids": list(range(200))},
    "bad_words": {"bad_words": [f"word{number}" for number in range(200)]},
}


@pytest.mark.parametrize("field", list(BEYOND))
async def test_sampling_params_beyond_what_the_runner_holds_are_refused(field: str, second: Served) -> None:
    async with second.client() as client:
        with pytest.raises(tracewire.TraceRejected) as caught:
            await client.trace("demo", "hello", max_tokens=4, **BEYOND[field]).result()
        assert caught.value.field == f"sampling.{field}"
        # The engine goes on.
        assert len((await client.trace("demo", "hello", max_tokens=4, ignore_eos=True).result()).token_ids) == 4


@pytest.fixture(scope="module")
def shown(
    starts_engine: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[str]]:
    """By module of the features that this session shows, what became of its tests: "passed", or how one failed."""
    report = tmp_path_factory.mktemp("features") / "report.xml"
    selected = [getattr(one, "callspec", None) for one in request.session.items]
    features = {one.params["feature"] for one in selected if one is not None and "feature" in one.params}
    wanted = [_E2E + path for feature, paths in FEATURES.items() if feature in features for path in paths]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900"]
    log = report.with_suffix(".log")
    with log.open("w") as said:
        running = subprocess.Popen(
            [*command, f"--junitxml={report}", *wanted],
            env={**os.environ, **ENVIRONMENT, **interpreted(), RUNNER: "second"},
            cwd=ROOT,
            stdout=said,
            stderr=said,
        )
        try:
            running.wait()
        finally:
            if running.poll() is None:
                # pytest stops what its tests have started.
                running.send_signal(signal.SIGINT)
                running.wait(120)
    assert report.exists(), log.read_text()[-4000:]
    return outcomes(report)


def outcomes(report: Path) -> dict[str, list[str]]:
    """By module, the outcomes of its tests in a report of pytest's."""
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/").partition("/Test")[0] + ".py"
        bad = [one for one in case if one.tag in ("failure", "error", "skipped")]
        said = f"{case.get('name')}: {bad[0].tag}: {bad[0].get('message', '')[:300]}" if bad else "passed"
        found.setdefault(module.removeprefix(_E2E), []).append(said)
    return found


# The first of these waits for all of them.
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("feature", list(FEATURES))
def test_second_runner_has(feature: str, shown: dict[str, list[str]]) -> None:
    for module in FEATURES[feature]:
        said = shown.get(module.partition("::")[0], [])
        assert said, f"{module} was not run: {sorted(shown)}"
        assert set(said) == {"passed"}


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.usefixtures("starts_engine")
async def test_second_runner_on_several_workers(
    layout: str, tmp_path: Path, engine: EngineProcess, engine_bus: str
) -> None:
    """Reads, edits, declared interventions, edits of samples and live parameters on two workers."""
    options = ("--model-runner", "second", f"--{layout}-parallel-size", "2")
    async with served(tmp_path, *options, environment=interpreted()) as two, two.client() as client:
        model = await client.models.get("demo", timeout=60)
        async with tracewire.connect(engine_bus) as other:
            theirs = await other.models.get("demo", timeout=60)
            for name in ("reads", "edits", "forced_tokens", "declared_edits", "standing", "stops", "live"):
                wanted = await SCENARIOS[name](other, theirs)
                # bfloat16, summed in another order.
                assert not same(wanted, await SCENARIOS[name](client, model), tolerance=0.05), name
