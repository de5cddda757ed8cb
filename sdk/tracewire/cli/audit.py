"""`tracewire audit`: what engines were asked for, by whom, and what they decided."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from tracewire.client import connect
from tracewire_bus.store.audit import AuditEntry, AuditLog

from .commands import add_command
from .format import timestamp
from .printing import print_json_line, print_rows, remark

__all__ = ["add_audit"]

_KINDS = ("submit", "steer", "pause", "resume", "cancel", "drain", "edit", "guard")
_COLUMNS = ("time", "decision", "kind", "name", "tenant", "key", "by", "code", "reason")


def add_audit(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    audit = add_command(
        commands,
        "audit",
        _audit,
        parents=parents,
        help="print what engines were asked for, by which keys, and what they decided (tracewire engine --audit)",
        exits={1: "an error, or no code of this hash is kept"},
        examples=("tracewire audit --refused --follow", "tracewire audit --code HASH"),
        json="each entry as a JSON object on a line: time, engine, kind, name, decision, key, tenant, reason, ...",
    )
    audit.add_argument("--kind", choices=_KINDS, help="only decisions of this kind")
    audit.add_argument("--key", metavar="ID", help="only those about this key")
    audit.add_argument("--tenant", metavar="TENANT", help="only those about keys of this tenant")
    audit.add_argument("--name", metavar="NAME", help="only those about this trace, edit or engine")
    audit.add_argument("--refused", action="store_true", help="only refusals")
    audit.add_argument("--follow", action="store_true", help="go on with new entries until Ctrl-C")
    audit.add_argument("--code", metavar="HASH", help="print the code of this hash, and nothing else")


async def _audit(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        bus = client._session.open_bus()
        log = AuditLog(bus)
        if options.code:
            return await _code(log, options.code)
        shown = 0
        async for entry in log.read(follow=options.follow):
            if _is_wanted(entry, options):
                shown += 1
                _print(entry, options)
        if not shown:
            remark("No such entry. An engine writes a trail with --audit, and by default with --keyring.")
    return 0


async def _code(log: AuditLog, hash: str) -> int:
    text = await log.code(hash)
    if text is None:
        remark(f"tracewire: no code of hash {hash} is kept")
        return 1
    print(text, end="")
    return 0


def _is_wanted(entry: AuditEntry, options: argparse.Namespace) -> bool:
    wanted = {"kind": options.kind, "key": options.key, "tenant": options.tenant, "name": options.name}
    if options.refused and entry.decision != "refused":
        return False
    return all(value is None or getattr(entry, field) == value for field, value in wanted.items())


def _print(entry: AuditEntry, options: argparse.Namespace) -> None:
    if options.json:
        print_json_line(msgspec.to_builtins(entry))
        return
    code = ",".join(one[:12] for one in entry.code)
    row = {**{name: getattr(entry, name) for name in _COLUMNS}, "time": timestamp(entry.time), "code": code}
    print_rows(_COLUMNS, [[row[name] for name in _COLUMNS]])
