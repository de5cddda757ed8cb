"""A real engine runs approved blocks and declared interventions, and nothing else that it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.engine_process import running_engine
from tracewire import Client, CodeRefused, Probe
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.domain.code_identity import code_hash
from tracewire_bus.transport.embedded import EmbeddedServer

PROMPT = "def parse(text):"


def scaled(x, factor=2.0):
    """A helper of a block."""
    return x * factor


@tracewire.intervention
def approved(model, tracer, live, direction):
    """A block that an operator has read."""
    kept = [].save()
    for _ in tracer.iter[:]:
        kept.append(float(scaled(model.residual(2).output[-1].float() @ direction)))


@tracewire.intervention
def hidden(model, tracer, live):
    """A block that imports what no statement of it shows."""
    found = __import__("os").listdir("/")
    found.save()


@pytest.fixture(scope="module")
async def served(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of an engine that runs two approved blocks."""
    folder = tmp_path_factory.mktemp("code")
    approvals = Approvals(folder / "approved.json")
    for block in (approved(direction=0.0), hidden):
        approvals.add(block.name, code_hash(block.block()), "")
    # Where others can reach the Redis, blocks run so by default.
    options = ("--code", "listed", "--approved", str(approvals.path), "--blocks", "host")
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, folder, *options):
            async with tracewire.connect(server.url) as client:
                yield client


async def test_what_an_approval_covers(served: Client) -> None:
    direction = np.ones(served_width(await served.models.get("demo")), np.float32)
    block = approved(direction=direction)
    async with served.trace("demo", PROMPT, block, max_tokens=3) as trace:
        result = await trace.result()
        assert len(result.saves["kept"]) == 3
        assert (await trace.accepted()).code == [code_hash(block.block())]
    # Another value of an argument is data; another helper, or a default of it, is code.
    sent = block.block()
    helper = msgspec.structs.replace(sent.helpers[0], source=sent.helpers[0].source.replace("2.0", "3.0"))
    assert helper != sent.helpers[0]
    changed = msgspec.structs.replace(sent, helpers=[helper])
    with pytest.raises(CodeRefused, match=r"--code listed.* is not approved"):
        await served.trace("demo", PROMPT, changed, max_tokens=3).result()
    probe = await served.trace("demo", PROMPT, interventions=[Probe("p", "residual(2)")], max_tokens=3).result()
    assert len(probe.saves["p"]) == 3


async def test_the_worker_checks_each_import_as_the_block_runs(served: Client) -> None:
    with pytest.raises(tracewire.TraceFailed, match=r"a block may not import 'os' here \(--code-imports\)"):
        await served.trace("demo", PROMPT, hidden, max_tokens=2).result()


async def test_an_edit_is_under_the_same_policy(served: Client) -> None:
    @tracewire.intervention
    def other(model, tracer, live):
        [].save()

    edits = served.edits("demo")
    with pytest.raises(tracewire.EditRejected, match="--code listed"):
        await edits.install("other", other)
    assert await edits.list() == []


def served_width(model: tracewire.Model) -> int:
    """The hidden size of a model."""
    return model.info.hidden_size
