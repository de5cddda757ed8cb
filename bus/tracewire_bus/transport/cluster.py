"""Redis Cluster: `redis+cluster://host:port,host:port`.

All keys of a trace share a slot, and so do all of a model's queue. A `ClusterLink`
does what a link does, over a connection to each node: it divides the commands of a call by slot and node, sends to all
nodes at once, and follows slots that move.

**Order.** Commands of one slot are carried out in their order, whatever the slot does meanwhile: what is refused is
never overtaken by what was sent behind it. An event that a later one overtakes would be lost, for its id would be too
small then. Several commands of a slot therefore go as a transaction, which a node carries out as a whole or, when one
of them is not its own to carry out, not at all. What was refused goes on one by one, each after the last one's reply.
Across slots there is no order, but for commands marked `AfterOthers`.

**Replaced nodes.** Another node may have a slot since a link last asked there: its replica, which may lack what the
node had acknowledged. A writer must know before it appends. It *prepares* for its commands, which connects to the nodes
that have the slots now and so counts as opening (`opened`), and then asks to *stay*: a link that is told by then that a
slot is elsewhere does not follow, but breaks its connections.

**Moves.** While the keys of a slot are being moved, commands on one key work, by Redis's redirections. Those on several
keys, scripts above all, are refused until the move is over, and are tried again for as long as whoever asks is patient.
A writer asks again itself, so that what is refused of one slot keeps nothing of the others waiting.
A script that makes up keys declares one that never exists besides: Redis then refuses it before it begins, instead of
in its middle.
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
#: How long one node may take to say where the slots are, in seconds.
_ASK_S: Final = 2.0
#: The slots are not asked for again sooner than this, in seconds.
_AGAIN_S: Final = 0.1
#: How often one command is sent before its refusal is its caller's matter.
_TRIES: Final = 8

_Address = tuple[str, int]

#: Commands without a key, of those that anybody here would send.
_KEYLESS: Final = frozenset(
    (
        *("ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "FLUSHALL", "FLUSHDB", "INFO", "KEYS"),
        *("LATENCY", "PING", "ROLE", "SCAN", "SCRIPT", "TIME"),
    )
)
#: Commands whose key stands behind a subcommand.
_SECOND: Final = frozenset(("MEMORY", "OBJECT", "XGROUP", "XINFO"))
#: Commands that wait, which they would not do in a transaction.
_BLOCKING: Final = frozenset(("BLPOP", "BRPOP"))


def _key_of(command: Sequence[Any]) -> bytes | None:
    """The first key of a command."""
    name = str(command[0]).upper()
    key: Any = None
    if name in ("EVAL", "EVALSHA"):
        key = command[3] if int(command[2]) else None
    elif name in ("XREAD", "XREADGROUP"):
        key = command[list(command).index("STREAMS") + 1]
    elif name not in _KEYLESS:
        place = 2 if name in _SECOND else 1
        key = command[place] if len(command) > place else None
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key


class Cluster:
    """Which node each slot lies on, as far as is known. Its URL begins with `redis+cluster` or `rediss+cluster`."""

    def __init__(self, url: str) -> None:
        from redis.crc import key_slot

        self._key_slot = key_slot
        self._addresses = Addresses(url, _PORT)
        self._servers: dict[_Address, Server] = {}
        self._owners: list[_Address | None] = [None] * _SLOTS
        self._nodes: list[_Address] = []
        #: Whether it is known to be wrong somewhere; and when it was last asked for.
        self._stale = True
        self._asked = -_AGAIN_S
        self._asking = anyio.Lock()
        for address in self._addresses.servers:
            self.server(address)

    def server(self, address: _Address) -> Server:
        """The node at an address. A node that is not known yet is added."""
        if address not in self._servers:
            self._servers[address] = Server(self._addresses.url(*address))
        return self._servers[address]

    def slot(self, key: str | bytes) -> int:
        """The slot of a key."""
        data = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
        return self._key_slot(data)

    def slot_of(self, command: Sequence[Any]) -> int | None:
        """The slot of a command's first key."""
        key = _key_of(command)
        return None if key is None else self._key_slot(key)

    def doubt(self) -> None:
        """Something was not as it is known: ask again before the next use."""
        self._stale = True

    def moved(self, slot: int, address: _Address) -> None:
        """A node says who has a slot now."""
        self._owners[slot] = address
        self._stale = True

    async def owner(self, slot: int | None) -> _Address:
        """The node of a slot, or any.

        Raises:
            redis.exceptions.ConnectionError: no node answers, or the slot is nobody's.
            BusError: these are no nodes of a cluster, or we may not ask.
        """
        from redis.exceptions import ConnectionError

        if self._stale:
            await self._learn()
        owner = random.choice(self._nodes) if slot is None else self._owners[slot]
        if owner is None:
            self._stale = True
            raise ConnectionError(f"slot {slot} is on no node of the cluster")
        return owner

    async def _learn(self) -> None:
        from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, ResponseError

        async with self._asking:
            if not self._stale or (self._nodes and anyio.current_time() < self._asked + _AGAIN_S):
                return
            problems: list[str] = []
            nodes = list({*self._nodes, *self._addresses.servers})
            random.shuffle(nodes)
            for address in nodes:
                link = Link(self.server(address))
                try:
                    with anyio.fail_after(_ASK_S):
                        (reply,) = await link.ask(("CLUSTER", "SLOTS"))
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
                            f"{address[0]}:{address[1]} is no node of a cluster: its URL begins with redis://"
                        )
                    raise reply
                if not reply:
                    problems.append(f"{address[0]}:{address[1]}: it knows of no slots")
                    continue
                self._asked = anyio.current_time()
                self._stale = False
                self._take(reply, address[0])
                return
            raise ConnectionError(f"no node of the cluster answers: {'; '.join(problems)}")

    def _take(self, ranges: Sequence[Any], asked: str) -> None:
        owners: list[_Address | None] = [None] * _SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # A server that does not know its own host names none. It is the host that this client asked.
            name = host.decode() if host and host != b"?" else asked
            owners[first : last + 1] = [(name, port)] * (last + 1 - first)
        self._owners = owners
        self._nodes = list({owner for owner in owners if owner is not None})


