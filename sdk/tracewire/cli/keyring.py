"""`tracewire keys`: make, list, rotate and revoke the keys with which clients and engines sign."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from tracewire_bus.domain.identity import QUOTAS, RIGHTS, Key, KeyFileError, Keyring, new_key

from .commands import UsageError, add_command, add_group
from .printing import print_json, print_rows, remark

__all__ = ["add_keys"]

_RING = "the engines' keyring (tracewire engine --keyring)"


def add_keys(commands: Any) -> None:
    """Add the subcommand."""
    actions = add_group(commands, "keys", "keys with which clients and engines sign: make, list, rotate or revoke them")
    new = add_command(
        actions,
        "new",
        _new,
        parents=(),
        help="make a key: its private part goes into a file of its own, its public part into a keyring",
        examples=("tracewire keys new alice --tenant red --rights submit,steer --keyring keyring.json --to alice.key",),
        json="an object: id, tenant, rights, quotas, public, ...",
    )
    new.add_argument("id", metavar="ID", help="the key's name")
    new.add_argument("--to", type=Path, required=True, metavar="FILE", help="the private key's file (TRACEWIRE_KEY)")
    new.add_argument("--keyring", type=Path, metavar="FILE", help=f"{_RING}; leave it out for an engine's key")
    new.add_argument(
        "--tenant", default="", help="whose key it is (default: its ID); keys of a tenant share its traces"
    )
    new.add_argument("--rights", default="submit,read,steer", metavar="RIGHTS", help=f"of: {','.join(RIGHTS)}")
    new.add_argument(
        "--quota", action="append", default=[], metavar="NAME=N", help=f"a quota (repeatable); of: {','.join(QUOTAS)}"
    )
    new.add_argument("--days", type=float, metavar="N", help="for how long it is valid (default: until it is revoked)")
    list_ = add_command(
        actions,
        "list",
        _list,
        parents=(),
        help="list the keys of a keyring",
        json="a list of objects, as keys new prints",
    )
    revoke = add_command(actions, "revoke", _revoke, parents=(), help="revoke a key, at once and for good")
    rotate = add_command(
        actions,
        "rotate",
        _rotate,
        parents=(),
        help="make a key in place of another, which stays valid for a while",
        json="the new key as an object",
    )
    rotate.add_argument("--to", type=Path, required=True, metavar="FILE", help="the new private key's file")
    rotate.add_argument(
        "--grace", type=float, default=3600.0, metavar="SECONDS", help="for how long the old key stays valid (3600)"
    )
    for parser in (list_, revoke, rotate):
        parser.add_argument("--keyring", type=Path, required=True, metavar="FILE", help=_RING)
    for parser in (revoke, rotate):
        parser.add_argument("id", metavar="ID")


async def _new(options: argparse.Namespace) -> int:
    rights = [one for one in options.rights.split(",") if one]
    until = None if options.days is None else time.time() + options.days * 86400
    try:
        ring = None if options.keyring is None else Keyring(options.keyring)
        with nullcontext() if ring is None else ring.changing():
            known = [] if ring is None else ring.listed()
            if any(one.id == options.id for one in known):
                raise KeyFileError(f"{options.keyring} has a key {options.id!r} already")
            key = _made(options.to, options.id, options.tenant or options.id, rights, _quotas(options.quota))
            key = msgspec.structs.replace(key, valid_until=until)
            if ring is not None:
                ring.write([*known, key])
    except KeyFileError as error:
        remark(f"tracewire: {error}")
        return 1
    return _told(options, key)


def _made(*what: Any) -> Key:
    try:
        return new_key(*what)
    except ModuleNotFoundError as error:
        raise KeyFileError(f"making a key needs {error.name}: pip install 'tracewire[signing]'") from error


def _quotas(given: list[str]) -> dict[str, int]:
    quotas = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in QUOTAS or not number.isdecimal():
            raise UsageError(f"--quota: expected NAME=N with a name of {', '.join(QUOTAS)}, got {text!r}")
        quotas[name] = int(number)
    return quotas


def _told(options: argparse.Namespace, key: Key) -> int:
    if options.json:
        print_json(msgspec.to_builtins(key))
    else:
        print(key.public)
        remark(f"tracewire: the private key is in {options.to}; clients find it by: export TRACEWIRE_KEY={options.to}")
    return 0


async def _list(options: argparse.Namespace) -> int:
    try:
        keys = Keyring(options.keyring).listed()
    except KeyFileError as error:
        remark(f"tracewire: {error}")
        return 1
    if options.json:
        print_json([msgspec.to_builtins(key) for key in keys])
        return 0
    rows = [(key.id, key.tenant, ",".join(key.rights), _state(key), key.public) for key in keys]
    print_rows(("id", "tenant", "rights", "state", "public"), rows)
    return 0


def _state(key: Key) -> str:
    if key.revoked is not None:
        return "revoked"
    return "expired" if key.valid_until is not None and key.valid_until < time.time() else "valid"


async def _revoke(options: argparse.Namespace) -> int:
    return _changed(options, lambda key: msgspec.structs.replace(key, revoked=key.revoked or time.time()))


async def _rotate(options: argparse.Namespace) -> int:
    ring = Keyring(options.keyring)
    try:
        with ring.changing():
            new = _rotated(ring, options)
    except KeyFileError as error:
        remark(f"tracewire: {error}")
        return 1
    return _told(options, new)


def _rotated(ring: Keyring, options: argparse.Namespace) -> Key:
    """The new key. The keyring has it, and the end of the old one."""
    known = ring.listed()
    old = next((key for key in known if key.id == options.id), None)
    if old is None or _state(old) != "valid":
        raise KeyFileError(f"{ring.path} has no valid key {options.id!r}")
    taken = {key.id for key in known}
    base = options.id.rpartition("-")[0] if options.id.rpartition("-")[2].isdecimal() else options.id
    id = next(name for number in range(2, len(taken) + 3) if (name := f"{base}-{number}") not in taken)
    new = _made(options.to, id, old.tenant, old.rights, old.quotas)
    # A key that is valid for a time gives way to one that is valid for what is left of it.
    new = msgspec.structs.replace(new, valid_from=old.valid_from, valid_until=old.valid_until)
    ends = time.time() + options.grace
    until = ends if old.valid_until is None else min(ends, old.valid_until)
    kept = [msgspec.structs.replace(key, valid_until=until) if key is old else key for key in known]
    ring.write([*kept, new])
    return new


def _changed(options: argparse.Namespace, change: Any) -> int:
    ring = Keyring(options.keyring)
    try:
        with ring.changing():
            keys = ring.listed()
            if not any(key.id == options.id for key in keys):
                raise KeyFileError(f"{ring.path} has no key {options.id!r}")
            ring.write([change(key) if key.id == options.id else key for key in keys])
    except KeyFileError as error:
        remark(f"tracewire: {error}")
        return 1
    return 0
