"""The secrets of an engine's command, kept where the code of blocks does not find them.

A command line stands in the process list, and every process that is started inherits the environment; blocks run in
such a process. So the command, once it has been started with a secret in either, starts itself anew (in the same
process) without, and hands the secrets on through a pipe, which is read once. The supervisor hands them to each adapter
in the same way. Tokens of model hubs are needed by the processes that load the model: they find them in a file, which
is gone when the model has loaded, before any block runs.
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
#: Environment variable with the descriptor that the secrets are read from.
_HANDED = "TRACEWIRE_HANDED"
#: What a pipe holds before it has a reader, at least, in bytes.
_PIPE = 4096
_NAMED = re.compile(r"--[\w-]*(?:key|token|password|secret)[\w-]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/\s]*@|://.*@|password=", re.IGNORECASE)
_HIDDEN = "***"


@dataclass
class Given:
    """What a command was given: its arguments, and of its environment the secrets."""

    arguments: list[str]
    secrets: dict[str, str] = field(default_factory=dict)

    @classmethod
    def take(cls, arguments: Sequence[str]) -> Self:
        """What was handed to this process, else these arguments and what stands in its environment.

        The environment has no secret any more then. A process whose environment or command line shows one is
        replaced by itself without.
        """
        if descriptor := os.environ.pop(_HANDED, ""):
            with open(int(descriptor), encoding="utf-8", errors="surrogateescape") as pipe:
                return cls(**json.load(pipe))
        secrets = {name: os.environ.pop(name) for name in (URL, API_KEY, *_HUB) if name in os.environ}
        given = cls(list(arguments), secrets)
        if secrets or shown(arguments) != list(arguments):
            descriptor, environment = given.hand()
            command = [sys.executable, "-m", "tracewire_engine.launch.cli", *shown(arguments)]
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
