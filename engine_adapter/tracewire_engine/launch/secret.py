"""Keeps the secrets of an engine's command where the code of blocks cannot find them.

Anyone can read a command line in the process list, and every child process inherits the environment. Blocks run in such
a child process. So if the command line or the environment holds a secret, the command replaces itself (by `execve`, in
the same process) by a command without it. It hands the secrets on through a pipe, which is read once. The supervisor
hands them to each adapter in the same way.

The processes that load the model need the token of the Hugging Face hub. They find it in a file, which is removed when
the model has loaded, before any block runs. The value of `--hf-token` takes the same way, since vLLM would keep it in
the workers' configuration. ModelScope's client reads its token from the environment only, so that token stays in the
adapter, and the workers do not get it.
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

#: Environment variables with Tracewire's secrets: the URL of the bus's Redis, and the key of the HTTP API's clients.
URL, API_KEY = "TRACEWIRE_URL", "VLLM_API_KEY"
#: Environment variables with a token of the Hugging Face hub. The first one that is set counts.
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
#: Environment variables with tokens of other hubs, whose clients read them from no file.
_OTHER_HUBS = ("MODELSCOPE_API_TOKEN",)
_HF_TOKEN = "--hf-token"
#: Environment variable with the file descriptor of the pipe from which a process reads its secrets.
_HANDED = "TRACEWIRE_HANDED"
#: How many bytes a pipe holds without a reader, at least.
_PIPE = 4096
_NAMED = re.compile(r"--[\w-]*(?:key|token|password|secret)[\w-]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/\s]*@|://.*@|password=", re.IGNORECASE)
_HIDDEN = "***"


@dataclass
class Given:
    """The input of a command: its arguments and its secrets, by the name of the environment variable."""

    arguments: list[str]
    secrets: dict[str, str] = field(default_factory=dict)

    @classmethod
    def take(cls, arguments: Sequence[str]) -> Self:
        """Take the input of this process: from the pipe if it was given one, else these arguments and its environment.

        If the environment or the command line shows a secret, this does not return. It replaces the process by the same
        command without the secret, which then takes its input from a pipe.
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
        """Prepare to hand this input to another process.

        Returns:
            The descriptor of a pipe, which the other process must inherit and from which `take` reads once; and the
            environment for the other process.
        """
        told = json.dumps({"arguments": self.arguments, "secrets": self.secrets}).encode()
        reading, writing = os.pipe()
        try:
            if len(told) > _PIPE:
                # The pipe must hold everything before another process reads. Only Linux can enlarge a pipe.
                _enlarge(writing, len(told))
            os.write(writing, told)
        finally:
            os.close(writing)
        return str(reading), {**os.environ, _HANDED: str(reading)}


def _without_hub_token(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Take the value of `--hf-token` out of the arguments. Returns the other arguments and the value, or `""`.

    `--hf-token` without a value stays in the arguments: vLLM then uses the token that the hub's client has stored.
    """
    kept: list[str] = []
    token = ""
    waiting = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        # vLLM also accepts its options with underscores.
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
    """The command's arguments for a process list or a log: possible secrets are replaced by `***`."""
    found: list[str] = []
    secret = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if secret and not argument.startswith("--"):
            found.append(_HIDDEN)
            secret = False
        elif option == "--openai-option" and equals:
            (hidden,) = shown([value])
            # A value without an option may belong to the option before it, so it is hidden.
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
    """Let this process and its children find the Hugging Face hub's token in a file, which the context removes."""
    token = next((secrets[name] for name in _HUB if secrets.get(name)), None)
    if token is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tracewire-hub-") as folder:
        path = Path(folder) / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        # The hub's client reads this environment variable when it is imported.
        os.environ["HF_TOKEN_PATH"] = str(path)
        yield
