"""Keeps the secrets of an engine's command where the code of blocks cannot find them.

Anyone can read a command line in the process list, and every child process inherits the environment. Blocks run in such
a child process. So if the command line or the environment holds a secret, the command replaces itself (by `execve`, in
the same process) by a command without it. It hands the secrets on through a pipe, which is read once. The supervisor
hands them to each adapter in the same way.

Secrets of other programs stay out of these processes too: every variable whose name or value looks like a secret
(`is_secret`), unless `--keep-env` names it. The adapter sets these variables again once the workers have started.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Self

__all__ = ["API_KEY", "URL", "Given", "hub_token", "is_secret", "others", "shown", "with_secrets"]

#: Environment variables with Tracewire's secrets: the URL of the bus's Redis, and the key of the HTTP API's clients.
URL, API_KEY = "TRACEWIRE_URL", "VLLM_API_KEY"
#: Environment variables with a token of the Hugging Face hub. The first one that is set counts.
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
#: Environment variables with tokens of other hubs, whose clients read them from no file.
_OTHER_HUBS = ("MODELSCOPE_API_TOKEN",)
_HF_TOKEN = "--hf-token"  # noqa: S105  (the name of an option)
#: Environment variable with the file descriptor of the pipe from which a process reads its secrets.
_HANDED = "TRACEWIRE_HANDED"
#: How many bytes a pipe holds without a reader, at least.
_PIPE = 4096
_NAMED = re.compile(r"--[\w-]*(?:key|token|password|secret)[\w-]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/\s]*@|://.*@|password=", re.IGNORECASE)
_HIDDEN = "***"
#: A name with one of these words, separated by underscores, is that of a secret.
_SECRET_WORDS = frozenset(
    (
        *("key", "apikey", "token", "secret", "secrets", "password", "passwd", "passphrase", "pass", "pw", "pat"),
        *("credential", "credentials", "headers", "dsn"),
    )
)
#: Names that end in one of these words say where something is, not what it is.
_PLACE_WORDS = frozenset(("path", "file", "dir", "folder", "id", "name"))
#: Ray's workers log in to the cluster with this token. Proxies are needed to load a model.
_NEEDED = re.compile(r"RAY_AUTH_TOKEN|(?:\w+_)?PROXY", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s]*@")
_KEEP_ENV, _URL_FILE = "--keep-env", "--url-file"


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable looks like a secret, by its name or by a password in a URL."""
    if _NEEDED.fullmatch(name):
        return False
    if name in (URL, API_KEY, *_HUB, *_OTHER_HUBS) or _URL_WITH_PASSWORD.search(value):
        return True
    words = name.lower().split("_")
    # An access key's id is the name of an account, but it belongs to a secret.
    named = words[-1] in _PLACE_WORDS and words[-2:] != ["key", "id"]
    return not named and not _SECRET_WORDS.isdisjoint(words)


def others(secrets: Mapping[str, str]) -> dict[str, str]:
    """Those of the secrets that are neither Tracewire's nor a model hub's."""
    return {name: value for name, value in secrets.items() if name not in (URL, API_KEY, *_HUB, *_OTHER_HUBS)}


@contextmanager
def with_secrets(secrets: Mapping[str, str]) -> Iterator[None]:
    """Set other programs' secrets in this process's environment. No process that runs blocks may start meanwhile."""
    found = others(secrets)
    os.environ.update(found)
    try:
        yield
    finally:
        for name in found:
            os.environ.pop(name, None)


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
        keep = _values_of(_KEEP_ENV, arguments)
        secrets = {
            name: os.environ.pop(name)
            for name, value in list(os.environ.items())
            if is_secret(name, value) and not any(fnmatchcase(name, pattern) for pattern in keep)
        }
        kept, token = _without_hub_token(arguments)
        kept, url = _without_url_descriptor(kept)
        if url:
            secrets[URL] = url
        if token:
            secrets[_HUB[0]] = token
        given = cls(kept, secrets)
        if secrets or shown(kept) != kept:
            descriptor, environment = given.hand()
            command = [sys.executable, "-m", "tracewire_engine.launch", *shown(kept)]
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


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """The values of an option on a command line, as `OPTION VALUE` or `OPTION=VALUE`."""
    found = [one.partition("=")[2] for one in arguments if one.startswith(f"{option}=")]
    return found + [value for one, value in pairwise(arguments) if one == option]


def _without_url_descriptor(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Take a `--url-file` that can be read once out of the arguments. Returns the others, and the text or `""`.

    Such a file is a descriptor (`/dev/fd/3`) or a pipe. The adapter reads a plain file itself, at each start.
    """
    kept: list[str] = []
    url, at = "", 0
    while at < len(arguments):
        name, equals, value = arguments[at].partition("=")
        step = 1
        if name == _URL_FILE and not equals and at + 1 < len(arguments):
            value, step = arguments[at + 1], 2
        if name == _URL_FILE and value and not Path(value).is_file() and Path(value).exists():
            url = Path(value).read_text().strip()
            _close_descriptor(value)
        else:
            kept += arguments[at : at + step]
        at += step
    return kept, url


def _close_descriptor(path: str) -> None:
    """Close the descriptor that a path such as `/dev/fd/3` names, since child processes would inherit it."""
    number = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", path)
    if number is not None and int(number[1]) > 2:
        os.close(int(number[1]))


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
    """Let this process and its children find the Hugging Face hub's token in a file, which the context removes.

    If this process is killed, the next engine of this user removes the file.
    """
    token = next((secrets[name] for name in _HUB if secrets.get(name)), None)
    if token is None:
        yield
        return
    # Here, because a command is run again without its secrets before it imports anything that takes time.
    from tracewire_bus.owned_folder import OwnedFolder

    with OwnedFolder("tracewire-hub-") as folder:
        path = folder.path / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        # The hub's client reads this environment variable when it is imported.
        os.environ["HF_TOKEN_PATH"] = str(path)
        yield
