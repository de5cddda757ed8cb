"""Run luacheck on the bus's scripts, each with what it includes: `python -m tests.support.luacheck`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from tracewire_bus.transport.scripts import FOLDER, assemble

#: What Redis gives a script besides Lua 5.1.
GLOBALS = ("redis", "cmsgpack", "struct", "KEYS", "ARGV")
COMMAND = (
    *("luacheck", "--no-color", "--codes", "--formatter", "plain", "--std", "lua51"),
    *("--max-line-length", "120", "--read-globals", *GLOBALS, "--", "-"),
)


def check(name: str) -> list[str]:
    """What luacheck says of a script, each with the line that it is about."""
    text = assemble(name)
    found = subprocess.run(COMMAND, input=text, capture_output=True, text=True).stdout
    lines = text.splitlines()
    said = []
    for line in found.splitlines():
        place = re.match(r"stdin:(\d+):", line)
        said.append(f"{name}.lua, {line}" + (f"\n    {lines[int(place[1]) - 1].strip()}" if place else ""))
    return said


def main() -> int:
    """Check all scripts. Returns how the process exits."""
    if shutil.which("luacheck") is None and os.environ.get("NO_LUACHECK"):
        print("luacheck could not be installed here: the scripts are not checked", file=sys.stderr)
        return 0
    if shutil.which("luacheck") is None:
        print("luacheck is missing: install Debian's package lua-check", file=sys.stderr)
        return 1
    said = [line for path in sorted(FOLDER.glob("*.lua")) for line in check(path.stem)]
    print("\n".join(said), end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
