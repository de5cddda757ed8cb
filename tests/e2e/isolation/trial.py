"""Tries kinds on an engine, and says what each did to the innocent traces beside it and after it."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Block

from .batch import Batch, Seen, is_late, run_batch, source_block
from .engine import TriedEngine
from .kinds import CANARY, Kind, marked_line

__all__ = ["PAUSE_S", "Trial", "Verdict", "excess", "trial"]

#: By how much the longest pause of an innocent trace may exceed the control's, in seconds.
PAUSE_S = 0.25

#: How many of the last control runs a pause is compared with, and how often a pause that exceeds them is measured anew,
#: each time beside another control run.
_RECENT, ROUNDS = 5, 5

#: How often a control is run while the machine is too busy for it.
_BUSY = 5

#: How much longer a batch may take than its patience, in times of what a batch without an offender takes.
_USUAL = 5

#: The block of a control's eighth trace.
_ENDS_EARLY = "for step in tracer.iter[:]:\n    if step == 3: raise ValueError('control')\n"

#: How long a batch may take before the engine counts as hung, and by how much memory may have grown, in bytes.
_PATIENCE_S, _GROWN = 45.0, 400 << 20

#: Reads what a block can leave behind in its process. A host refuses some of that.
_STATE = """import gc, logging, os, signal, sys, threading, warnings
import torch
import decimal, locale, numpy, random
import resource
model.model.layers[0].output
def read(what):
    try:
        return what()
    except OSError:
        return None
