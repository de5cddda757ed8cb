"""Redis Cluster: `redis+cluster://host:port,host:port`.

All keys of a trace are in one slot, as are all keys of a model's queue. A `ClusterLink` is a `Link` with a connection
to each node: it splits the commands of a call by slot and node, sends them to all nodes at once, and follows slots that
move.

**Order.** Commands on one slot are executed in their order, even while the slot moves: no command overtakes an earlier
one that a node refused. If a later event overtook an earlier one in a stream, Redis would refuse the earlier one, whose
id would then be too small. Several commands on a slot are therefore sent as a transaction, which a node executes
completely or, if a command is not for that node, not at all. Refused commands are retried one by one, each after the
reply to the previous one. Commands on different slots have no order, except those marked `AfterOthers`.

**Failovers.** After a failover another node has a slot: the former replica, which may lack writes that the master had
acknowledged. A writer must detect this before it appends. It calls `prepare`, which connects to the nodes that have the
slots now and increments `opened` for each new connection, and then executes with `stay`: if a slot has moved since, the
link does not follow but closes its connections.

**Migrations.** While the keys of a slot migrate, commands on one key work, by Redis's redirections. A node refuses
commands on several keys, scripts above all, until the migration is over; the link retries them until the call's
timeout. A writer executes without `wait` and retries by itself, so that one slot's migration does not delay the others.
A script that accesses keys that it was not given also declares a key that never exists: Redis then refuses the script
at its start during a migration, not in its middle.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import anyio

from tracewire_bus.wire.pieces import Pieces

from .backoff import Backoff
from .errors import WrongTopology, is_transient
from .link import COMMAND_S, AfterOthers, Link
from .scripts import with_text
from .server import Server
from .urls import Addresses

__all__ = ["Cluster", "ClusterLink"]

logger = logging.getLogger("tracewire")

_PORT: Final = 6379
_SLOTS: Final = 16384
#: The time for one node's reply to CLUSTER SLOTS, in seconds.
_SLOTS_S: Final = 2.0
#: The shortest time between two CLUSTER SLOTS, in seconds.
_REFRESH_S: Final = 0.1
#: How often one command is sent before the caller gets its refusal.
_TRIES: Final = 8

_Address = tuple[str, int]

#: Commands without a key, as far as this package and its tests send them.
_KEYLESS: Final = frozenset(
    (
        *("ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "FLUSHALL", "FLUSHDB", "INFO", "KEYS"),
        *("LATENCY", "PING", "ROLE", "SCAN", "SCRIPT", "TIME"),
    )
)
#: Commands whose key follows a subcommand.
_WITH_SUBCOMMAND: Final = frozenset(("MEMORY", "OBJECT", "XGROUP", "XINFO"))
#: Commands that block; in a transaction they would not.
_BLOCKING: Final = frozenset(("BLPOP", "BRPOP"))


def _key_of(command: Sequence[Any]) -> bytes | None:
    """The first key of a command, or None if it has none."""
    name = str(command[0]).upper()
    key: Any = None
    if name in ("EVAL", "EVALSHA"):
        key = command[3] if int(command[2]) else None
    elif name in ("XREAD", "XREADGROUP"):
        key = command[list(command).index("STREAMS") + 1]
    elif name not in _KEYLESS:
        place = 2 if name in _WITH_SUBCOMMAND else 1
        key = command[place] if len(command) > place else None
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key


class Cluster:
    """The nodes of a cluster, and which of them has each slot, as far as known.

    Args:
        url: a URL with the scheme `redis+cluster` or `rediss+cluster`.
    """

    def __init__(self, url: str) -> None:
        from redis.crc import key_slot

        self._key_slot = key_slot
        self._addresses = Addresses(url, _PORT)
        self._servers: dict[_Address, Server] = {}
        self._owners: list[_Address | None] = [None] * _SLOTS
        self._nodes: list[_Address] = []
        # Whether the map of slots is known to be wrong, and when it was last fetched.
        self._stale = True
        self._refreshed_at = -_REFRESH_S
        self._refreshing = anyio.Lock()
        for address in self._addresses.servers:
            self.server(address)

    def server(self, address: _Address) -> Server:
        """The transport to the node at a host and port."""
        if address not in self._servers:
            self._servers[address] = Server(self._addresses.url(*address))
        return self._servers[address]

    def slot(self, key: str | bytes) -> int:
        """The slot of a key."""
        data = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
        return self._key_slot(data)

    def slot_of(self, command: Sequence[Any]) -> int | None:
        """The slot of a command's first key; `None` if the command has no key."""
        key = _key_of(command)
        return None if key is None else self._key_slot(key)

    def mark_stale(self) -> None:
        """Note that the map of slots is wrong; the next use fetches it again."""
        self._stale = True

    def record_owner(self, slot: int, address: _Address) -> None:
        """Note that a redirection named a slot's new node."""
        self._owners[slot] = address
        self._stale = True

    async def owner(self, slot: int | None) -> _Address:
        """The host and port of the node that has a slot; with `None`, of any node.

        Raises:
            redis.exceptions.ConnectionError: no node answers, or no node has the slot.
            redis.exceptions.ResponseError: a node refuses CLUSTER SLOTS.
            WrongTopology: the URL's servers are not nodes of a cluster.
        """
        from redis.exceptions import ConnectionError

        if self._stale:
            await self._refresh()
        owner = random.choice(self._nodes) if slot is None else self._owners[slot]
        if owner is None:
            self._stale = True
            raise ConnectionError(f"slot {slot} is on no node of the cluster")
        return owner

    async def _refresh(self) -> None:
        from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, ResponseError

        async with self._refreshing:
            if not self._stale or (self._nodes and anyio.current_time() < self._refreshed_at + _REFRESH_S):
                return
            problems: list[str] = []
            nodes = list({*self._nodes, *self._addresses.servers})
            random.shuffle(nodes)
            for address in nodes:
                link = Link(self.server(address))
                try:
                    with anyio.fail_after(_SLOTS_S):
                        (reply,) = await link.execute(("CLUSTER", "SLOTS"))
                except (AuthenticationError, AuthorizationError):
                    raise
                except (ConnectionError, TimeoutError, OSError) as error:
                    problems.append(f"{address[0]}:{address[1]}: {str(error) or type(error).__name__}")
                    continue
                finally:
                    await link.drop()
                if isinstance(reply, ResponseError):
                    if "cluster support disabled" in str(reply):
                        raise WrongTopology(
                            f"{address[0]}:{address[1]} is not a node of a cluster: use a URL with redis://"
                        )
                    raise reply
                if not reply:
                    problems.append(f"{address[0]}:{address[1]}: it knows of no slots")
                    continue
                self._refreshed_at = anyio.current_time()
                self._stale = False
                self._set_owners(reply, address[0])
                return
            raise ConnectionError(f"no node of the cluster answers: {'; '.join(problems)}")

    def _set_owners(self, ranges: Sequence[Any], asked: str) -> None:
        owners: list[_Address | None] = [None] * _SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # A node that does not know its own name reports none: use the name by which it was reached.
            name = host.decode() if host and host != b"?" else asked
            owners[first : last + 1] = [(name, port)] * (last + 1 - first)
        self._owners = owners
        self._nodes = list({owner for owner in owners if owner is not None})


