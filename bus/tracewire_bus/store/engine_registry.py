"""The registry of engines: an `EngineInfo` for each, under keys that expire unless the engine renews them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

import anyio
import msgspec

from tracewire_bus.domain.limit_table import DEFAULTS
from tracewire_bus.transport.errors import BusFull, BusUnavailable, NotAllowed
from tracewire_bus.transport.link import AfterOthers, Link, ask_once
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script, assemble
from tracewire_bus.wire.codec import decode_engine, digest_bytes, encode
from tracewire_bus.wire.messages import EngineInfo

from .access import all_scripts
from .control import drain_command
from .keys import Keys
from .leases import RENEW
from .proofs import Proofs, drain_content
from .trace_records import CONTROL_S

__all__ = ["EngineRegistry"]

logger = logging.getLogger("tracewire")

_JOIN: Final = Script("registry_join")


class EngineRegistry:
    """The engines of a bus."""

    def __init__(self, connections: Connections, keys: Keys, proofs: Proofs | None = None) -> None:
        self._connections = connections
        self._keys = keys
        self._proofs = proofs or Proofs()
        #: For each engine of this process, the digest of its last full registration without the changing numbers.
        self._registered: dict[str, bytes] = {}
        #: For each digest of a module tree, an engine's full registration, for the fields that heartbeats leave out.
        self._trees: dict[bytes, EngineInfo] = {}
        #: Whether this user may load scripts, as far as is known.
        self._loads = True

    async def register(self, info: EngineInfo, ttl_s: float = 5.0, link: Link | None = None) -> None:
        """Register an engine for `ttl_s` seconds. The engine calls this again before they have passed.

        The first call writes the whole entry. Later calls write a heartbeat, which lacks the model's module tree and
        configuration: these are large and do not change. A call over a `link` is tried once and not repeated.

        Raises:
            BusUnavailable: Redis does not answer; with a `link`, at the first try.
        """
        await self._keep_scripts(link)
        key, milliseconds = self._keys.engine(info.engine), max(1, round(ttl_s * 1000))
        brief = msgspec.structs.replace(
            info, modules=[], attributes={}, sources={}, config={}, attention=[], tree=_tree_digest(info)
        )
        changing: dict[str, Any] = {
            "running": 0,
            "malformed": 0,
            "waiting_bytes": 0,
            "edit_failures": {},
            "limits_reached": {},
        }
        lasting = digest_bytes(encode(msgspec.structs.replace(brief, **changing)))
        heartbeat = [
            RENEW((self._keys.heartbeat(info.engine),), encode(brief), milliseconds),
            # A process that finds a member of the set without an entry removes the member.
            AfterOthers(_JOIN((self._keys.engines(),), info.engine)),
        ]
        if self._registered.get(info.engine) == lasting:
            # Clients of earlier versions read the full entry, of which only the changing numbers are out of date.
            with suppress(NotAllowed):
                there, *_ = await self._ask(link, ("PEXPIRE", key, milliseconds), *heartbeat)
                if there:
                    return
        # Before clients find the engine, so that they queue nothing beyond its limits.
        with suppress(BusFull):
            # A Redis without memory queues nothing anyway.
            await self._ask(link, _queue_limits(self._keys, info), refuse_full=True)
        await self._ask(link, RENEW((key,), encode(info), milliseconds), *heartbeat)
        self._registered[info.engine] = lasting

    async def _ask(self, link: Link | None, *commands: Sequence[Any], refuse_full: bool = False) -> list[Any]:
        """The replies to commands over a link, or else over the shared connections."""
        if link is None:
            return await self._connections.commands(*commands, refuse_full=refuse_full)
        try:
            return await ask_once(link, *commands)
        except (BusUnavailable, anyio.get_cancelled_exc_class()):
            # A caller that gives up has had no answer in its time.
            self._connections.note_outage()
            raise

    async def load_scripts(self, link: Link | None = None) -> bool:
        """Load all scripts into Redis, for users who may only run them. Returns whether any was missing.

        A call over a `link` is tried once and not repeated. On a cluster, clients send the text of scripts.

        Raises:
            NotAllowed: this user may load no scripts.
            BusUnavailable: Redis does not answer.
        """
        if self._connections.clustered:
            return False
        scripts = _scripts()
        (there,) = await self._ask(link, ("SCRIPT", "EXISTS", *scripts))
        missing = [text for text, known in zip(scripts.values(), there, strict=True) if not known]
        if missing:
            await self._ask(link, *(("SCRIPT", "LOAD", text) for text in missing))
        return bool(missing)

    async def _keep_scripts(self, link: Link | None) -> None:
        """Load the scripts if Redis has lost them, as after a restart or a failover. An older user may not."""
        if not self._loads:
            return
        try:
            await self.load_scripts(link)
        except NotAllowed as error:
            self._loads = False
            logger.info("users who may only run scripts cannot use this Redis: %s", error)

    async def unregister(self, engine: str) -> None:
        """Remove an engine from the registry.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        self._registered.pop(engine, None)
        await self._connections.commands(
            ("DEL", self._keys.engine(engine)),
            ("DEL", self._keys.heartbeat(engine)),
            ("SREM", self._keys.engines(), engine),
        )

    async def drain(self, engine: str, *, by: str, within_s: float | None = None) -> None:
        """Ask an engine to take no more submissions, to finish its traces, and to exit.

        With `within_s`, the engine puts the traces that still run after that time, in seconds, back onto the queue. The
        call may be repeated; the earliest of several limits counts. Without such an engine, the call has no effect.

        Raises:
            BusUnavailable: Redis does not answer; the engine may have been asked.
        """
        proof = self._proofs.order("drain", engine, drain_content(by, within_s))
        await self._connections.command(*drain_command(self._keys, engine, by, within_s, CONTROL_S, proof))

    async def list(self) -> list[EngineInfo]:
        """The registered engines, sorted by model, then by start time.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._keys.engines()
        members = await self._connections.command("SMEMBERS", key)
        names = [
            name for one in members if (name := self._connections.guard.read(bytes.decode, one, key=key, entry=one))
        ]
        briefs = await self._infos(names, self._keys.heartbeat)
        # Engines of earlier versions have no heartbeat key.
        others = [name for name in names if name not in briefs]
        found = await self._infos(others, self._keys.engine)
        for name in others:
            if name not in found:
                # It has expired. If the engine registers at this moment, its next heartbeat adds it again.
                with suppress(NotAllowed):
                    await self._connections.command("SREM", self._keys.engines(), name)
        infos = [info for info in found.values() if info is not None]
        infos += await self._with_trees([info for info in briefs.values() if info is not None])
        return sorted(infos, key=lambda info: (info.model, info.started_at, info.engine))

    async def alive(self, *engines: str) -> set[str]:
        """Those of these engines whose registry entries have not expired.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if not engines:
            return set()
        found = await self._connections.commands(*(("EXISTS", self._keys.engine(engine)) for engine in engines))
        return {engine for engine, there in zip(engines, found, strict=True) if there}

    async def _infos(self, names: Sequence[str], key: Callable[[str], str]) -> dict[str, EngineInfo | None]:
        """The entries under these engines' keys, by name. A missing entry is left out; an unreadable one is None."""
        if not names:
            return {}
        infos: dict[str, EngineInfo | None] = {}
        replies = await self._connections.commands(*(("GET", key(name)) for name in names), unbatched=True)
        for name, data in zip(names, replies, strict=True):
            if data is not None:
                infos[name] = self._connections.guard.read(_info, name, data, key=key(name))
        return infos

    async def _with_trees(self, briefs: Sequence[EngineInfo]) -> Sequence[EngineInfo]:
        """Heartbeats with the fields that they leave out. Fetches these once for each module tree, from any engine."""
        self._trees = {info.tree: self._trees[info.tree] for info in briefs if info.tree in self._trees}
        lacking: dict[bytes, list[str]] = {}
        for info in briefs:
            if info.tree not in self._trees:
                lacking.setdefault(info.tree, []).append(info.engine)
        while lacking:
            # If that engine's entry has expired meanwhile, the loop asks the next engine with the same tree.
            asked = {names.pop(): tree for tree, names in lacking.items()}
            for found in (await self._infos(list(asked), self._keys.engine)).values():
                if found is not None:
                    self._trees[_tree_digest(found)] = found
            lacking = {tree: names for tree, names in lacking.items() if names and tree not in self._trees}
        whole = []
        for info in briefs:
            if info.tree in self._trees:
                known = self._trees[info.tree]
                whole.append(
                    msgspec.structs.replace(
                        info,
                        modules=known.modules,
                        attributes=known.attributes,
                        sources=known.sources,
                        config=known.config,
                        attention=known.attention,
                        tree=b"",
                    )
                )
        return whole


def _info(name: str, data: bytes) -> EngineInfo:
    info = decode_engine(data)
    if info.engine != name:
        raise ValueError(f"the entry names engine {info.engine[:80]!r}")
    return info


def _tree_digest(info: EngineInfo) -> bytes:
    tree = EngineInfo(engine="", model="", modules=info.modules, attributes=info.attributes, sources=info.sources)
    return digest_bytes(encode(tree))


@cache
def _scripts() -> dict[str, str]:
    """The text of each script, by its digest."""
    return {Script(name).digest: assemble(name) for name in all_scripts()}


def _queue_limits(keys: Keys, info: EngineInfo) -> tuple[Any, ...]:
    """The command that publishes an engine's limits on its model's queue, for the script that queues submissions."""
    limits = info.limits
    return (
        *("HSET", keys.queue(info.model, "state"), "limit", info.queue_limit),
        *("client-limit", limits.get("client_waiting", 0)),
        *("bytes", limits.get("submission_bytes", DEFAULTS.submission_bytes)),
    )
