"""`tracewire approve`: approve a block for engines that run approved code only (`tracewire engine --code listed`)."""

from __future__ import annotations

import argparse
import getpass
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from tracewire.client import connect
from tracewire.errors import TraceRejected
from tracewire_bus.domain.approvals import Approvals, ApprovalsError
from tracewire_bus.domain.code_identity import code_hash, described
from tracewire_bus.store.audit import AuditLog
from tracewire_bus.wire.messages import Block

from .blocks import BLOCK, load_block
from .commands import UsageError, add_command
from .printing import print_json, remark

__all__ = ["add_approve"]

_HASH = re.compile("[0-9a-f]{64}")


def add_approve(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    approve = add_command(
        commands,
        "approve",
        _approve,
        parents=parents,
        help="approve a block for engines with --code listed: shows its code, or a diff to what was approved before",
        exits={0: "the block is approved", 1: "it is not, or the file cannot be read or written"},
        examples=("tracewire approve probes.py::watch --to approved.json",),
        json="an object: name, hash, approved",
    )
    what = "the block, whose file is executed; or the hash of code in the audit trail of --url"
    approve.add_argument("block", metavar=f"{BLOCK}|HASH", help=what)
    approve.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FILE",
        help="the file of approved blocks (tracewire engine --approved)",
    )
    approve.add_argument(
        "--argument",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable with a default that callers may pass (repeatable); those without a default always are",
    )
    approve.add_argument("--yes", action="store_true", help="do not ask")
    approve.add_argument("--revoke", action="store_true", help="take the approval of this block back")


async def _approve(options: argparse.Namespace) -> int:
    name, code, text = await _found(options)
    approvals = Approvals(options.to)
    try:
        if options.revoke:
            approved = False
            was = "is not approved any more" if approvals.remove(code) else "was not approved"
            remark(f"tracewire: {name} ({code}) {was}")
        else:
            approved = await _asked(options, approvals, name, code, text)
    except ApprovalsError as error:
        remark(f"tracewire: {error}")
        return 1
    if options.json:
        print_json({"name": name, "hash": code, "approved": approved})
    elif approved:
        print(code)
    return 0 if approved or options.revoke else 1


async def _found(options: argparse.Namespace) -> tuple[str, str, str]:
    """The name of the block, the hash of its code, and all that the hash covers, as text."""
    if _HASH.fullmatch(options.block) is None:
        block = _block(options)
        return block.name, code_hash(block), described(block)
    async with connect(options.url, prefix=options.prefix) as client:
        text = await AuditLog(client._session.open_bus()).code(options.block)
    if text is None:
        raise UsageError(f"no code of hash {options.block} is in the audit trail (tracewire engine --audit)")
    return text.removeprefix("block ").partition("(")[0], options.block, text


async def _asked(options: argparse.Namespace, approvals: Approvals, name: str, code: str, text: str) -> bool:
    """Show a block, ask whether it may run, and approve it. Returns whether it is approved."""
    if code in approvals.hashes():
        remark(f"tracewire: {name} is approved already")
        return True
    remark(approvals.difference(name, text) or text)
    if not options.yes:
        if not sys.stdin.isatty():
            raise UsageError("expected --yes, or a terminal to ask on")
        answer = await anyio.to_thread.run_sync(input, f"approve {name} ({code[:12]})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            return False
    approvals.add(name, code, text, getpass.getuser())
    return True


def _block(options: argparse.Namespace) -> Block:
    """The block as a caller submits it who passes these arguments. Their values do not count."""
    try:
        found = load_block(options.block)
        needed = found.required
        return found(**dict.fromkeys([*needed, *options.argument])).block()
    except (ValueError, TypeError, TraceRejected) as error:
        raise UsageError(str(error)) from error
