"""A try-out on one machine: a private Redis, an engine for the demo model, and the service, until Ctrl-C.

With `--url` it starts the service only, on a bus that is there already.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import FrameType

import anyio
import uvicorn
from anyio.streams.text import TextReceiveStream

import tracewire

from .app import create_app
from .settings import Settings

__all__ = ["Server", "main"]

ENGINE = (sys.executable, "-m", "tracewire.cli", "engine", "demo", "--drain", "0")
#: How long the engine may take to end, in seconds, before it is killed.
PATIENCE_S = 30


@asynccontextmanager
async def engine(url: str, log: Path) -> AsyncIterator[None]:
    """The demo engine, serving; ended on the way out, with all of its processes.

    Raises:
        SystemExit: it did not start; with the end of its log.
    """
    with log.open("wb") as errors:
        # A session of its own: Ctrl-C in a terminal is for this program, which ends the engine after the service.
        process = await anyio.open_process([*ENGINE, "--url", url], stderr=errors, start_new_session=True)
    try:
        assert process.stdout is not None
        said = ""
        async for text in TextReceiveStream(process.stdout):
            said += text
            if "ready" in said:
                break
        else:
            raise SystemExit(f"the engine did not start; the end of its log:\n{log.read_text()[-3000:]}")  # noqa: ASYNC240
        yield
    finally:
        with anyio.CancelScope(shield=True):
            try:
                if process.returncode is None:
                    process.terminate()
                    with anyio.move_on_after(PATIENCE_S):
                        await process.wait()
            finally:
                # After a second Ctrl-C, too. Nothing of an engine outlives its first process.
                if process.returncode is None:
                    process.kill()
                await process.aclose()


class Server(uvicorn.Server):
    """A server that ends its streams when it stops, instead of waiting for the answers' ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        await self.config.app.state.chat.leave()
        await super().shutdown(sockets)


async def serve(url: str | None, host: str, port: int) -> None:
    """Serve until a signal."""
    async with AsyncExitStack() as stack:
        if url is None:
            url = (await stack.enter_async_context(tracewire.connect("embedded://"))).url
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tracewire-chat-")))
            print(f"bus:     {url}\nengine:  starting (20 to 60 s on two cores)", flush=True)
            await stack.enter_async_context(engine(url, folder / "engine.log"))
        print(f"service: http://{host}:{port}   Ctrl-C ends it", flush=True)
        app = create_app(Settings(url=url))
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
        await Server(config).serve()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.chat_backend", description=__doc__)
    parser.add_argument("--url", help="a Redis that engines serve already (default: a private one, and a demo engine)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    # Before and after uvicorn looks at signals, both mean the same: leave, and leave nothing.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        anyio.run(serve, options.url, options.host, options.port)
    except KeyboardInterrupt:
        pass
    except tracewire.TracewireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
