"""Keys of two tenants and of an operator, in a keyring of a test, and engines and clients that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio

import tracewire
from tests.support.scripted_engine import ScriptedEngine, info, serving
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Keyring, Signer, new_key
from tracewire_bus.store.proofs import Proofs
from tracewire_engine.adapter.gate import Identity
from tracewire_engine.adapter.service import Adapter

__all__ = ["ENGINE", "PATIENCE", "Identities", "running", "signing_bus"]

PATIENCE = 60
ENGINE = "the-engine"

_RIGHTS = {
    "alice": ("red", ["submit", "code", "read", "steer", "edit"]),
    "ann": ("red", ["submit", "steer"]),
    "bob": ("blue", ["submit", "steer"]),
    "olga": ("ops", ["operate", "steer-any"]),
    "door": ("ops", ["submit", "steer", "delegate"]),
}


class Identities:
    """A keyring: `alice` and `ann` of tenant red, `bob` of blue, the operator `olga`, and `door`, a gateway."""

    #: The engine that serves.
    adapter: Adapter

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ring = Keyring(folder / "keyring.json")
        for id, (tenant, rights) in _RIGHTS.items():
            self.ring.add(new_key(self.path(id), id, tenant, rights))
        new_key(self.path("engine"), "engine", "engines", [])

    def path(self, id: str) -> Path:
        """The key file of a key."""
        return self.folder / f"{id}.key"

    def signer(self, id: str) -> Signer:
        """The signer of a key."""
        return Signer.load(self.path(id))

    @property
    def strict(self) -> Identity:
        """An engine that accepts only what these keys have signed, and signs itself."""
        return Identity(Keyring(self.ring.path), False, "as the test has set it", self.signer("engine"))

    @asynccontextmanager
    async def served(self, bus: Bus, **settings: Any) -> AsyncIterator[Adapter]:
        """A strict engine in this process, which makes a token every 5 ms."""
        engine = ScriptedEngine(partial(anyio.sleep, 0.005))
        with anyio.fail_after(PATIENCE):
            async with serving(bus, engine, info("tiny", engine=ENGINE), **{"identity": self.strict} | settings) as one:
                while not await bus.registry.alive(ENGINE):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                self.adapter = one
                yield one

    def client(self, bus: Bus, id: str = "", **options: Any) -> Any:
        """A client with a key, or without one."""
        key = {"key": self.path(id)} if id else {}
        return tracewire.connect(bus.url, prefix=bus.keys.prefix, **key, **options)


async def running(client: Client, **options: Any) -> tracewire.Trace:
    """A trace with a live parameter that has put out a token and runs on."""
    trace = client.trace("tiny", "valid", live={"alpha": 1.0}, max_tokens=100_000, detach=True, **options)
    await trace.start()
    async for event in trace:
        if event.type == "output":
            return trace
    raise AssertionError("it has ended")


def signing_bus(bus: Bus, signer: Signer | None) -> Bus:
    """Another bus there, which signs. It is to be entered."""
    made = Bus.open(bus.url, prefix=bus.keys.prefix)
    made.proofs = Proofs(signer, prefix=bus.keys.prefix)
    return made
