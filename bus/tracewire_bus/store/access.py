"""The access rules (ACL) of each role: which commands and keys of Redis it may use.

The commands are those of the role's scripts, read from their text, and those that the role's code sends itself.
`deploy/redis/*.acl` and `tracewire acl` come from here.

A user runs scripts by their digests (`EVALSHA`) and may load none: an engine or an operator loads them. Redis runs a
script with the rights of the user who calls it. So a user may also send each command of its scripts by itself, on each
of its keys. A Redis function (`FCALL`) has no more rights than that, either.

A *tenant* is a prefix of trace ids: a tenant's users may use the keys of traces `TENANT:...` only. From Redis 7 on,
rules tell reading from writing. There a controller writes submissions and orders that it cannot read back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from tracewire_bus.transport.scripts import FOLDER, Script, assemble

__all__ = ["ROLES", "SERVERS", "Role", "all_scripts", "rules", "users"]

Role: TypeAlias = Literal["consumer", "controller", "guard", "editor", "operator", "engine"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

#: The servers for which there are rules: Redis 6.2, which does not tell reading from writing, and later ones.
SERVERS: Final = ("6.2", "7")

#: What every connection needs: to check the server, and to learn of new streams.
_EVERYBODY: Final = ("ping", "role", "time", "client|id", "client|unblock", "cluster|slots", "asking", "multi", "exec")
_READS: Final = ("exists", "get", "hget", "hmget", "hgetall", "smembers", "xread", "xrevrange")

#: The parts of a queue that a client's scripts read and write. A client only writes `data`, the submissions.
_QUEUE: Final = ("entries", "taken", "state", "turns", "bell", "leases", "client:*", "lease:*", "suspects")

#: Keys of one trace. `OWN` stands for the trace ids of the tenant.
_TRACE: Final = ("events", "trace", "blobs", "snapshot", "changes", "operations")
_REGISTRY: Final = ("R engines", "R engine:*", "R bulk-store:*")

#: The parts of a space of the library. Everybody reads the shared space, whose name is empty.
_LIBRARY: Final = ("last", "newest", "entries", "about", "arrays")
_SHARED: Final = tuple(f"R {{library}}:library:{part}::*" for part in _LIBRARY)
_READ_LIBRARY: Final = (*(f"R {{library}}:library:{part}:OWN" for part in _LIBRARY), *_SHARED)


class _Rights(NamedTuple):
    """A role's rights. A key is `R`, `W` or `RW`, and a pattern; `eval` says whether it may send scripts as text."""

    keys: tuple[str, ...]
    scripts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    eval: bool = False


_FOLLOWED: Final = ("events", "trace", "blobs", "snapshot")
_CONSUMER: Final = (*(f"R {{t*}}:{part}:OWN" for part in _FOLLOWED), "R {*}:edit-saves:*", *_READ_LIBRARY, *_REGISTRY)
_CONTROLLER: Final = _Rights(
    (
        *(f"RW {{t*}}:{part}:OWN" for part in _TRACE),
        *("RW {t*}:firehose", "RW {t*}:deadlines", "RW {t*}:ended", "RW {t*}:ended-bytes"),
        # A cluster finds the slot of control streams by the name without an engine.
        *("RW {t*}:control:", "W {t*}:control:*"),
        *(f"RW {{*}}:queue:{part}" for part in _QUEUE),
        *("W {*}:queue:data", "RW {*}:submitted:OWN", "RW lease:OWN", "RW vector:*"),
        *(f"RW {{library}}:library:{part}:OWN" for part in _LIBRARY),
        *("R {*}:edit-saves:*", *_SHARED, *_REGISTRY),
    ),
    (
        *("library_put", "library_remove"),
        *("record_create", "record_forget", "record_steer", "record_cancel", "record_pause", "record_sweep"),
        *("queue_put", "queue_withdraw", "renew", "blob_begin", "expire_once"),
    ),
    (*_READS, "hset", "hdel", "del", "expire", "info", "memory|usage", "zcard", "zrange"),
)
_RIGHTS: Final[dict[Role, _Rights]] = {
    "consumer": _Rights((*_CONSUMER, "R {t*}:firehose"), (), _READS),
    "controller": _CONTROLLER,
    # A controller that shares lifecycle events with others, and marks what it has decided.
    "guard": _Rights(
        (*_CONTROLLER.keys, "RW watch-groups", "RW {t*}:guarded:OWN"),
        (*_CONTROLLER.scripts, "watch_group_forget"),
        (
            *(*_CONTROLLER.commands, "hexists", "hkeys", "hsetnx", "xack", "xautoclaim", "xclaim", "xgroup|create"),
            *("xinfo|consumers", "xreadgroup"),
        ),
    ),
    "editor": _Rights(
        ("RW {*}:edits:*", "R {*}:edit-saves:*", "R {t*}:blobs:*", *_READ_LIBRARY, "R engines", "R engine:*"),
        ("edit_install", "edit_remove", "edit_load"),
        _READS,
    ),
    "operator": _Rights(
        (
            *(*_CONSUMER, "R {t*}:firehose", "RW {t0}:operate:*", "R {*}:queue:*", "RW dead"),
            *("R audit", "R audit-code:*"),
        ),
        ("control_drain",),
        (*_READS, "info", "memory|usage", "xlen", "xrange", "xdel", "zcard", "zrange", "script|load", "script|exists"),
    ),
    "engine": _Rights(
        (
            *("RW {*}:*", "RW engines", "RW engine:*", "RW bulk-store:*", "RW vector:*", "RW dead"),
            *("RW ~{dead}:*", "R lease:*", "RW audit", "RW audit-code:*"),
        ),
        (),
        (
            *(*_READS, "eval", "blpop", "hvals", "scard", "xlen", "xtrim", "xinfo|stream", "unlink", "del", "expire"),
            *("pexpire", "set", "sadd", "srem", "hset", "hdel", "xadd", "zrange", "zcard", "zscore", "xrange"),
            *("zremrangebyscore", "info", "memory|usage", "script|load", "script|exists"),
        ),
        eval=True,
    ),
}


