"""Writes the files of access rules in deploy/redis/ anew: `python -m tests.support.access_files`."""

from __future__ import annotations

from tests.support import ROOT
from tracewire_bus.store.access import ROLES, users

__all__ = ["FILES", "FOLDER"]

FOLDER = ROOT / "deploy/redis"
#: The files with their content.
FILES = {
    f"users{'-cluster' if cluster else ''}{'' if server == '7' else '-6.2'}.acl": "\n".join(
        users(ROLES, server=server, cluster=cluster)
    )
    + "\n"
    for server in ("6.2", "7")
    for cluster in (False, True)
}


if __name__ == "__main__":
    for name, text in FILES.items():
        (FOLDER / name).write_text(text)
