"""The secrets of an engine's command, kept where the code of blocks does not find them.

A command line stands in the process list, and every process that is started inherits the environment; blocks run in
such a process. So the command, once it has been started with a secret in either, starts itself anew (in the same
process) without, and hands the secrets on through a pipe, which is read once. The supervisor hands them to each adapter
in the same way. The token of the Hugging Face hub is needed by the processes that load the model: they find it in a
file, which is gone when the model has loaded, before any block runs. The value of `--hf-token` goes the same way, since
vLLM would keep it in the workers' configuration. ModelScope's client reads its token from the environment only, so that
token stays with the adapter.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

__all__ = ["API_KEY", "URL", "Given", "hub_token", "shown"]

#: Environment variables that hold secrets of ours: of the bus's Redis, and of the HTTP API's clients.
URL, API_KEY = "TRACEWIRE_URL", "VLLM_API_KEY"
#: Those that hold a token of the model hub, the one that counts first.
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
#: Those of other hubs, which no file can hand on.
_OTHER_HUBS = ("MODELSCOPE_API_TOKEN",)
_HF_TOKEN = "--hf-token"
#: Environment variable with the descriptor that the secrets are read from.
_HANDED = "TRACEWIRE_HANDED"
#: The least capacity of a pipe without a reader, in bytes.
_PIPE = 4096
_NAMED = re.compile(r"--[\w-]*(?:key|token|password|secret)[\w-]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/\s]*@|://.*@|password=", re.IGNORECASE)
_HIDDEN = "***"


@dataclass
class Given:
    """The input of a command: its arguments, and the secrets of its environment."""

    arguments: list[str]
    secrets: dict[str, str] = field(default_factory=dict)

    @classmethod
    def take(cls, arguments: Sequence[str]) -> Self:
        """The input that was handed to this process; else these arguments and its environment.

        The environment has no secret any more then. A process whose environment or command line shows one is
        replaced by itself without.
        """
        if descriptor := os.environ.pop(_HANDED, ""):
            with open(int(descriptor), encoding="utf-8", errors="surrogateescape") as pipe:
                return cls(**json.load(pipe))
        names = (URL, API_KEY, *_HUB, *_OTHER_HUBS)
        secrets = {name: os.environ.pop(name) for name in names if name in os.environ}
        kept, token = _without_hub_token(arguments)
        if token:
            secrets[_HUB[0]] = token
        given = cls(kept, secrets)
        if secrets or shown(kept) != kept:
            descriptor, environment = given.hand()
            command = [sys.executable, "-m", "tracewire_engine.launch.cli", *shown(kept)]
            os.set_inheritable(int(descriptor), True)
            os.execve(command[0], command, environment)
        return given

    def hand(self) -> tuple[str, dict[str, str]]:
        """A descriptor from which another process takes this, once; and the environment that it is started with."""
        told = json.dumps({"arguments": self.arguments, "secrets": self.secrets}).encode()
        reading, writing = os.pipe()
        try:
            if len(told) > _PIPE:
                # On Linux, where a larger one is needed: it must hold all before anybody reads.
                _enlarge(writing, len(told))
            os.write(writing, told)
        finally:
            os.close(writing)
        return str(reading), {**os.environ, _HANDED: str(reading)}


def _without_hub_token(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The arguments without a value of `--hf-token`, and that value. Without one it means the token that is stored."""
    kept: list[str] = []
    token = ""
    waiting = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        # vLLM takes its options with underscores, too.
        named = name.replace("_", "-") == _HF_TOKEN
        if waiting and not argument.startswith("-"):
            kept.pop()
            token = argument
        elif named and equals:
            token = value
        else:
            kept.append(argument)
        waiting = named and not equals
    return kept, token


def _enlarge(pipe: int, size: int) -> None:
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


def shown(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command as others may see them: without what may be a secret."""
    found: list[str] = []
    secret = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if secret and not argument.startswith("--"):
            found.append(_HIDDEN)
            secret = False
        elif option == "--openai-option" and equals:
            (hidden,) = shown([value])
            # A value of its own belongs to the option before, whichever that was.
            found.append(f"{option}={hidden if value.startswith('-') else _HIDDEN}")
        else:
            secret = bool(_NAMED.fullmatch(option)) and not equals
            if _NAMED.fullmatch(option) and equals:
                argument = f"{option}={_HIDDEN}"
            elif _CREDENTIALS.search(argument):
                argument = f"{option}={_HIDDEN}" if equals and option.startswith("--") else _HIDDEN
            found.append(argument)
    return found


@contextmanager
def hub_token(secrets: dict[str, str]) -> Iterator[None]:
    """Have this process, and those that it starts, find the model hub's token for as long as the context lasts."""
    token = next((secrets[name] for name in _HUB if secrets.get(name)), None)
    if token is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tracewire-hub-") as folder:
        path = Path(folder) / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        # Where the hub's client looks; it reads this name when it is imported.
        os.environ["HF_TOKEN_PATH"] = str(path)
        yield
