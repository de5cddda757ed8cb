"""The service's settings, read at its start."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tracewire import Live, Probe, Steer

__all__ = ["Bend", "Settings"]

_DEMO = Path(__file__).resolve().parents[1] / "demo_model"


@dataclass(frozen=True)
class Bend:
    """A direction in the residual stream that answers are bent along, and read along.

    Both count in multiples of `distance`, that of the two kinds of text whose difference the direction is: an `alpha`
    of 1 moves a hidden state as far as from the mean of one to the mean of the other, and the meter reads in the same
    unit.
    """

    direction: np.ndarray[Any, Any]
    layer: int
    distance: float

    @classmethod
    def demo(cls) -> Bend:
        """The demo model's: from prose towards code."""
        facts = json.loads((_DEMO / "direction.json").read_text())
        return cls(np.load(_DEMO / "direction.npy"), facts["layer"], facts["distance"])

    @cached_property
    def interventions(self) -> list[Steer | Probe]:
        """Bend, then read what came of it. They are the same for every answer, so engines keep their vectors once."""
        at = f"residual({self.layer})"
        direction = np.asarray(self.direction, np.float32)
        return [
            Steer(at, direction * np.float32(self.distance), scale=Live("alpha")),
            Probe("meter", at, weight=direction / np.float32(self.distance)),
        ]


@dataclass(frozen=True)
class Settings:
    """The service's settings. `url` is the bus; without one, `TRACEWIRE_URL` counts.

    Attributes:
        name: under which the engines know the service, all its processes together.
        sampling: sampling params of every answer, by vLLM's names, under those of the conversation.
        deadline_s: how long an answer may take in all, waiting for an engine included. Nobody holds a detached trace,
            so this is what ends one that hangs.
        patience_s: how long a request waits for Redis.
        keep_alive_s: how often a silent stream says that it is there.
        stall_s: how long a client may leave a stream unread.
        remembered: how many conversations a process keeps in memory.
    """

    url: str | None = None
    prefix: str = "tw"
    model: str = "demo"
    name: str = "chat"
    bend: Bend = field(default_factory=Bend.demo)
    sampling: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 120.0
    patience_s: float = 5.0
    keep_alive_s: float = 15.0
    stall_s: float = 30.0
    remembered: int = 10_000

    @classmethod
    def from_environment(cls) -> Settings:
        """What `uvicorn --factory` starts with."""
        return cls(
            url=os.environ.get("TRACEWIRE_URL"),
            prefix=os.environ.get("CHAT_PREFIX", "tw"),
            model=os.environ.get("CHAT_MODEL", "demo"),
        )
