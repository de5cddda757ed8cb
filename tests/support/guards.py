"""Guards over traces of the scripted engine: what they should find, and what their audit says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.scripted_engine import expected

__all__ = ["ABOVE", "alarms_of", "audited", "ended", "guard_process", "rules", "write_rules"]

#: The scripted engine's tokens, the first number of each save, go up to 4000: about one in 20 is above.
ABOVE = 3800.0


def rules(**more: Any) -> dict[str, Any]:
    """Rules that look at the scripted engine's token ids."""
    rule = {"name": "high", "save": "acts", "output": 0, "above": ABOVE, "do": "resume", **more.pop("rule", {})}
    return {"model": "tiny", "since": "start", "rules": [rule], **more}


def alarms_of(prompt: str, tokens: int) -> list[int]:
    """At which tokens of a prompt the rule `high` goes off."""
    found, sleeps = [], False
    for index, token in enumerate(expected(prompt, tokens)[0]):
        if token > ABOVE and not sleeps:
            found.append(index)
        sleeps = token > ABOVE
    return found


def audited(path: Path) -> list[dict[str, Any]]:
    """The lines of an audit file, but a last one that a killed guard has not written whole."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def guard_process(url: str, prefix: str, rules: Path, name: str, *more: str) -> subprocess.Popen[str]:
    """`tracewire guard` as a process."""
    command = [sys.executable, "-m", "tracewire.cli", "guard", str(rules), "--name", name]
    where = ["--url", url, "--prefix", prefix, *more]
    # What it asks at the terminal, nobody answers.
    return subprocess.Popen([*command, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def write_rules(path: Path, given: dict[str, Any]) -> None:
    """Write rules as TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if name != "rules"]
    for rule in given["rules"]:
        lines += ["[[rules]]", *(f"{name} = {json.dumps(value)}" for name, value in rule.items() if value is not None)]
    path.write_text("\n".join(lines))


def ended(process: subprocess.Popen[str]) -> None:
    """Kill a process that `guard_process` has started, and wait for it."""
    process.kill()
    process.communicate()
