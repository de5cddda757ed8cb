"""The parts of an installation that commands need and a client lacks."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

__all__ = ["COMMANDS", "ENGINE", "missing_engine", "missing_gateway"]

#: The entry-point group by which installed packages add subcommands.
COMMANDS = "tracewire.commands"
#: The subcommand of the engine's package.
ENGINE = "engine"
#: What an engine's extras install, by the names of their modules. The engine's own package comes with every client.
_ENGINE_NEEDS = ("nnsight", "psutil", "torch", "vllm", "zmq")
_GATEWAY_NEEDS = ("fastapi", "uvicorn")


def missing_engine() -> str:
    """Why no engine can start here, and what to install; `""` if one can."""
    named = any(found.name == ENGINE for found in entry_points(group=COMMANDS))
    missing = _missing(_ENGINE_NEEDS)
    if named and not missing:
        return ""
    lacks = f" (missing: {missing})" if named else ""
    advice = "on a GPU host, pip install 'tracewire[engine-gpu]'; on a CPU, make setup in a checkout of the project"
    return f"no engine is installed here{lacks}: {advice}"


def missing_gateway() -> str:
    """Why no gateway can start here, and what to install; `""` if one can."""
    missing = _missing(_GATEWAY_NEEDS)
    return f"the gateway is not installed (missing: {missing}): pip install 'tracewire[gateway]'" if missing else ""


def _missing(names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if find_spec(name) is None)