class _Node(Link):
    """A connection to one node, with the digests of the scripts that the node has cached."""

    def __init__(self, server: Server, address: _Address, link: ClusterLink) -> None:
        super().__init__(server)
        self.address = address
        self.known_scripts: set[str] = set()
        self._link = link

    async def connect(self) -> None:
        """As `Link.connect`; counts new connections in the cluster link's `opened`, too."""
        opened = self.opened
        await super().connect()
        self._link.opened += self.opened - opened

    async def drop(self) -> None:
        """As `Link.drop`. The next connection to this address may reach a server with other scripts cached."""
        self.known_scripts.clear()
        await super().drop()

    def with_script_texts(self, commands: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Replace digests by texts in the commands of scripts that the node may not have cached."""
        prepared: list[Sequence[Any]] = []
        told: set[str] = set()
        for command in commands:
            if command[0] == "EVALSHA" and command[1] not in self.known_scripts and command[1] not in told:
                told.add(command[1])
                command = with_text(command) or command
            prepared.append(command)
        return prepared

    def add_known_scripts(self, commands: Sequence[Sequence[Any]]) -> None:
        """Note that the node executed these commands, and so has cached their scripts."""
        self.known_scripts.update(command[1] for command in commands if command[0] == "EVALSHA")


class _SlotBatch:
    """The commands of one slot in a call, in order.

    Attributes:
        slot: the slot; `None` for commands without a key.
        commands: the commands.
        replies: the replies to the first of them: those that were executed or finally refused.
        sent_to: the node to which they were sent first.
    """

    def __init__(self, slot: int | None) -> None:
        self.slot = slot
        self.commands: list[Sequence[Any]] = []
        self.replies: list[Any] = []
        self.sent_to: _Address | None = None

    @property
    def remaining(self) -> list[Sequence[Any]]:
        """The commands without a reply yet."""
        return self.commands[len(self.replies) :]

    @property
    def atomic(self) -> bool:
        """Whether the remaining commands are sent as a transaction."""
        return len(self.remaining) > 1 and not any(
            command[0] in _BLOCKING or (command[0] == "XREAD" and "BLOCK" in command) for command in self.remaining
        )


class ClusterLink(Link):
    """A link with a connection to each node that its commands need. Not for concurrent use.

    Args:
        cluster: the cluster.
        near: for a link that blocks, a key. The link then connects only to the node that has the key, and follows no
            redirection: a slot that has moved raises `ConnectionError`, one that migrates gives `TryAgainError`.
    """

    def __init__(self, cluster: Cluster, near: str = "") -> None:
        self._cluster = cluster
        self._near = cluster.slot(near) if near else None
        self._nodes: dict[_Address, _Node] = {}
        # How many connections were opened, to all nodes together.
        self.opened = 0
        # `stay` and `wait` of the call under way; see `Link.execute`.
        self._stay, self._wait = False, True

    @property
    def connected(self) -> bool:
        """Whether the link has a connection to any node."""
        return any(node.connected for node in self._nodes.values())

    async def connect(self) -> None:
        """Connect to one node if the link is connected to none.

        Raises:
            redis.exceptions.RedisError: the connection could not be opened.
        """
        if not self.connected:
            await self._node(await self._cluster.owner(self._near)).connect()

    async def drop(self) -> None:
        """Close all connections at once. The next calls open new ones."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.drop()

    def _node(self, address: _Address) -> _Node:
        if address not in self._nodes:
            self._nodes[address] = _Node(self._cluster.server(address), address, self)
        return self._nodes[address]

    async def prepare(self, *commands: Sequence[Any]) -> None:
        """Connect to the nodes that have the slots of `commands`.

        Raises:
            redis.exceptions.RedisError: a connection could not be opened.
        """
        for slot in {self._cluster.slot_of(command) for command in commands} - {None}:
            await self._node(await self._cluster.owner(slot)).connect()

    async def execute(
        self,
        *commands: Sequence[Any],
        timeout_s: float = COMMAND_S,
        stay: bool = False,
        wait: bool = True,
        packed: bytes | Pieces | None = None,
    ) -> list[Any]:
        """Execute commands on the nodes that have their slots; see `Link.execute`.

        Commands on one slot are executed in this order. The `AfterOthers` are executed after all other commands; if a
        node temporarily refused one of the others, they are not executed, and have its error as their reply.

        Args:
            commands: the commands, each as a sequence of its name and arguments.
            timeout_s: the time for all replies, in seconds.
            stay: only send to nodes with an open connection, and to nodes to which these migrate a slot; raise a
                `ConnectionError` if a slot has moved.
            wait: retry commands that a slot's migration blocks. Otherwise their reply is a `TryAgainError`.
            packed: ignored, since the commands are split by node.

        Returns:
            the raw reply to each command; for a command that Redis refused, its `ResponseError`.

        Raises:
            redis.exceptions.RedisError: a connection failed. The nodes may have executed some of the commands.
            TimeoutError: replies did not arrive in time. The nodes may have executed some of the commands.
        """
        replies: list[Any] = [None] * len(commands)
        waves = [
            [place for place, one in enumerate(commands) if isinstance(one, AfterOthers) is late]
            for late in (False, True)
        ]
        self._stay, self._wait = stay, wait
        try:
            with anyio.fail_after(timeout_s):
                for places in filter(None, waves):
                    refused = [reply for reply in replies if isinstance(reply, Exception) and is_transient(reply)]
                    if refused:
                        for place in places:
                            replies[place] = refused[0]
                    else:
                        await self._execute_all(commands, places, replies, timeout_s)
        except BaseException:
            # As in `Link.exchange`, the next call must not read the replies to this one.
            self._cluster.mark_stale()
            await self.drop()
            raise
        finally:
            self._stay, self._wait = False, True
        return replies

    async def _connect(self, node: _Node) -> None:
        """Connect to a node that has a slot; raises `ConnectionError` if that needs a new connection during `stay`."""
        from redis.exceptions import ConnectionError

        if self._stay and not node.connected:
            raise ConnectionError("a slot has moved to another node")
        await node.connect()

    async def execute_on_node_of(self, other: Link, *commands: Sequence[Any]) -> list[Any]:
        """Execute commands on the node to which `other` is connected; see `Link.execute_on_node_of`."""
        assert isinstance(other, ClusterLink)
        address = next((node.address for node in other._nodes.values() if node.connected), None)
        if address is None:
            return [None] * len(commands)
        try:
            return await self._node(address).execute(*commands)
        except BaseException:
            await self.drop()
            raise

    async def _execute_all(
        self, commands: Sequence[Sequence[Any]], places: Sequence[int], replies: list[Any], timeout_s: float
    ) -> None:
        from redis.exceptions import NoScriptError

        slots = [self._cluster.slot_of(commands[place]) for place in places]
        first = self._near if self._near is not None else next((slot for slot in slots if slot is not None), None)
        batches: dict[int | None, _SlotBatch] = {}
        of: dict[int | None, list[int]] = {}
        for place, slot in zip(places, slots, strict=True):
            batches.setdefault(slot, _SlotBatch(slot)).commands.append(commands[place])
            of.setdefault(slot, []).append(place)
        nodes: dict[_Address, list[_SlotBatch]] = {}
        for slot, batch in batches.items():
            # Commands without a key go to the node of the first key: TIME, for example, must be that node's.
            nodes.setdefault(await self._address_of(first if slot is None else slot), []).append(batch)
        await _run_all([partial(self._send, address, there, timeout_s) for address, there in nodes.items()])
        for batch in batches.values():
            if batch.remaining:
                await self._retry_refused(batch, timeout_s)
            for number, reply in enumerate(batch.replies):
                if isinstance(reply, NoScriptError):
                    # The node's script cache was flushed since.
                    batch.replies[number] = await self._execute_one(batch.slot, batch.commands[number], timeout_s)
        for slot, batch in batches.items():
            for place, reply in zip(of[slot], batch.replies, strict=True):
                replies[place] = reply

    async def _address_of(self, slot: int | None) -> _Address:
        if self._near is not None:
            for node in self._nodes.values():
                if node.connected:
                    return node.address
        return await self._cluster.owner(slot)

    async def _send(self, address: _Address, batches: Sequence[_SlotBatch], timeout_s: float) -> None:
        """Send the batches of several slots to one node in one round trip.

        Adds to each batch the replies to its commands, up to the first one that the node did not execute.
        """
        from redis.exceptions import NoScriptError

        node = self._node(address)
        # First connect: a new connection clears `known_scripts`.
        await self._connect(node)
        sent: list[Sequence[Any]] = []
        spans: list[tuple[_SlotBatch, int, int, bool]] = []
        for batch in batches:
            begin, whole = len(sent), batch.atomic
            batch.sent_to = address
            prepared = node.with_script_texts(batch.remaining)
            sent += [("MULTI",), *prepared, ("EXEC",)] if whole else prepared
            spans.append((batch, begin, len(sent), whole))
        raw = await node.exchange(sent, timeout_s)
        for batch, begin, end, whole in spans:
            replies = raw[begin:end]
            self._note_redirections(batch.slot, replies, address)
            if whole:
                if not isinstance(replies[-1], list):
                    continue
                replies = replies[-1]
                if any(isinstance(reply, NoScriptError) for reply in replies):
                    node.known_scripts.clear()
            else:
                refused = [place for place, reply in enumerate(replies) if _is_redirection(reply)]
                replies = replies[: refused[0]] if refused else replies
            node.add_known_scripts(batch.remaining[: len(replies)])
            batch.replies += replies

    def _note_redirections(self, slot: int | None, replies: Sequence[Any], asked: _Address) -> None:
        from redis.exceptions import ClusterDownError, ConnectionError, MovedError

        for reply in replies:
            if isinstance(reply, MovedError) and slot is not None:
                self._cluster.record_owner(slot, _redirection_target(reply, asked))
                if self._stay:
                    raise ConnectionError(f"slot {slot} has moved to another node")
                return
            if isinstance(reply, ClusterDownError):
                self._cluster.mark_stale()

    async def _retry_refused(self, batch: _SlotBatch, timeout_s: float) -> None:
        """Execute the remaining commands of a batch: as a transaction on the slot's new node, else one by one."""
        from redis.exceptions import ClusterDownError, ConnectionError, TryAgainError

        tries = _TRIES
        if self._near is not None:
            # This link's only connection goes to the node that refused; the caller reconnects.
            tries = 1
        elif batch.atomic and (owner := await self._cluster.owner(batch.slot)) != batch.sent_to:
            await self._send(owner, [batch], timeout_s)
        while batch.remaining:
            reply = await self._execute_one(batch.slot, batch.remaining[0], timeout_s, tries)
            if isinstance(reply, ConnectionError):
                raise reply
            # Later commands must not be executed before this one: they get the same reply.
            refused = isinstance(reply, (TryAgainError, ClusterDownError))
            batch.replies += [reply] * len(batch.remaining) if refused else [reply]

    async def _execute_one(
        self, slot: int | None, command: Sequence[Any], timeout_s: float, tries: int = _TRIES
    ) -> Any:
        """Execute one command, following redirections of its slot and its key.

        Returns the reply. A `TryAgainError` (the slot migrates) or a `ClusterDownError` (no node has it) as the reply
        means that the command was not executed.
        """
        from redis.exceptions import (
            AskError,
            ClusterDownError,
            ConnectionError,
            MovedError,
            NoScriptError,
            TryAgainError,
        )

        backoff = Backoff(0.01, 0.2)
        reply: Any = None
        elsewhere: _Address | None = None
        for _ in range(tries):
            address = elsewhere or await self._address_of(slot)
            node = self._node(address)
            await (node.connect() if elsewhere else self._connect(node))
            asking = [("ASKING",)] if elsewhere else []
            *_, reply = await node.exchange([*asking, *node.with_script_texts([command])], timeout_s)
            elsewhere = None
            self._note_redirections(slot, [reply], address)
            if isinstance(reply, NoScriptError):
                node.known_scripts.clear()
            elif isinstance(reply, MovedError):
                if self._near is not None:
                    return ConnectionError(f"slot {slot} has moved")
            elif isinstance(reply, AskError):
                elsewhere = _redirection_target(reply, address)
            elif isinstance(reply, TryAgainError) and not self._wait:
                break
            elif isinstance(reply, (TryAgainError, ClusterDownError)):
                await anyio.sleep(backoff.next())
            else:
                node.add_known_scripts([command])
                return reply
        if isinstance(reply, ClusterDownError):
            return ClusterDownError(f"no node has slot {slot} for now: {reply}")
        return TryAgainError(f"slot {slot} is being moved: {reply}")


def _is_redirection(reply: Any) -> bool:
    """Whether a reply says that the node did not execute a command, and that a retry or another node may."""
    from redis.exceptions import AskError, ClusterDownError, NoScriptError, TryAgainError

    return isinstance(reply, (AskError, ClusterDownError, NoScriptError, TryAgainError))


def _redirection_target(error: Any, asked: _Address) -> _Address:
    """The host and port that a redirection names; without a host, that of the node that sent it."""
    return error.host or asked[0], error.port


async def _run_all(jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run all jobs concurrently; when all have ended, raise the error of the first that failed."""
    if len(jobs) == 1:
        await jobs[0]()
        return
    failures: list[Exception] = []

    async def carry_out(job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(carry_out, job)
    if failures:
        raise failures[0]
