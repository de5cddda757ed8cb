"""Two hosts, one model: start them, run a trace, cut one off in the middle, and see the trace go on.

    python examples/two_hosts/run.py          # with Docker; builds the image first
    python examples/two_hosts/run.py --keep   # and leave it running

The steps are `walk`; tests/e2e/parallel/test_ray_hosts.py carries out compose.yaml's commands in network namespaces,
and walks it there.
"""

# ruff: noqa: ASYNC110
from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

import tracewire
from tracewire import Output, Restarted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

#: How long an engine may take to start, an image's first start included, in seconds.
START_S = 600
TOKENS = 200


@tracewire.intervention
def watch(model, tracer, live):
    """How long the residual stream is in the middle of the model, at every token: half of it is on either host."""
    norms = [].save()
    for step in tracer.iter[:]:
        norms.append(float(model.residual(4).output[-1].float().norm()))


class Hosts(Protocol):
    """The operations on the hosts that the walk needs."""

    #: The Redis, as this process reaches it.
    url: str

    def cut(self) -> None:
        """Cut the second host off."""

    def mend(self) -> None:
        """Connect it again."""


async def walk(hosts: Hosts) -> dict[str, object]:
    """Run a trace, and another one with a host cut off in its middle; what came of them."""
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with tracewire.connect(hosts.url) as client:
        model = await client.models.get("demo", timeout=START_S)
        async with client.trace(model, "def add(a, b):", watch, **options) as trace:
            undisturbed = await trace.result()
        print(f"a trace over two hosts: {len(undisturbed.saves['norms'])} norms, {undisturbed.text[:40]!r} ...")

        restarts = 0
        async with client.trace(model, "def add(a, b):", watch, **options) as trace:
            async for item in trace:
                if isinstance(item, Output) and item.index >= 5:
                    break
            print("cutting the second host off, five tokens into another one ...")
            await anyio.to_thread.run_sync(hosts.cut)
            engines = [engine.name for engine in await client.engines.list()]
            with anyio.fail_after(START_S):
                # The engine takes itself off when it has missed its worker, and its supervisor tries again.
                while any(
                    engine.name in engines and engine.state == "serving" for engine in await client.engines.list()
                ):
                    await asyncio.sleep(0.5)
            print("its engine is gone; connecting the host again ...")
            await anyio.to_thread.run_sync(hosts.mend)
            with anyio.fail_after(START_S):
                async for item in trace:
                    restarts += isinstance(item, Restarted)
                result = await trace.result()
        print(f"it ended as {result.status} after {restarts} restart(s)")
    return {
        "restarts": restarts,
        "same tokens": result.token_ids == undisturbed.token_ids,
        "status": result.status,
        "tokens": len(result.token_ids),
    }


def went_on(came_to: dict[str, object]) -> bool:
    """Whether the trace went on, to its end, as if no host had been cut off."""
    whole = came_to["status"] == "finished" and came_to["tokens"] == TOKENS
    return whole and bool(came_to["same tokens"]) and bool(came_to["restarts"])


class Containers:
    """The hosts as containers, by Docker's compose."""

    def __init__(self) -> None:
        port = os.environ.get("REDIS_PORT", "6380")
        self.url = f"redis://127.0.0.1:{port}"
        self._environment = {**os.environ, "REDIS_PORT": port, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def _docker(self, *arguments: str) -> None:
        subprocess.run(["docker", *arguments], check=True, cwd=ROOT, env=self._environment)

    def _compose(self, *arguments: str) -> None:
        self._docker("compose", "-f", str(HERE / "compose.yaml"), *arguments)

    def start(self) -> None:
        """Build the image, and start all of them."""
        image = ["--target", "engine-cpu", "-t", "tracewire-engine-cpu"]
        self._docker("build", "-f", "deploy/Dockerfile", *image, ".")
        self._compose("up", "--detach")

    def cut(self) -> None:
        """Take the second host off the network, as it runs."""
        self._docker("network", "disconnect", "two-hosts_default", "two-hosts-other-1")

    def mend(self) -> None:
        """Put it back. Ray has given its node up meanwhile: it joins as a new one."""
        self._docker("network", "connect", "--alias", "other", "two-hosts_default", "two-hosts-other-1")
        self._compose("restart", "other")

    def logs(self) -> None:
        """Print what the engine said last."""
        self._compose("logs", "--tail", "50", "engine")

    def stop(self) -> None:
        """End all of them."""
        self._compose("down", "--timeout", "30")


def main() -> int:
    """Walk it with containers."""
    parser = argparse.ArgumentParser(description="A model on two hosts, of which one is cut off.")
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    options = parser.parse_args()
    hosts = Containers()
    hosts.start()
    try:
        came_to = asyncio.run(walk(hosts))
    except BaseException:
        hosts.logs()
        raise
    finally:
        if not options.keep:
            hosts.stop()
    print(came_to)
    return 0 if went_on(came_to) else 1


if __name__ == "__main__":
    sys.exit(main())
