"""A way to Redis over TCP that delays, cuts, and goes dead without a word, when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
from anyio.abc import SocketAttribute, SocketStream

__all__ = ["Wire", "wire"]


class _Pair:
    """One connection: a client's side and Redis's. `held` says which ways nothing passes, up to Redis or down."""

    def __init__(self, client: SocketStream, server: SocketStream) -> None:
        self.client, self.server = client, server
        self.held = {"up": False, "down": False}
        self.moved = anyio.Event()
        self.broken = False
        self.cut_answer = False

    def hold(self, up: bool, down: bool) -> None:
        self.held = {"up": up, "down": down}
        self.moved.set()
        self.moved = anyio.Event()

    async def break_off(self) -> None:
        self.broken = True
        self.moved.set()
        for stream in (self.client, self.server):
            await anyio.aclose_forcefully(stream)


class Wire:
    """Forwards TCP connections to a Redis. `url` is what to connect to."""

    def __init__(self, port: int, target: int, random: Random) -> None:
        self.url = f"redis://127.0.0.1:{port}"
        self._target = target
        self._random = random
        self._pairs: set[_Pair] = set()
        #: Each piece that passes waits so long, in seconds: at least, at most.
        self.delay = (0.0, 0.0)
        #: New connections are held like this from their first byte on.
        self.hold_new: tuple[bool, bool] | None = None
        #: Where pieces that append, or the answers to such, are still to be cut through.
        self._cuts: list[str] = []
        #: How many connections were cut in the middle of a piece.
        self.cut_through = 0

    async def cut(self) -> None:
        """Close all connections now."""
        for pair in list(self._pairs):
            await pair.break_off()

    def cut_next(self, where: str) -> None:
        """Cut the next connection that appends, at a random byte: of what it sends (`up`) or is answered (`down`)."""
        self._cuts.append(where)

    def hold(self, up: bool, down: bool, *, new: bool = False, share: float = 1.0) -> int:
        """Let nothing pass any more, these ways, on a share of the connections, and on new ones if so."""
        held = [pair for pair in self._pairs if self._random.random() < share]
        for pair in held:
            pair.hold(up, down)
        self.hold_new = (up, down) if new else None
        return len(held)

    def let_go(self) -> None:
        """Let pass what was held, late as it is."""
        self.hold_new = None
        for pair in list(self._pairs):
            pair.hold(False, False)

    async def serve(self, client: SocketStream) -> None:
        """Forward one connection until it ends."""
        try:
            server = await anyio.connect_tcp("127.0.0.1", self._target)
        except OSError:
            await anyio.aclose_forcefully(client)
            return
        pair = _Pair(client, server)
        if self.hold_new is not None:
            pair.hold(*self.hold_new)
        self._pairs.add(pair)
        try:
            async with client, server, anyio.create_task_group() as group:
                group.start_soon(self._pump, pair, client, server, "up")
                group.start_soon(self._pump, pair, server, client, "down")
        finally:
            self._pairs.discard(pair)

    async def _pump(self, pair: _Pair, source: SocketStream, sink: SocketStream, way: str) -> None:
        try:
            async for data in source:
                while pair.held[way] and not pair.broken:
                    await pair.moved.wait()
                if self.delay[1]:
                    await anyio.sleep(self._random.uniform(*self.delay))
                cut = pair.cut_answer if way == "down" else False
                if way == "up" and self._cuts and (b"XADD" in data or b"EVAL" in data):
                    cut = self._cuts.pop() == "up"
                    # Otherwise Redis gets it whole, and its answer is cut.
                    pair.cut_answer = not cut
                if cut:
                    self.cut_through += 1
                    await sink.send(data[: self._random.randrange(len(data) + 1)])
                    await pair.break_off()
                    return
                await sink.send(data)
            await sink.send_eof()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            await pair.break_off()


@asynccontextmanager
async def wire(target: int, random: Random) -> AsyncIterator[Wire]:
    """A wire to the Redis at this TCP port."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        port = listener.extra(SocketAttribute.local_port)
        laid = Wire(port, target, random)
        group.start_soon(listener.serve, laid.serve)
        try:
            yield laid
        finally:
            group.cancel_scope.cancel()
