"""Submit an intervention on a running language model, and let any number of consumers watch it live.

    import tracewire

    @tracewire.intervention
    def watch(model, tracer, live, layer=2):
        norms = [].save()
        for step in tracer.iter[:]:
            norms.append(model.residual(layer).output[-1].norm().item())

    async with tracewire.connect("redis://localhost") as client:
        model = await client.models.get("demo")
        async with client.trace(model, "def add(a, b):", watch(layer=3), max_tokens=64) as trace:
            async for output in trace:
                print(output.text, output.delta)
            result = await trace.result()

This package needs neither torch, vLLM nor nnsight; the engine, which does, is `tracewire_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracewire.admin.dead_letters import DeadLetter, DeadLetters
from tracewire.admin.edits import Edit, EditOutput, Edits, EditWatch
from tracewire.admin.engines import Draining, Engine, Engines, RedisMemory
from tracewire.admin.listing import Listing
from tracewire.admin.models import Models
from tracewire.admin.server import Server, ServerInfo
from tracewire.admin.traces import Traces
from tracewire.admin.watch import Watch, WatchGroups
from tracewire.capture.intervention import Intervention, intervention, save
from tracewire.extract.directions import LayerScore
from tracewire.extract.extraction import Extraction, ExtractOptions
from tracewire.extract.retroactive import ProbeReading
from tracewire.extract.sweep import StrengthOptions, StrengthSweep
from tracewire.library.entry import EntryOptions, LibraryEntry
from tracewire.library.resource import Library
from tracewire.traces.failures import (
    BusFilled,
    EditFailed,
    EngineFailed,
    EngineLost,
    InterventionError,
    TraceCancelled,
    TraceExpired,
    TraceFailed,
)
from tracewire.traces.large import load
from tracewire.traces.model import Model
from tracewire.traces.output import (
    Accepted,
    Change,
    Event,
    Final,
    Gap,
    Item,
    Lagging,
    Output,
    Paused,
    Restarted,
    Resumed,
    Shared,
    Steered,
    Waiting,
)
from tracewire.traces.recorder.comparing import ChoiceDifference, TokenDifference, ValueDifference
from tracewire.traces.recorder.fan import Fan, FanStep
from tracewire.traces.recorder.recording import Recording, Steering
from tracewire.traces.recorder.replaying import Replay
from tracewire.traces.served_models import ModelInfo
from tracewire.traces.state import Choice, Invoke, Result, Saves, State
from tracewire.traces.subscription import Subscription
from tracewire.traces.trace import Trace
from tracewire.traces.tracer import Tracer
from tracewire.traces.values import Values
from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.lifecycle import Lifecycle
from tracewire_bus.store.trace_list import ListedTrace
from tracewire_bus.store.trace_records import LiveState
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import (
    Ablate,
    AttentionPattern,
    Autoencoder,
    ChatMessage,
    Clamp,
    Coordinates,
    DeclaredIntervention,
    Features,
    FirstToken,
    HeadAblate,
    HeadProbe,
    Hold,
    Lens,
    Live,
    LogitLens,
    MessageDelta,
    Patch,
    Probe,
    Project,
    Status,
    Steer,
    SteerFeatures,
    StopWhen,
    ToolCall,
    ToolCallDelta,
    When,
)
from tracewire_bus.wire.refs import ArrayRef

from .checks import Duration
from .client import Client, connect
from .errors import (
    AlreadyEntered,
    AmbiguousResult,
    BlockError,
    BlockOnly,
    BrokenStream,
    BusFull,
    BusRefused,
    BusUnavailable,
    ClientClosed,
    ClientTooOld,
    ClosedError,
    CodeRefused,
    ConflictError,
    ConnectError,
    EditConflict,
    EditPending,
    EditRejected,
    EngineTooOld,
    EntryConflict,
    EventsLost,
    HarvestConflict,
    HarvestMissing,
    IntegrityError,
    InvalidChange,
    InvalidDataset,
    InvalidEdit,
    InvalidEntry,
    InvalidKey,
    InvalidRecording,
    InvalidRequestError,
    InvalidRules,
    InvalidUrl,
    LibraryMissing,
    MalformedEvent,
    MalformedRecord,
    NotAnArray,
    NotConnected,
    NotEnded,
    NotFoundError,
    NotLoaded,
    OutputsRead,
    Overloaded,
    PermissionDeniedError,
    PrivateRedisError,
    RetryableError,
    SaveMissing,
    ShardDamaged,
    StateMismatch,
    SteerRejected,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TextChanged,
    TokenizerUnavailable,
    TooManyChanges,
    TooManyEdits,
    TraceClosed,
    TraceEnded,
    TraceForgotten,
    TraceIdTaken,
    TraceRejected,
    TracewireError,
    UnexpectedReply,
    UnknownDeadLetter,
    UnknownEdit,
    UnknownEngine,
    UnknownEntry,
    UnknownModel,
    UnknownModulePath,
    UnknownOption,
    UnknownPosition,
    UnknownTrace,
    UnknownWatchGroup,
    UntransportableVariable,
    UnverifiedFinal,
    ValueMissing,
    VersionConflict,
    WrongEventLoop,
)
from .guards.alarm import Alarm, Decision
from .guards.guard import Guard
from .options import HarvestOptions, SamplingOptions, SweepOptions, TraceOptions, WithOptions
from .patch_sweep import PatchSweep
from .progress import HarvestProgress
from .public import publish
from .submission import Prompt, PromptInput

if TYPE_CHECKING:
    from tracewire import blocking, harvest

    __version__: str

__all__ = [
    "Ablate",
    "Accepted",
    "Alarm",
    "AlreadyEntered",
    "AmbiguousResult",
    "ArrayRef",
    "AttentionPattern",
    "Autoencoder",
    "BlockError",
    "BlockOnly",
    "BrokenStream",
    "BusFilled",
    "BusFull",
    "BusRefused",
    "BusUnavailable",
    "Change",
    "ChatMessage",
    "Choice",
    "ChoiceDifference",
    "Clamp",
    "Client",
    "ClientClosed",
    "ClientTooOld",
    "ClosedError",
    "CodeRefused",
    "ConflictError",
    "ConnectError",
    "Coordinates",
    "DeadLetter",
    "DeadLetters",
    "Decision",
    "DeclaredIntervention",
    "Draining",
    "Duration",
    "Edit",
    "EditConflict",
    "EditFailed",
    "EditOutput",
    "EditPending",
    "EditRejected",
    "EditWatch",
    "Edits",
    "Engine",
    "EngineFailed",
    "EngineLost",
    "EngineTooOld",
    "Engines",
    "EntryConflict",
    "EntryOptions",
    "Event",
    "EventsLost",
    "ExtractOptions",
    "Extraction",
    "Fan",
    "FanStep",
    "Features",
    "Final",
    "FirstToken",
    "Fold",
    "Gap",
    "Guard",
    "HarvestConflict",
    "HarvestMissing",
    "HarvestOptions",
    "HarvestProgress",
    "HeadAblate",
    "HeadProbe",
    "Hold",
    "IntegrityError",
    "Intervention",
    "InterventionError",
    "InvalidChange",
    "InvalidDataset",
    "InvalidEdit",
    "InvalidEntry",
    "InvalidKey",
    "InvalidRecording",
    "InvalidRequestError",
    "InvalidRules",
    "InvalidUrl",
    "Invoke",
    "Item",
    "Lagging",
    "LayerScore",
    "Lens",
    "Library",
    "LibraryEntry",
    "LibraryMissing",
    "Lifecycle",
    "ListedTrace",
    "Listing",
    "Live",
    "LiveState",
    "LogitLens",
    "MalformedEvent",
    "MalformedRecord",
    "MessageDelta",
    "Model",
    "ModelInfo",
    "Models",
    "NotAnArray",
    "NotConnected",
    "NotEnded",
    "NotFoundError",
    "NotLoaded",
    "Output",
    "OutputsRead",
    "Overloaded",
    "Patch",
    "PatchSweep",
    "Paused",
    "PermissionDeniedError",
    "PrivateRedisError",
    "Probe",
    "ProbeReading",
    "Project",
    "Prompt",
    "PromptInput",
    "Recording",
    "RedisMemory",
    "Replay",
    "Restarted",
    "Result",
    "Resumed",
    "RetryableError",
    "SamplingOptions",
    "SaveMissing",
    "Saves",
    "Server",
    "ServerInfo",
    "ShardDamaged",
    "Shared",
    "SparseAutoencoder",
    "State",
    "StateMismatch",
    "Status",
    "Steer",
    "SteerFeatures",
    "SteerRejected",
    "Steered",
    "Steering",
    "StopWhen",
    "StoreFull",
    "StoreRefused",
    "StoreUnavailable",
    "StrengthOptions",
    "StrengthSweep",
    "Subscription",
    "SweepOptions",
    "TextChanged",
    "TokenDifference",
    "TokenizerUnavailable",
    "TooManyChanges",
    "TooManyEdits",
    "ToolCall",
    "ToolCallDelta",
    "Trace",
    "TraceCancelled",
    "TraceClosed",
    "TraceEnded",
    "TraceExpired",
    "TraceFailed",
    "TraceForgotten",
    "TraceIdTaken",
    "TraceOptions",
    "TraceRejected",
    "Tracer",
    "Traces",
    "TracewireError",
    "UnexpectedReply",
    "UnknownDeadLetter",
    "UnknownEdit",
    "UnknownEngine",
    "UnknownEntry",
    "UnknownModel",
    "UnknownModulePath",
    "UnknownOption",
    "UnknownPosition",
    "UnknownTrace",
    "UnknownWatchGroup",
    "UntransportableVariable",
    "UnverifiedFinal",
    "ValueDifference",
    "ValueMissing",
    "Values",
    "VersionConflict",
    "Waiting",
    "Watch",
    "WatchGroups",
    "When",
    "WithOptions",
    "WrongEventLoop",
    "__version__",
    "blocking",
    "connect",
    "digest",
    "harvest",
    "intervention",
    "load",
    "save",
]

publish(value for name, value in list(globals().items()) if name in __all__)


def __getattr__(name: str) -> Any:
    # Loaded on first use, which is seldom.
    if name in ("blocking", "harvest", "inspect"):
        from importlib import import_module

        return import_module(f"tracewire.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("tracewire")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
