"""Whether the hub from which a model is to come answers, asked before vLLM is imported.

Without an answer vLLM tries for minutes, file after file, before it says so.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["HubAway", "check_hub"]

logger = logging.getLogger("tracewire")

#: How long the hub may take to answer, in seconds; how often it is asked; and the pause before it is asked again.
_PATIENCE_S, _TRIES, _PAUSE_S = 3.0, 2, 0.5
_OFFLINE: Final = "HF_HUB_OFFLINE"
#: Switches of vLLM that have another source of models.
_OTHER_SOURCE: Final = "VLLM_USE_MODELSCOPE"


class HubAway(Exception):
    """The hub does not answer, and the model is not on this machine."""


def check_hub(arguments: Sequence[str]) -> None:
    """Check that the hub answers if MODEL, the first argument, is a name of the hub's.

    A model that is in the hub's cache on this machine is taken from there while the hub does not answer.

    Raises:
        HubAway: the hub does not answer, and its cache lacks the model.
    """
    model = arguments[0]
    if model.startswith("-") or model == "demo" or "://" in model or Path(model).exists() or _is_set(_OTHER_SOURCE):
        return
    # Imported here: a model's folder needs none of it.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return
    hub = constants.ENDPOINT
    # vLLM reads a quantization of a GGUF model behind a colon.
    name = model.partition(":")[0]
    revision = _revision(arguments)
    if not (problem := _problem(f"{hub}/{name}/resolve/{revision or 'main'}/config.json")):
        return
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except ValueError:
        # The name is none that the hub has.
        cached = False
    if not cached:
        raise HubAway(
            f"MODEL: no folder is called {model!r}, and the hub at {hub}, which may have a model of this name, cannot "
            f"be reached ({problem}). Give a model's folder, or 'demo'; or set HF_ENDPOINT to a hub that can be "
            "reached, or HF_HOME to a folder with the model in its cache"
        )
    logger.warning("the hub at %s cannot be reached (%s): %s is taken from its cache", hub, problem, model)
    os.environ[_OFFLINE] = "1"


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _revision(arguments: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--revision")
    found: str | None = parser.parse_known_args(list(arguments))[0].revision
    return found


def _problem(url: str) -> str:
    """Why nobody answers at a URL; `""` if somebody does, whatever the answer."""
    from huggingface_hub import get_session

    problem = ""
    for left in reversed(range(_TRIES)):
        try:
            get_session().head(url, timeout=_PATIENCE_S)
            return ""
        except Exception as error:
            # The library below differs between versions of the hub's client.
            problem = f"{type(error).__name__}: {error}"
            if left:
                time.sleep(_PAUSE_S)
    return problem
