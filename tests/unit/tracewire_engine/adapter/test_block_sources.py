"""Sources of blocks are examined before they run, long ones in another process."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import info
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.messages import Block, Invoke, Submission
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter import block_sources as sources
from tracewire_engine.adapter.block_sources import Sources

PATIENCE = 60


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("path", ["model.layer", "model.layers[99]"])
async def test_a_block_with_a_path_that_there_is_not_is_refused_whoever_sent_it(
    client: Client, bus: Bus, embedded: str, prefix: str, path: str
) -> None:
    """Past all checks of a client's."""
    block = Block(
        name="reads",
        source=f"x = model.{path}.output",
        filename="of_somebody.py",
        first_line=7,
        variables=pack({}),
    )
    submission = Submission(trace="t", model="tiny", invokes=[Invoke(prompt="p", sampling={})], block=block)

    class Ending(PlayedEngine):
        async def start(self, request: str, *rest: Any) -> Any:
            outputs = await super().start(request, *rest)
            self.finish(request)
            return outputs

    engine = Ending()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine):
            await bus.submit(submission)
            (final,) = [event async for event in client.subscribe("t")]
    assert final.status == "rejected"
    assert final.error.type == "UnknownModulePath"
    assert final.error.line == 7
    assert engine.requests == {}


async def test_a_long_source_is_looked_at_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python compiles without letting the event loop run."""
    described = info()
    looked = Sources(described, ModuleTree(described))
    here: list[str] = []
    examine = sources._examine

    def noted(tree: ModuleTree, source: str, names: tuple[str, ...]) -> Any:
        here.append(source)
        return examine(tree, source, names)

    monkeypatch.setattr(sources, "_examine", noted)
    assert await looked.examine("pass", ("model",)) == (None, None, ())
    assert here == ["pass"]
    long = "x = 1\n" * 5000
    assert (await looked.examine(long + "model.wrong", ("model",))).problem.path == "wrong"  # type: ignore[union-attr]
    assert (await looked.examine(long + "(", ("model",))).error[0] == "SyntaxError"  # type: ignore[index]
    slow = await looked.examine("(lambda:0)\n" * 9000, ())
    assert slow.error is not None
    assert "to compile; 0.25 s are allowed" in slow.error[2]
    assert here == ["pass"]
