"""Where the command `tracewire` begins. It imports the command line, which takes a moment in which Ctrl-C may come."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run the command. Returns the exit status."""
    try:
        from .main import main as run
    except KeyboardInterrupt:
        return 130
    return run()