class _Node(Link):
    """A connection to one node, which remembers what scripts the node knows."""

    def __init__(self, server: Server, address: _Address, link: ClusterLink) -> None:
        super().__init__(server)
        self.address = address
        self.known: set[str] = set()
        self._of = link

    async def connect(self) -> None:
        """Connect if it is not."""
        opened = self.opened
        await super().connect()
        self._of.opened += self.opened - opened

    async def drop(self) -> None:
        """Close it. Behind the same address there may be another server the next time."""
        self.known.clear()
        await super().drop()

    def phrased(self, commands: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """`commands`, in which a script comes with its text where the node may not know it."""
        phrased: list[Sequence[Any]] = []
        told: set[str] = set()
        for command in commands:
            if command[0] == "EVALSHA" and command[1] not in self.known and command[1] not in told:
                told.add(command[1])
                command = with_text(command) or command
            phrased.append(command)
        return phrased

    def learned(self, commands: Sequence[Sequence[Any]]) -> None:
        """These were carried out."""
        self.known.update(command[1] for command in commands if command[0] == "EVALSHA")


class _Bundle:
    """The commands of one slot in a call, in order; and what came of them."""

    def __init__(self, slot: int | None) -> None:
        self.slot = slot
        self.commands: list[Sequence[Any]] = []
        self.replies: list[Any] = []
        #: Where it was sent.
        self.asked: _Address | None = None

    @property
    def left(self) -> list[Sequence[Any]]:
        """What was not carried out yet."""
        return self.commands[len(self.replies) :]

    @property
    def whole(self) -> bool:
        """Whether it goes as a transaction."""
        return len(self.left) > 1 and not any(
            command[0] in _BLOCKING or (command[0] == "XREAD" and "BLOCK" in command) for command in self.left
        )


class ClusterLink(Link):
    """A connection to each node that its commands go to. Not for concurrent use.

    One that is `near` a key keeps to one node, that key's when it connects, and follows nothing: it says that the slot
    has moved as a broken connection, or that it is about to as `TryAgainError`.
    """

    def __init__(self, cluster: Cluster, near: str = "") -> None:
        self._cluster = cluster
        self._near = cluster.slot(near) if near else None
        self._nodes: dict[_Address, _Node] = {}
        #: How often a connection was opened, to whichever node.
        self.opened = 0
        #: Whether it goes nowhere where it is not connected; whether it tries again what a move does not let through.
        self._stays, self._waits = False, True

    @property
    def connected(self) -> bool:
        """Whether it has a connection to any node."""
        return any(node.connected for node in self._nodes.values())

    async def connect(self) -> None:
        """Connect to a node, if it is not.

        Raises:
            redis.exceptions.RedisError: it could not.
        """
        if not self.connected:
            await self._node(await self._cluster.owner(self._near)).connect()

    async def drop(self) -> None:
        """Close all connections at once. The next use opens them anew."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.drop()

    def _node(self, address: _Address) -> _Node:
        if address not in self._nodes:
            self._nodes[address] = _Node(self._cluster.server(address), address, self)
        return self._nodes[address]

    async def prepare(self, *commands: Sequence[Any]) -> None:
        """Connect to the nodes that `commands` go to.

        Raises:
            redis.exceptions.RedisError: it could not.
        """
        for slot in {self._cluster.slot_of(command) for command in commands} - {None}:
            await self._node(await self._cluster.owner(slot)).connect()

    async def ask(
        self,
        *commands: Sequence[Any],
        timeout_s: float = COMMAND_S,
        stay: bool = False,
        wait: bool = True,
        packed: bytes | Pieces | None = None,
    ) -> list[Any]:
        """Send `commands` and return their raw replies; a refused one's is its `ResponseError`.

        Those of one slot are carried out in this order, and those that are `AfterOthers` after all others, or not at
        all where one of these was refused for now. With `stay` they go to nodes only that it is connected to, and to
        those that a slot is being moved to from there. Without `wait`, what its slot's move does not let through is
        refused at once. Each command goes its own way: what is `packed` is not looked at.

        Raises:
            redis.exceptions.RedisError: a connection failed: some of them may have been carried out.
            TimeoutError: no reply came; likewise.
        """
        replies: list[Any] = [None] * len(commands)
        waves = [
            [place for place, one in enumerate(commands) if isinstance(one, AfterOthers) is late]
            for late in (False, True)
        ]
        self._stays, self._waits = stay, wait
        try:
            with anyio.fail_after(timeout_s):
                for places in filter(None, waves):
                    refused = [reply for reply in replies if isinstance(reply, Exception) and is_transient(reply)]
                    if refused:
                        for place in places:
                            replies[place] = refused[0]
                    else:
                        await self._carry_out(commands, places, replies, timeout_s)
        except BaseException:
            # As a link does: no connection is used again that is in the middle of something.
            self._cluster.doubt()
            await self.drop()
            raise
        finally:
            self._stays, self._waits = False, True
        return replies

    async def _connect(self, node: _Node) -> None:
        """Connect to a node that has a slot, where that is allowed."""
        from redis.exceptions import ConnectionError

        if self._stays and not node.connected:
            raise ConnectionError("another node has a slot by now")
        await node.connect()

    async def ask_beside(self, other: Link, *commands: Sequence[Any]) -> list[Any]:
        """Ask the node that `other` is connected to."""
        assert isinstance(other, ClusterLink)
        address = next((node.address for node in other._nodes.values() if node.connected), None)
        if address is None:
            return [None] * len(commands)
        try:
            return await self._node(address).ask(*commands)
        except BaseException:
            await self.drop()
            raise

    async def _carry_out(
        self, commands: Sequence[Sequence[Any]], places: Sequence[int], replies: list[Any], timeout_s: float
    ) -> None:
        from redis.exceptions import NoScriptError

        slots = [self._cluster.slot_of(commands[place]) for place in places]
        first = self._near if self._near is not None else next((slot for slot in slots if slot is not None), None)
        bundles: dict[int | None, _Bundle] = {}
        of: dict[int | None, list[int]] = {}
        for place, slot in zip(places, slots, strict=True):
            bundles.setdefault(slot, _Bundle(slot)).commands.append(commands[place])
            of.setdefault(slot, []).append(place)
        nodes: dict[_Address, list[_Bundle]] = {}
        for slot, bundle in bundles.items():
            # What has no key goes along with what has: the time, for one, is that node's.
            nodes.setdefault(await self._where(first if slot is None else slot), []).append(bundle)
        await _all_of([partial(self._send, address, there, timeout_s) for address, there in nodes.items()])
        for bundle in bundles.values():
            if bundle.left:
                await self._go_on(bundle, timeout_s)
            for number, reply in enumerate(bundle.replies):
                if isinstance(reply, NoScriptError):
                    # Flushed from the node since it was sent there.
                    bundle.replies[number] = await self._one(bundle.slot, bundle.commands[number], timeout_s)
        for slot, bundle in bundles.items():
            for place, reply in zip(of[slot], bundle.replies, strict=True):
                replies[place] = reply

    async def _where(self, slot: int | None) -> _Address:
        if self._near is not None:
            for node in self._nodes.values():
                if node.connected:
                    return node.address
        return await self._cluster.owner(slot)

    async def _send(self, address: _Address, bundles: Sequence[_Bundle], timeout_s: float) -> None:
        """Send bundles to one node, and give each its replies, as far as the node has carried it out."""
        from redis.exceptions import NoScriptError

        node = self._node(address)
        # What it knows of scripts is known once it is connected.
        await self._connect(node)
        sent: list[Sequence[Any]] = []
        spans: list[tuple[_Bundle, int, int, bool]] = []
        for bundle in bundles:
            begin, whole = len(sent), bundle.whole
            bundle.asked = address
            phrased = node.phrased(bundle.left)
            sent += [("MULTI",), *phrased, ("EXEC",)] if whole else phrased
            spans.append((bundle, begin, len(sent), whole))
        raw = await node.exchange(sent, timeout_s)
        for bundle, begin, end, whole in spans:
            replies = raw[begin:end]
            self._note(bundle.slot, replies, address)
            if whole:
                if not isinstance(replies[-1], list):
                    continue
                replies = replies[-1]
                if any(isinstance(reply, NoScriptError) for reply in replies):
                    node.known.clear()
            else:
                refused = [place for place, reply in enumerate(replies) if _is_redirection(reply)]
                replies = replies[: refused[0]] if refused else replies
            node.learned(bundle.left[: len(replies)])
            bundle.replies += replies

    def _note(self, slot: int | None, replies: Sequence[Any], asked: _Address) -> None:
        from redis.exceptions import ClusterDownError, ConnectionError, MovedError

        for reply in replies:
            if isinstance(reply, MovedError) and slot is not None:
                self._cluster.moved(slot, _named(reply, asked))
                if self._stays:
                    raise ConnectionError(f"slot {slot} is on another node by now")
                return
            if isinstance(reply, ClusterDownError):
                self._cluster.doubt()

    async def _go_on(self, bundle: _Bundle, timeout_s: float) -> None:
        """Carry out what a node refused of a bundle: as a whole where its slot is now, or else one by one."""
        from redis.exceptions import ClusterDownError, ConnectionError, TryAgainError

        tries = _TRIES
        if self._near is not None:
            # Its connection goes to the node that has refused: the next one goes where the slot is by then.
            tries = 1
        elif bundle.whole and (owner := await self._cluster.owner(bundle.slot)) != bundle.asked:
            await self._send(owner, [bundle], timeout_s)
        while bundle.left:
            reply = await self._one(bundle.slot, bundle.left[0], timeout_s, tries)
            if isinstance(reply, ConnectionError):
                raise reply
            # What follows must not go before it.
            refused = isinstance(reply, (TryAgainError, ClusterDownError))
            bundle.replies += [reply] * len(bundle.left) if refused else [reply]

    async def _one(self, slot: int | None, command: Sequence[Any], timeout_s: float, tries: int = _TRIES) -> Any:
        """Carry out one command wherever its slot is, and wherever its key.

        It was not, for now, where this is a `TryAgainError` (its slot is being moved) or a `ClusterDownError`.
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
            address = elsewhere or await self._where(slot)
            node = self._node(address)
            await (node.connect() if elsewhere else self._connect(node))
            asking = [("ASKING",)] if elsewhere else []
            *_, reply = await node.exchange([*asking, *node.phrased([command])], timeout_s)
            elsewhere = None
            self._note(slot, [reply], address)
            if isinstance(reply, NoScriptError):
                node.known.clear()
            elif isinstance(reply, MovedError):
                if self._near is not None:
                    return ConnectionError(f"slot {slot} has moved")
            elif isinstance(reply, AskError):
                elsewhere = _named(reply, address)
            elif isinstance(reply, TryAgainError) and not self._waits:
                break
            elif isinstance(reply, (TryAgainError, ClusterDownError)):
                await anyio.sleep(backoff.next())
            else:
                node.learned([command])
                return reply
        if isinstance(reply, ClusterDownError):
            return ClusterDownError(f"slot {slot} is nobody's for now: {reply}")
        return TryAgainError(f"slot {slot} is being moved: {reply}")


def _is_redirection(reply: Any) -> bool:
    """Whether a node says that it did not carry out a command, and that somebody may."""
    from redis.exceptions import AskError, ClusterDownError, NoScriptError, TryAgainError

    return isinstance(reply, (AskError, ClusterDownError, NoScriptError, TryAgainError))


def _named(error: Any, asked: _Address) -> _Address:
    """The node that a redirection names."""
    return error.host or asked[0], error.port


async def _all_of(jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Carry them all out at once; raise what the first one failed with when all have ended."""
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
