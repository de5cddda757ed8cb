"""Engines and stores for the tests of harvests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np

from tests.support import ROOT
from tests.support.bus_engine import Stage
from tracewire.harvest.journal import Failed
from tracewire.harvest.rows import Location, PromptRows, Series
from tracewire_bus.wire.messages import Failure

__all__ = ["failed", "reads", "rows", "s3_server", "values_of"]


def values_of(prompt: str) -> np.ndarray[Any, Any]:
    """What the engine below reads at each position of a prompt: float32 `[positions, layers, hidden]`, of 4 layers."""
    seed = sum(prompt.encode())
    return np.arange(len(prompt) * 4 * 3, dtype=np.float32).reshape(len(prompt), 4, 3) + seed


async def reads(stage: Stage) -> None:
    """A script that plays `Probe("hs", "residual(*)", positions="all")`: a token a character, and one that is sampled.

    A prompt that begins with `bad` fails, and one that begins with `hang` never ends.
    """
    prompt = stage.submission.invokes[0].prompt or ""
    ids = [ord(character) for character in prompt]
    strings = [list(prompt)] if stage.submission.token_strings else []
    await stage.accept(prompt_token_ids=[ids], prompt_token_strings=strings)
    if prompt.startswith("hang"):
        await anyio.sleep_forever()
    if prompt.startswith("bad"):
        await stage.final("failed", Failure(type="ValueError", message="a bad prompt", field="block"))
        return
    await stage.save("!", {"hs": values_of(prompt)}, token_strings=["!"] if strings else None)
    await stage.final()


def rows(key: int | str, *arrays: tuple[str, np.ndarray[Any, Any]], prompt: str = "abc", **parts: Any) -> PromptRows:
    """Rows of a prompt, from position 0 on."""
    series = [
        Series(name, name, Location("0", 0, "residual(0)"), {"": array}, np.arange(len(array)), np.arange(len(array)))
        for name, array in arrays
    ]
    if parts:
        count = len(next(iter(parts.values())))
        nowhere = Location("", None, "")
        series.append(Series("parts", "parts", nowhere, parts, np.full(count, -1), np.arange(count)))
    return PromptRows(key, f"digest of {key}", len(prompt), [*map(ord, prompt), 33], [*prompt, "!"], "!", series)


def failed(key: int | str) -> Failed:
    """A prompt that failed."""
    return Failed(key, f"digest of {key}", "ValueError", "it is bad")


@contextmanager
def s3_server() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A server of S3's protocol that checks signatures, with an empty bucket `acts`, and what fsspec needs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As many requests as it takes to make a user and a bucket are let through.
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "4"}
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **silent) as process:
        try:
            while not _listens(port):
                assert process.poll() is None
            yield process, _user_of(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _user_of(url: str) -> dict[str, Any]:
    import boto3

    region = {"region_name": "us-east-1"}
    anybody = {"endpoint_url": url, "aws_access_key_id": "a", "aws_secret_access_key": "a", **region}
    iam = boto3.client("iam", **anybody)
    iam.create_user(UserName="harvester")
    key = iam.create_access_key(UserName="harvester")["AccessKey"]
    allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName="harvester", PolicyName="s3", PolicyDocument=json.dumps(allowed))
    boto3.client("s3", **anybody).create_bucket(Bucket="acts")
    quick = {"retries": {"max_attempts": 1}}
    options = {"endpoint_url": url, "key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    return {**options, "client_kwargs": region, "config_kwargs": quick}


async def numbered(count: int) -> AsyncIterator[str]:
    """Prompts as an async iterable has them."""
    for index in range(count):
        yield f"prompt {index}"
