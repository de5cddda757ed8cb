"""Has vLLM schedule asynchronously on a CPU if its options say so. vLLM turns that off there."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["leave_scheduling"]


def leave_scheduling(platform: Any, put: Callable[[Any, str, Any], object]) -> None:
    """Have vLLM's platform of CPUs leave this option as it is. `put` is `setattr`, or pytest's."""
    update = platform.check_and_update_config.__func__

    def updating(cls, config):
        given = config.scheduler_config.async_scheduling
        update(cls, config)
        config.scheduler_config.async_scheduling = given

    put(platform, "check_and_update_config", classmethod(updating))
