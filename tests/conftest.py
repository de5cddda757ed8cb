"""A private Redis for every test that asks for one, and one real engine, on a Redis of its own, for the session."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support import engine_process
from tests.support.adapter_command import import_ahead
from tests.support.engine_process import (
    BLOB_THRESHOLD,
    SECRET,
    TEMPLATE,
    EngineProcess,
    expect_engines,
    is_asked_for,
    is_worker,
    looked_at_inside,
    started_engine,
)
from tests.support.failed_tasks import none_fails
from tests.support.on_trio import pytest_fixture_setup, pytest_generate_tests, pytest_pycollect_makeitem  # noqa: F401
from tests.support.site import built
from tests.support.spreading import Spreading, check, sort
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

_numbers = count()

_E2E = Path(__file__).parent / "e2e"


def _of_vllm() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


_ENVIRONMENT = _of_vllm()


@pytest.fixture(scope="session")
async def embedded() -> AsyncIterator[str]:
    """URL of an embedded Redis, shared by the session's tests: tell yours apart by prefix or trace ids."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, built once for all tests of it."""
    return built(tmp_path_factory.mktemp("site"))


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"test{next(_numbers)}"


@pytest.fixture
async def bus(embedded: str, prefix: str) -> AsyncIterator[Bus]:
    """A bus of this test's own, on the shared Redis."""
    async with Bus.open(embedded, prefix=prefix) as bus:
        yield bus


@pytest.fixture(scope="session")
def starts_engine() -> None:
    """Each fixture and test that starts a real engine asks for this. The mark `engine` is derived from it."""
    expect_engines()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have the engines of a session run blocks elsewhere than in their workers."""
    parser.addoption(
        "--blocks", choices=("inline", "host"), default="inline", help="where engines under test run blocks"
    )


def pytest_configure(config: pytest.Config) -> None:
    engine_process.blocks_run = config.getoption("--blocks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, so that `make test-engineless` can leave it out, and run tests/e2e/ last.

    The shared engine starts while other tests run. Processes that share the tests have an order of their own.
    """
    for item in items:
        if "starts_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: _E2E in item.path.parents)
    check(items)
    if is_worker():
        sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spreading | None:
    """Have `--dist loadfile` keep together the files of an engine, too."""
    return Spreading(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Have garbage collections leave out what collecting the tests has loaded: each would take a second.

    No module sets vLLM's environment as it is imported: this process and all that its tests start would have it.
    """
    assert _of_vllm() == _ENVIRONMENT
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Have the interpreter's last collection take it all: nanobind complains of what is left then."""
    gc.unfreeze()


@pytest.fixture(scope="session")
async def engine_bus() -> AsyncIterator[str]:
    """URL of the Redis that the shared engine serves."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def starting(starts_engine: None, engine_bus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The shared engine, on its way."""
    # Its Redis takes any password of this user.
    secret = f"{engine_bus}?username=default&password={SECRET}"
    folder = tmp_path_factory.mktemp("engine")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    options = (
        "--check-collect",
        "--block-timeout",
        "3",
        "--blob-threshold",
        str(BLOB_THRESHOLD),
        "--openai",
        "127.0.0.1:0",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--chat-template",
        str(template),
    )
    environment = {"HF_TOKEN": SECRET}
    with started_engine(secret, folder, *options, environment=environment) as engine:
        yield engine


def pytest_runtest_teardown() -> None:
    """Take Inspect's handler off the root logger: it would print the warnings of later tests."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler).__module__.startswith("inspect_ai"):
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_task_fails() -> Iterator[None]:
    """A background task that a mistake of ours has ended fails its test, though the task is restarted."""
    with none_fails():
        yield


@pytest.fixture(scope="session", autouse=True)
def _ahead(request: pytest.FixtureRequest) -> None:
    """What takes long to start, and will be asked for, starts while other tests run.

    None of several workers knows ahead which tests it will run.
    """
    if is_worker():
        return
    if any(hasattr(getattr(item, "module", None), "adapter_command") for item in request.session.items):
        import_ahead()
    if is_asked_for("starting", request.session):
        request.getfixturevalue("starting")


@pytest.fixture(scope="session")
def engine(starting: EngineProcess) -> Iterator[EngineProcess]:
    """The shared engine. Every trace's saves are also collected by nnsight's own collect and compared by digest.

    After the last test, nothing of any request may be left in it.
    """
    starting.wait_ready()
    yield starting
    starting.stop()
    # Whatever the tests did with it.
    said = starting.log.read_text()
    assert "exiting: vLLM holds no request, and all KV blocks are free" in said
    # Nor do libraries complain of anything that is left when its interpreters end.
    assert "nanobind" not in said


@pytest.fixture(scope="session")
def inside(starts_engine: None) -> dict[str, Any]:
    """What is found inside one engine."""
    return looked_at_inside("--reference", "--many", "80")
