"""`tracewire acl`: Redis's access rules for each role, and the scripts that their users run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from tracewire import connect
from tracewire.error_mapping import bus_errors
from tracewire_bus.store.access import ROLES, SERVERS, users

from .commands import UsageError, add_command
from .printing import remark

__all__ = ["add_acl"]

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def add_acl(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    acl = add_command(
        commands,
        "acl",
        _acl,
        parents=parents,
        help="print the access rules of Redis's users, or load the scripts that they run",
        examples=("tracewire acl controller consumer --tenant acme", "tracewire acl --load"),
    )
    acl.add_argument("roles", nargs="*", metavar="ROLE", help=f"{', '.join(ROLES)} (default: all)")
    acl.add_argument("--tenant", default="", help="only traces whose ids begin with TENANT:")
    acl.add_argument("--server", choices=SERVERS, default="7", help="6.2, or 7 and later and Valkey (default: 7)")
    acl.add_argument("--pinned", action="store_true", help="only the scripts of this version, by their digests")
    acl.add_argument("--cluster", action="store_true", help="for a cluster, where clients send the text of scripts")
    acl.add_argument("--load", action="store_true", help="load the scripts of this version into the Redis at --url")


async def _acl(options: argparse.Namespace) -> int:
    if options.load:
        async with connect(options.url, prefix=options.prefix) as client:
            with bus_errors():
                loaded = await client._session.open_bus().registry.load_scripts()
        remark("loaded the scripts" if loaded else "the scripts were loaded already")
        return 0
    for role in options.roles:
        if role not in ROLES:
            raise UsageError(f"ROLE: expected one of {', '.join(ROLES)}, got {role!r}")
    if options.tenant and not _TENANT.fullmatch(options.tenant):
        raise UsageError(f"--tenant: expected letters, digits, '.', '_' or '-', got {options.tenant[:80]!r}")
    roles = options.roles or ROLES
    chosen = {name: getattr(options, name) for name in ("server", "prefix", "tenant", "pinned", "cluster")}
    for line in users(roles, **chosen):
        print(line)
    return 0
