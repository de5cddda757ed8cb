"""`tracewire guard`: a guard of all traces of a model, by the rules in a file."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from tracewire.client import connect
from tracewire.errors import InvalidRules
from tracewire.guards.audit import AuditLine
from tracewire.guards.guard import Guard, check_surroundings
from tracewire.guards.rules import read_rules

from .commands import UsageError, add_command
from .printing import print_json_line, remark

__all__ = ["add_guard"]


def add_guard(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    guard = add_command(
        commands,
        "guard",
        _guard,
        parents=parents,
        help="watch probes of all traces of a model, and pause, steer or cancel traces by the rules in a file",
        exits={0: "ended by SIGTERM, or the rules are right (--check)", 1: "an error", 2: "a rule is wrong"},
        examples=("tracewire guard rules.toml", "tracewire guard rules.toml --dry-run --json"),
        json="each decision as a JSON object on a line, as in the audit file",
    )
    guard.add_argument("rules", metavar="FILE", help="the rules, in TOML (docs/guards.md)")
    what = "the guard's name in its group, by which it takes its traces up again (default: the host and the process)"
    guard.add_argument("--name", metavar="NAME", help=what)
    guard.add_argument("--dry-run", action="store_true", help="act on no trace, and print what the guard would do")
    guard.add_argument("--audit", metavar="FILE", help="append a line of JSON for each decision (default: the rules')")
    guard.add_argument("--check", action="store_true", help="check the rules, and do nothing else")


class _Printing(Guard):
    """A guard that prints each decision."""

    as_json = False

    async def joined(self) -> None:
        """Say that the guard has begun."""
        dry = ", dry run" if self.rules.dry_run else ""
        remark(f"guard {self.name} of {self.rules.group}: {len(self.rules.rules)} rules for {self.rules.model}{dry}")

    async def decided(self, line: AuditLine) -> None:
        """Print a decision."""
        if self.as_json:
            print_json_line(msgspec.to_builtins(line, enc_hook=repr))
            return
        alarm = line.alarm
        where = f"{alarm.trace_id}\ttoken {alarm.token}\t{alarm.rule}\t{alarm.save} = {alarm.value:g}"
        paused = "" if line.pause_seconds is None else f"\tpaused after {line.pause_seconds * 1000:.0f} ms"
        reason = f"\t{line.reason}" if line.reason else ""
        print(f"{where}\t{line.outcome} {line.do}".rstrip() + paused + reason, flush=True)


async def _guard(options: argparse.Namespace) -> int:
    try:
        rules = read_rules(options.rules)
        if options.dry_run:
            rules = msgspec.structs.replace(rules, dry_run=True)
        if options.audit is not None:
            rules = msgspec.structs.replace(rules, audit=options.audit)
        check_surroundings(rules)
    except InvalidRules as error:
        raise UsageError(str(error)) from None
    if options.check:
        remark(f"{options.rules}: {len(rules.rules)} rules for {rules.model}")
        return 0
    async with connect(options.url, prefix=options.prefix) as client:
        guard = _Printing(client, rules, name=options.name)
        guard.as_json = options.json
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_on_sigterm, group.cancel_scope)
            await guard.run()
    return 0


async def _stop_on_sigterm(scope: anyio.CancelScope) -> None:
    """End the guard, which leaves its traces to the others of its group."""
    with anyio.open_signal_receiver(signal.SIGTERM) as received:
        async for _ in received:
            scope.cancel()
            return