@cache
def _commands_of(script: str) -> frozenset[str]:
    """The commands that a script calls, in lower case, with their subcommands (`memory|usage`)."""
    found = re.findall(r"""p?call\(\s*'([A-Z]+)'(?:\s*,\s*'([A-Z]+)')?""", assemble(script))
    return frozenset(
        f"{name}|{more}".lower() if name in ("MEMORY", "XINFO", "CLIENT") and more else name.lower()
        for name, more in found
    )


def all_scripts() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in FOLDER.glob("*.lua"))


def rules(
    role: Role, *, server: str = "7", prefix: str = "tw", tenant: str = "", pinned: bool = False, cluster: bool = False
) -> str:
    """The rules of a role, behind `user NAME` in a file of ACLs or behind `ACL SETUSER NAME`.

    Args:
        role: the role.
        server: one of `SERVERS`.
        prefix: the prefix of all keys.
        tenant: the tenant whose traces the user may use; `""` for those of all.
        pinned: whether the user may run only the scripts of this version of Tracewire, by their digests.
        cluster: whether the server belongs to a cluster, where clients send the text of scripts.
    """
    rights = _RIGHTS[role]
    scripts = [one for one in all_scripts() if one != "watch_group_forget"] if role == "engine" else rights.scripts
    commands = {*rights.commands, *(command for script in scripts for command in _commands_of(script))}
    run: Iterable[str] = ("evalsha",) if scripts else ()
    if pinned and role != "engine":
        run = [f"evalsha|{Script(script).digest}" for script in scripts]
    if scripts and cluster:
        commands.add("eval")
    allowed = [*dict.fromkeys((*_EVERYBODY, *sorted(commands), *run))]
    if server == "6.2":
        # A whole command: this server knows the subcommands of few.
        allowed = [*dict.fromkeys("xinfo" if one.startswith("xinfo|") else one for one in allowed)]
    keys = [_key(key, server, prefix, tenant, role) for key in rights.keys]
    words = ["on", "resetpass", "resetchannels", "resetkeys", *dict.fromkeys(keys), "-@all"]
    return " ".join([*words, *(f"+{one}" for one in allowed)])


def _key(key: str, server: str, prefix: str, tenant: str, role: Role) -> str:
    """The rule of one key."""
    mode, _, pattern = key.partition(" ")
    if tenant and role == "controller" and pattern in ("{t*}:firehose", "{t*}:deadlines"):
        # The events and deadlines of all tenants' traces.
        mode = "W"
    pattern = pattern.replace("OWN", f"{_escaped(tenant)}:*" if tenant else "*")
    # The marks of dead letters have a slot of their own.
    named = pattern.replace("~{dead}", f"{{{prefix}:dead}}") if pattern.startswith("~") else f"{prefix}:{pattern}"
    return f"~{named}" if server == "6.2" or mode == "RW" else f"%{mode}~{named}"


def _escaped(text: str) -> str:
    """A text as a pattern of Redis that stands for itself."""
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", text)


def users(roles: Sequence[Role], **options: object) -> list[str]:
    """The lines of a file of ACLs, one for each role, whose user is called `tracewire-ROLE`."""
    return [f"user tracewire-{role} {rules(role, **options)}" for role in roles]  # type: ignore[arg-type]