umask = os.umask(0o22)
os.umask(umask)
state = {
    "cwd": os.getcwd(),
    "environ": sorted(os.environ),
    "umask": umask,
    "default dtype": str(torch.get_default_dtype()),
    "default device": str(torch.get_default_device()),
    "grad": torch.is_grad_enabled(),
    "inference": torch.is_inference_mode_enabled(),
    "threads": torch.get_num_threads(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "matmul precision": torch.get_float32_matmul_precision(),
    "autocast": torch.is_autocast_enabled("cpu"),
    "mkldnn": torch._C._get_mkldnn_enabled(),
    "anomaly": torch.is_anomaly_enabled(),
    "function modes": torch._C._len_torch_function_stack(),
    "dispatch modes": torch._C._len_torch_dispatch_stack(),
    "denormals": bool(torch.tensor([1e-40]).mul(1.0).item() > 0),
    "seed": torch.initial_seed(),
    "recursion limit": sys.getrecursionlimit(),
    "switch interval": sys.getswitchinterval(),
    "gc": gc.isenabled(),
    "gc thresholds": list(gc.get_threshold()),
    "logging": logging.root.manager.disable,
    "warnings": [str(one[0]) + one[2].__name__ for one in warnings.filters[:3]],
    "alarm": getattr(signal.getsignal(signal.SIGALRM), "__name__", str(signal.getsignal(signal.SIGALRM))),
    "terminate": getattr(signal.getsignal(signal.SIGTERM), "__name__", str(signal.getsignal(signal.SIGTERM))),
    "trace": str(sys.gettrace()) + str(sys.getprofile()),
    "stdout": sys.stdout is None,
    "excepthook": sys.excepthook is None,
    "integer text": sys.get_int_max_str_digits(),
    "locale": locale.setlocale(locale.LC_ALL),
    "decimal": decimal.getcontext().prec,
    "numpy": str(numpy.geterr()),
    "import path": len(sys.path) + len(sys.meta_path),
    "modules": all(name in sys.modules for name in ("torch", "nnsight", "tracewire_engine", "os")),
    "python threads": sum(thread.is_alive() for thread in threading.enumerate()),
    "limits": read(lambda: list(resource.getrlimit(resource.RLIMIT_NOFILE))),
    "nice": read(lambda: os.nice(0)),
    "descriptors": read(lambda: len(os.listdir("/proc/self/fd")) // 20),
}.save()
"""


@dataclass
class Verdict:
    """What one kind did.

    Attributes:
        name: of the kind.
        status, error, line, message: of the offender's trace at its end.
        unmet: how the offender's end differs from what the kind says; empty if it does not.
        harmed: the innocent traces whose outcome differs from the control's; traces that come later are `later NAME`.
        late: those that ended with a `BlockTimeout` of their own, as they also do on a machine that is too busy.
        restarted: whether the engine's process was lost, or an innocent trace needed a second attempt.
        hung: whether the engine had to be killed.
        pause_s: by how much the longest pause exceeds the control's, in seconds. If it was measured again: the
            difference of the medians.
        pauses, control_pauses: the longest pauses of each run beside the kind, and of the control runs between them,
            in seconds, if they were measured again.
        left: what is left behind in the engine: state, processes, memory.
        stole: whether the offender saved the secret, or rows of others.
    """

    name: str
    status: str = ""
    error: str = ""
    line: int | None = None
    message: str = ""
    unmet: str = ""
    harmed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    restarted: bool = False
    hung: bool = False
    pause_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    control_pauses: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    stole: bool = False

    @property
    def stalled(self) -> bool:
        return self.pause_s > PAUSE_S

    @property
    def outcome(self) -> str:
        """The kind's outcome in one word, the worst first."""
        if self.hung:
            return "hung"
        if self.restarted:
            return "restarted"
        if self.harmed:
            return "harmed"
        if self.stole:
            return "read"
        if self.stalled:
            return "stalled"
        return "left" if self.left else "unmet" if self.unmet else "contained"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome}


class Trial:
    """An engine, its bus and its control runs. `trial` makes one."""

    def __init__(self, bus: Bus, engine: TriedEngine, folder: Path, port: int) -> None:
        self.bus, self.engine = bus, engine
        self._folder, self._port, self._count = folder, port, 0
        self.control: dict[str, tuple[Any, ...]] = {}
        #: The longest pauses of the last control runs, in seconds: the machine's load changes.
        self._pauses: deque[float] = deque(maxlen=_RECENT)
        #: How long the last batches took that had no offender, in seconds.
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._state: dict[str, Any] = {}
        self._processes = 0
        #: The model's processes when the last kind was tried.
        self._tried: set[psutil.Process] = set()

    async def begin(self) -> None:
        """Start the engine, and run the control."""
        await self.engine.start(self.bus)
        await self._run_control()

    async def _run_control(self) -> None:
        """Run batches whose eighth trace is harmless, and look at the engine's state.

        Raises:
            RuntimeError: they differ from each other, or from those of an earlier engine.
        """
        ends_early = source_block(_ENDS_EARLY)
        controls = [await self._control_batch(one) for one in (None, ends_early, None, ends_early)][1:]
        outcomes = [self.control or controls[0].outcomes(), *(one.outcomes() for one in controls)]
        if any(one != outcomes[0] for one in outcomes):
            raise RuntimeError("control runs differ from each other")
        if any(status != "finished" for status, *_ in outcomes[0].values()):
            raise RuntimeError(f"a control run did not finish: {outcomes[0]}")
        self.control = outcomes[0]
        self._pauses.extend(one.pause_s for one in controls)
        state = await self._state_now()
        if state is None:
            raise RuntimeError("a block cannot read the engine's state")
        self._state, self._processes = state, len(self.engine.below())

    async def _control_batch(self, eighth: Block | None) -> Batch:
        """Run a batch with a harmless eighth trace, again while the machine is too busy for it."""
        for _ in range(_BUSY):
            batch = await self._batch(eighth)
            if not batch.late:
                break
        return batch

    async def again(self) -> None:
        """Have an engine in a clean state: the one that its supervisor has started, or else one started anew."""
        if self.engine.model_processes() != self._tried:
            with suppress(RuntimeError, TimeoutError):
                await self.engine.wait_serving(self.bus)
                return await self._run_control()
        self.engine.stop()

        async def forgotten() -> bool:
            return not await self.bus.registry.list()

        await until(forgotten)
        await self.begin()

    async def judge(self, kind: Kind) -> Verdict:
        """Try a kind. If it leaves the engine changed, the engine is started anew."""
        victim = self._folder / "victim"
        victim.unlink(missing_ok=True)
        victim.write_text(CANARY)
        verdict, before = Verdict(kind.name), self.engine.model_processes()
        self._tried, memory = before, _memory(before)

        async def on_late() -> None:
            # An engine that was lost is on its way again.
            verdict.hung = self.engine.model_processes() == before
            if verdict.hung:
                self.engine.kill_model()

        batch = await self._batch(self._block(kind), on_late, kind.patience_s)
        self._compare(batch, kind, verdict)
        lost = self.engine.model_processes() != before or any(one.attempts > 1 for one in batch.innocents.values())
        verdict.restarted = lost or verdict.hung
        if not verdict.restarted:
            later = await self._batch(None, on_late)
            self._note(verdict, later, "later ")
            verdict.restarted = self.engine.model_processes() != before
            self._pauses.append(later.pause_s)
            verdict.pause_s = excess([batch.pause_s], self._pauses)
        if not verdict.restarted:
            await self._look(verdict, victim, before, memory)
            verdict.restarted = self.engine.model_processes() != before
        if verdict.outcome == "stalled" or (verdict.late and not verdict.harmed and not verdict.restarted):
            await self._measure_again(kind, verdict)
        if verdict.restarted or verdict.harmed:
            await self.again()
        return verdict

    def _block(self, kind: Kind) -> Block:
        return source_block(kind.source.replace("{folder}", str(self._folder)).replace("{port}", str(self._port)))

    async def _measure_again(self, kind: Kind, verdict: Verdict) -> None:
        """Try a kind in turns with a control: the machine's load makes both late, and the kind only one.

        What the kind does to other traces in these runs counts too.
        """
        before, late = self.engine.model_processes(), [0, 0]
        for _ in range(ROUNDS):
            control = await self._batch(source_block(_ENDS_EARLY), self.engine.kill_late)
            batch = await self._batch(self._block(kind), self.engine.kill_late, kind.patience_s)
            verdict.pauses.append(round(batch.pause_s, 3))
            verdict.control_pauses.append(round(control.pause_s, 3))
            late = [late[0] + bool(control.late), late[1] + bool(batch.late)]
            self._note(verdict, batch)
            verdict.restarted = self.engine.model_processes() != before
            if verdict.restarted or verdict.harmed:
                return
        self._pauses.extend(verdict.control_pauses)
        verdict.pause_s = excess(verdict.pauses, verdict.control_pauses)
        if late[1] > late[0] + 1:
            verdict.harmed += verdict.late

    def _note(self, verdict: Verdict, batch: Batch, when: str = "") -> None:
        """Note which innocent traces of a batch differ from the control's."""
        for name in _differing(self.control, batch.outcomes()):
            where = verdict.late if name in batch.late else verdict.harmed
            if when + name not in where:
                where.append(when + name)

    async def _look(self, verdict: Verdict, victim: Path, before: set[psutil.Process], memory: int) -> None:
        """Note what a kind has left behind. What is left is this kind's, and not that of those that come later."""
        if not _is_whole(victim):
            verdict.left.append("a file of the engine's user")
        state = await self._state_now()
        if state is None:
            verdict.harmed.append("later blocks")
            return
        # A host may be refused to read something, which depends on what the kernel has cached.
        known = [name for name, value in self._state.items() if value is not None and state.get(name) is not None]
        verdict.left += [name for name in known if state[name] != self._state[name]]
        if not await self.engine.settled(self._processes):
            verdict.left.append("processes")
        if _memory(before) - memory > _GROWN:
            verdict.left.append("memory")
        if verdict.left:
            self._state, self._processes = state, len(self.engine.below())

    def _compare(self, batch: Batch, kind: Kind, verdict: Verdict) -> None:
        offender = batch.offender
        assert offender is not None
        verdict.status = offender.status
        if offender.error is not None:
            error = offender.error
            verdict.error, verdict.line, verdict.message = error.type, error.line, error.message[:200]
        verdict.unmet = unmet(kind, offender)
        self._note(verdict, batch)
        verdict.stole = CANARY in repr(offender.saves) or _rows_of_others(kind, offender)

    async def _batch(self, offender: Any, on_late: Any = None, patience_s: float = _PATIENCE_S) -> Batch:
        self._count += 1
        # A busy machine is late with harmless batches too.
        usual = statistics.median(self._took) if self._took else patience_s
        patience_s += _USUAL * usual
        batch = await run_batch(self.bus, f"trial-{self._count}", offender, patience_s, on_late=on_late)
        if offender is None:
            self._took.append(batch.took_s)
        return batch

    async def _state_now(self) -> dict[str, Any] | None:
        """The state that a block sees; `None` if its block fails."""
        state: dict[str, Any] | None = None
        for _ in range(_BUSY):
            batch = await self._batch(source_block(_STATE))
            assert batch.offender is not None
            state = batch.offender.saves.get("state")
            if state is not None or not is_late(batch.offender):
                break
        return state


def excess(pauses: Sequence[float], controls: Iterable[float]) -> float:
    """By how much the median pause exceeds the median control's, in seconds."""
    return round(max(0.0, statistics.median(pauses) - statistics.median(controls)), 3)


def _is_whole(victim: Path) -> bool:
    return not victim.is_symlink() and victim.exists() and victim.read_text() == CANARY


def _rows_of_others(kind: Kind, offender: Seen) -> bool:
    """Whether the offender saved rows, or saves, of the innocent traces."""
    saves = offender.saves
    if kind.name == "strided-read":
        others = saves.get("others")
        return others is not None and bool(abs(others[1:].astype("float32")).sum())
    if kind.name == "kv-cache-read":
        return any(saves.get("others") or ())
    return kind.name == "others-saves-read" and bool(saves.get("stolen"))


def unmet(kind: Kind, offender: Seen) -> str:
    """How the offender's end differs from what the kind says; `""` if it does not."""
    status, error = offender.status, offender.error
    if not status:
        return "it did not end"
    if offender.broken:
        return offender.broken
    if kind.meets == "finishes" and status not in ("finished", "stopped"):
        return f"it ended as {status}"
    if kind.meets != "error":
        return ""
    if error is None:
        return f"it has no error, and ended as {status}"
    if error.type == "EngineLost":
        return "its error is the loss of the engine"
    if kind.error and not re.fullmatch(kind.error, error.type):
        return f"its error is a {error.type}"
    line = marked_line(kind.source)
    return f"its error names line {error.line}, not {line}" if line is not None and error.line != line else ""


def _differing(control: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [name for name, outcome in control.items() if found.get(name) != outcome]


def _memory(processes: set[psutil.Process]) -> int:
    try:
        return sum(process.memory_info().rss for process in processes)
    except psutil.Error:
        return 0


@asynccontextmanager
async def trial(folder: Path, *options: str) -> AsyncIterator[Trial]:
    """An engine with these options, on a Redis of its own, with its control runs done."""
    async with EmbeddedServer.start(port=_free_port()) as server, Bus.open(server.url) as bus:
        await bus.command("SET", "canary", CANARY)
        port = int(server.url.rsplit(":", 1)[1])
        victims = folder / "victims"
        victims.mkdir()
        engine = TriedEngine(server.url, folder, *options)
        running = Trial(bus, engine, victims, port)
        try:
            await running.begin()
            yield running
        finally:
            engine.stop()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
