"""How long an engine's threads run. EngineCore plans the steps on its main thread, and on one GPU runs them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["CoreTime"]


_FIGURES = ("ran", "waited", "slept", "faults", "other_threads", "other_processes")


class _Thread(NamedTuple):
    """What the kernel says of a thread."""

    #: Nanoseconds on a core, nanoseconds that the thread has waited for one, how often the thread slept, and how often
    #: it touched a page that it had to wait for.
    ran: int
    waited: int
    slept: int
    faults: int
    #: Which of the keys of `CoreTime.ms` counts its time on a core.
    role: str


@dataclass
class CoreTime:
    """The time that the threads of an engine take on cores, since this object was made.

    Args:
        parent: the id of the engine's process.
    """

    parent: int
    _before: dict[int, _Thread] = field(init=False)

    def __post_init__(self) -> None:
        self._before = dict(self._read())

    def _read(self) -> Iterator[tuple[int, _Thread]]:
        """Each thread of the process and of those below, by its id."""
        above = psutil.Process(self.parent)
        for process in [above, *above.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                core = "EngineCore" in process.name()
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    main = core and int(task.name) == process.pid
                    role = "ran" if main else "other_threads" if core else "other_processes"
                    with suppress(OSError):
                        yield int(task.name), _described(task, role)

    def ms(self, steps: int) -> dict[str, float]:
        """Milliseconds a step, but for `slept` and `faults`, numbers a step.

        `ran`, `waited`, `slept` and `faults` are of EngineCore's main thread, or of several EngineCores': on a core,
        waiting for one, how often they waited for something else, such as the interpreter's lock or the GPU, and page
        faults. `other_threads` is the time of EngineCore's other threads on cores, `other_processes` that of the
        engine's other processes.
        """
        before, taken = self._before, dict.fromkeys(_FIGURES, 0.0)
        for name, now in self._read():
            was = before.get(name, _Thread(0, 0, 0, 0, now.role))
            taken[now.role] += (now.ran - was.ran) / 1e6
            if now.role == "ran":
                taken["waited"] += (now.waited - was.waited) / 1e6
                taken["slept"] += now.slept - was.slept
                taken["faults"] += now.faults - was.faults
        return {name: round(value / steps, 3) for name, value in taken.items()}


def _described(task: Path, role: str) -> _Thread:
    ran, waited, _ = (task / "schedstat").read_text().split()
    # The name, in parentheses, may have spaces. Behind it come the state and six numbers, then the counts.
    counts = (task / "stat").read_text().rpartition(")")[2].split()
    slept = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0]
    return _Thread(int(ran), int(waited), int(slept), int(counts[7]) + int(counts[9]), role)
