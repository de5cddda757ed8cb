"""Writes down what a schema puts on the bus, for later versions to read: `python -m tests.golden.record`.

It makes a folder named for the schema that this code writes, and refuses to touch one that is there: what was written
down once is never written again, since that is the point of it. Two files:

- `messages.json`: one of every message, as bytes and as what they decode to.
- `bus.json`: every key of a Redis on which a client, an adapter and its scripted engine were at work: a trace that was
  steered, paused and resumed and has ended; one in the middle, with a snapshot and orders that its engine has not read;
  one that waits; a dead letter; what the engine registered; and the firehose. Keys begin with `old`.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, info
from tracewire import Probe, Steer, StopWhen
from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import Taken
from tracewire_bus.store.vectors import reference_to
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire import codec, messages
from tracewire_bus.wire.codec import encode, request_schema_text, schema_text
from tracewire_bus.wire.columns import NUMBER, Column, ColumnPart, encode_layout
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Block, Helper, Invoke, Live, ModuleInfo, Versions
from tracewire_bus.wire.packing import pack, wire
from tracewire_bus.wire.refs import ArrayRef, encode_ref
from tracewire_engine.adapter.service import Adapter, Settings

HERE = Path(__file__).resolve().parent
#: Stands before every key of the Redis that is written down.
PREFIX = "old"
#: Tokens of each trace, and how many the one in the middle has.
TOKENS, SO_FAR = 12, 6

_ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def _later_kinds() -> list[messages.Declared]:
    """Conditions, controllers, features, lenses and subspaces; every field of a condition is set in one of them."""
    probe = messages.When(probe="p", above=Live("high"), release=0.25, output=1)
    tokens = messages.When(start=1, stop=9, every=2, tokens=[[1, 2], [3]], part="answer")
    sae = messages.Autoencoder(
        architecture="topk", features=1, width=1, k=1, centered=True, model="m", at="residual(1)"
    )
    weights = wire(np.arange(4, dtype=np.float32))
    return [
        messages.Lens(name="t", at="residual(*)", matrix=wire(_ARRAY), bias=wire(_ARRAY[0]), add=True, top_k=3),
        messages.Coordinates(name="c", at="residual(1)", basis=wire(_ARRAY), positions="all", when=probe),
        messages.Project(at="residual(1)", basis=wire(_ARRAY), remove=True, strength=Live("much"), when=tokens),
        messages.Features(name="f", at="residual(1)", sae=sae, top_k=4, threshold=0.5, weights=weights),
        messages.Features(name="g", at="residual(1)", sae="calm", indices=[1, 2], when=messages.When(text=".")),
        messages.SteerFeatures(
            at="residual(1)", sae="calm", indices=[1], add=Live("more"), scale=0.5, min=0.0, max=4.0
        ),
        messages.Hold(
            name="h",
            at="residual(1)",
            vector=wire(_ARRAY[0]),
            probe="p",
            target=Live("target"),
            min=-1.0,
            max=1.0,
            gain=0.1,
            proportional=0.2,
            output=1,
        ),
        Steer(at="residual(1)", vector=wire(_ARRAY[0]), when=messages.When(probe="p", below=-1.0)),
    ]


def every_message() -> dict[str, tuple[str, messages.Message]]:
    """One of every message by name, with what decodes it; every field is set."""
    failure = messages.Failure(
        type="ValueError",
        message="no",
        field="block",
        filename="service.py",
        line=12,
        source="x = 1 / 0",
        traceback="Traceback",
        builtin="ValueError",
    )
    versions = Versions(tracewire="0.1.0", vllm="0.32.0", nnsight="0.8.1", torch="2.13.0", weights="ab" * 16)
    event: dict[str, Any] = {"attempt": 2, "seq": 7}
    accepted = messages.Accepted(
        **event,
        engine="e",
        model="m",
        queued_at=1.5,
        accepted_at=2.5,
        revision="main",
        dtype="bfloat16",
        versions=versions,
        sampling=[{"max_tokens": 3, "temperature": 0.0}],
        prompt_tokens=[4],
        live_version=1,
        live={"alpha": 0.5},
        edits=[[("calm", 3)]],
        prompt_token_ids=[[1, 2, 3, 70000]],
        prompt_token_strings=[["<s>", "a", " b", "\ufffd"]],
        code=["ab" * 32],
        key="alice-1",
        tenant="alice",
        drafts=[messages.Drafts(0, "it has interventions")],
    )
    value = {"scores": [0.5, 1], 3: (None, True), "big": 2**70, "array": _ARRAY, "bytes": b"\0\xff"}
    reference = ArrayRef("float32", (2, 3), digest(_ARRAY), "ab")
    layout = encode_layout(
        [Column("h0", (ColumnPart("", "float32", (2,)),)), Column("n", (ColumnPart("", NUMBER, ()),))]
    )
    record = messages.Columns(layout, memoryview(np.array([1.5, 2.5, 3.5], np.float32).tobytes()))
    deltas: list[messages.Delta] = [
        messages.Set(path=("value",), value=wire(value)),
        messages.Append(path=("xs", 0, "k"), items=[wire(_ARRAY), 1.5]),
        messages.Set(path=("large",), value=wire(reference)),
        messages.Delete(path=("value", "big")),
        record,
    ]
    output = messages.DecodedOutput(
        **event,
        invoke=1,
        choice=2,
        index=3,
        token_ids=[5, 6],
        text=" two",
        time=3.5,
        finish_reason="stop",
        stop_reason="\n",
        logprobs=[{5: (-0.5, 1, "a")}, {6: (-1.5, None, None)}],
        deltas=[deltas, []],
        token_strings=[" t", "wo"],
        message=messages.MessageDelta(
            content=" two",
            reasoning="hm",
            tool_calls=[messages.ToolCallDelta(index=0, id="call-1", name="add", arguments='{"a"')],
        ),
    )
    message = messages.ChatMessage(
        content="two",
        reasoning="hm",
        tool_calls=[messages.ToolCall(id="call-1", name="add", arguments='{"a": 1}')],
    )
    shared = messages.DecodedShared(**event, invoke=messages.SHARED_INVOKE, time=3.5, deltas=[deltas])
    change = messages.Change(
        version=2, by="c", time=4500, values={"alpha": 1.5, "vector": wire(_ARRAY)}, proof=b"proof"
    )
    submission = messages.Submission(
        trace="t",
        model="m",
        invokes=[
            Invoke(prompt="a", sampling={"max_tokens": 3, "stop": ["\n"]}),
            Invoke(token_ids=[1, 2], edits=["calm"], forced_tokens=[3, 4]),
            Invoke(messages=[{"role": "user", "content": "hi"}]),
            Invoke(
                chat=messages.Chat(
                    messages=[{"role": "user", "content": "hi"}],
                    tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
                    tool_choice={"type": "function", "function": {"name": "add"}},
                    parallel_tool_calls=False,
                    template_kwargs={"enable_thinking": False},
                    reasoning_effort="low",
                    include_reasoning=False,
                    add_generation_prompt=False,
                    continue_final_message=True,
                    documents=[{"title": "t", "text": "x"}],
                )
            ),
        ],
        block=Block(
            name="watch",
            source="x = 1",
            filename="service.py",
            first_line=8,
            parameters=("m", "t", "l"),
            variables=pack({"a": _ARRAY}),
            helpers=[Helper(name="f", source="def f(): pass", filename="service.py", first_line=2)],
            modules={"np": "numpy"},
            imports={"Tensor": ("torch", "Tensor")},
            arguments=["a"],
        ),
        live=pack({"alpha": 0.5}),
        deadline_s=30.5,
        priority=-1,
        detach=True,
        client="c",
        context={"traceparent": "00"},
        schedule=[messages.ScheduledChange(index=3, values=pack({"alpha": 1.5}), invoke=1, choice=0, by="c")],
        interventions=[
            Probe(
                name="p",
                at="residual(3)",
                weight=wire(_ARRAY[0]),
                bias=0.5,
                activation="sigmoid",
                reduce="none",
                positions="all",
            ),
            messages.LogitLens(name="l", at="residual(*)", top_k=3, positions="prompt"),
            Steer(at="residual(1)", vector=wire(_ARRAY[1]), scale=Live("alpha"), positions="generated"),
            messages.Clamp(at="model.layers.0.mlp", direction=wire(_ARRAY[0]), min=-1.0, max=Live("alpha")),
            messages.Ablate(at="model.layers.1.mlp", direction=wire(_ARRAY), keep=0.5),
            messages.Patch(at="residual(1)", values=wire(_ARRAY), positions=[0, -1], strength=Live("alpha")),
            *_later_kinds(),
            messages.Patch(at="heads(1)", values=wire(_ARRAY), heads=[0, 2]),
            messages.HeadProbe(name="h", at="heads(*)", heads=[0, 1], reduce="norm", positions="prompt"),
            messages.AttentionPattern(name="a", at="heads(1)", heads=[1], top_k=4, positions="generated"),
            messages.HeadAblate(at="heads(2)", heads=1, keep=Live("alpha"), mean=wire(_ARRAY), positions="generated"),
            StopWhen(probe="p", above=0.9, below=-0.9, output=1, steps=2),
            Steer(at="residual(2)", vector=encode_ref(reference_to(bytes(wire(_ARRAY[0]).data)))),
        ],
        lease="l.10",
        token_strings=True,
        max_attempts=5,
        edits=["calm", "watch"],
    )
    edit = messages.Edit(
        name="calm",
        scope="asked",
        block=submission.block,
        interventions=submission.interventions[:5],
        on_error="fail",
        max_failures=3,
        by="c",
    )
    held = messages.HeldChoice(
        invoke=0,
        choice=1,
        token_ids=[5],
        text="a",
        finish_reason="length",
        stop_reason=2,
        saves={"xs": wire([1, _ARRAY])},
        token_strings=["a"],
        columns=[record],
        message=message,
    )
    manifest = messages.Manifest(invoke=0, choice=1, name="xs", kind="list", length=2, digest=b"\1" * 16)
    left = messages.EditRecord(
        edit="calm",
        version=3,
        engine="e",
        request="chatcmpl-1",
        trace="t",
        invoke=1,
        choice=2,
        time=8.5,
        tokens=6,
        finish_reason="stop",
        deltas=msgspec.Raw(msgspec.msgpack.encode([deltas])),
        blobs="e:o1",
        manifest=[manifest],
        save_errors={"y": "cannot travel"},
        error=failure,
        dropped="too large",
    )
    engine = messages.EngineInfo(
        engine="e",
        model="m",
        path="/models/m",
        revision="main",
        dtype="bfloat16",
        vocabulary=100,
        attention=[messages.AttentionInfo(1, "model.layers.1.attn", "model.layers.1.out", 4, 2, 3, "why")],
        hidden_size=8,
        max_model_len=128,
        layers="model.layers",
        layer_count=2,
        modules=[ModuleInfo("", "Llama"), ModuleInfo("model", "LlamaModel")],
        attributes={"Llama": ["config"]},
        sources={"Llama": "* def forward(self, x):"},
        versions=versions,
        schema=schema_text(),
        capacity=16,
        running=3,
        state="draining",
        started_at=1.5,
        taps=["model.layers.0.output"],
        queue_limit=4096,
        edits=4,
        edit_errors={"watch": "block: it does not compile"},
        openai="http://127.0.0.1:8000/v1",
        host="a",
        tree=b"\2" * 16,
        code="signed",
        code_reason="as the operator has set it",
        unsigned=False,
        public_key="ab" * 32,
        config={"hidden_size": 8, "rope_scaling": {"factor": 2.0}, "architectures": ["Llama"]},
    )
    return {
        "accepted": ("event", accepted),
        "output": ("event", output),
        "shared": ("event", shared),
        "steered": (
            "event",
            messages.Steered(
                **event, version=2, first=[messages.FirstToken(invoke=0, choice=1, index=4)], time=4.5, changes=[change]
            ),
        ),
        "paused": ("event", messages.Paused(**event, by="c", time=5.5)),
        "resumed": ("event", messages.Resumed(**event, by="c", time=6.5)),
        "lagging": ("event", messages.Lagging(**event, action="thinned", nbytes=5, left_out=3, time=6.6)),
        "waiting": ("event", messages.Waiting(**event, reason="engine e was lost", time=2.0)),
        "restarted": ("event", messages.Restarted(**event, reason="engine e was lost")),
        "final": (
            "event",
            messages.Final(
                **event,
                status="failed",
                error=failure,
                usage=messages.Usage(prompt_tokens=4, completion_tokens=5),
                deltas=[(0, 1, deltas)],
                manifest=[manifest],
                save_errors={"0.0.y": "cannot travel"},
                time=7.5,
                columns=[messages.ColumnsManifest(invoke=0, choice=1, records=1, digest=b"\2" * 16)],
                messages=[(0, 1, message)],
                signature=b"\3" * 64,
            ),
        ),
        "submission": ("submission", submission),
        "engine": ("engine", engine),
        "edit": ("edit", edit),
        "edit record": ("edit_record", left),
        "change": ("change", change),
        "snapshot": (
            "snapshot",
            messages.Snapshot(attempt=2, seq=7, choices=[held], accepted=accepted, live_version=2, paused=True),
        ),
    }


def decoded(decodes: str, data: bytes) -> Any:
    """A message that was written down."""
    return getattr(codec, f"decode_{decodes}")(data)


#: What the recordings call classes that have another name in Python now.
RECORDED = {"DecodedOutput": "Output", "DecodedShared": "Shared"}


def plain(value: Any) -> Any:
    """What a message holds, as JSON has it: structs as dicts with all their fields, arrays and bytes as hexadecimal."""
    if isinstance(value, messages.FirstToken):
        # A bare array in the recordings.
        return [value.invoke, value.choice, value.index]
    if isinstance(value, msgspec.Struct):
        is_ = type(value).__name__
        return {"is": RECORDED.get(is_, is_)} | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        # Keys need not be text.
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, ArrayRef):
        return {"reference": value.blob, "shape": list(value.shape), "of": value.dtype, "digest": value.digest.hex()}
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.name, "shape": list(value.shape), "data": value.tobytes().hex()}
    if isinstance(value, bytes | memoryview | msgspec.Raw):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    raise TypeError(f"no form for a {type(value).__name__}")


# --- a bus in the middle of it ----------------------------------------------------------------------------------------


async def _at_work(url: str) -> None:
    """Leave on this Redis what the docstring of this module says."""
    steps = anyio.Event()

    async def pace() -> None:
        # A step each time it is let.
        nonlocal steps
        await steps.wait()
        steps = anyio.Event()

    engine = ScriptedEngine(pace)
    described = info("tiny", engine="engine-old", schema=schema_text(), versions=Versions(tracewire="0.1.0"))
    options = {"live": {"alpha": 0.0}, "detach": True, "max_tokens": TOKENS}
    async with (
        Bus.open(url, prefix=PREFIX, retention_s=10**8) as bus,
        tracewire.connect(url, prefix=PREFIX, name="service") as client,
    ):

        async def until(trace: str, event_id: str) -> None:
            while True:
                steps.set()
                await anyio.sleep(0.01)
                if await bus.tail_id(trace) >= event_id:
                    return

        async def on_stream(trace: str, kind: type[Any]) -> None:
            subscription = client.subscribe(trace)
            async with subscription:
                async for event in subscription:
                    if isinstance(event, kind):
                        return

        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            group.start_soon(Adapter(engine, described, bus, Settings(heartbeat_s=0.05)).run)
            await client.models.get("tiny", timeout=30)
            ended = client.trace("tiny", "ended", acts(), trace_id="ended", **options)
            await ended.start()
            await until("ended", "1-3")
            await client.steer("ended", alpha=1.5)
            await until("ended", "1-6")
            await client.pause("ended")
            await on_stream("ended", tracewire.Paused)
            await client.resume("ended")
            await on_stream("ended", tracewire.Resumed)
            while (await client.get_state("ended")).status is None:
                steps.set()
                await anyio.sleep(0.01)
            await ended.aclose()
            middle = client.trace("tiny", "middle", acts(), trace_id="middle", **options)
            await middle.start()
            await until("middle", "1-4")
            trimmed = await bus.snapshots.take("middle", 1)
            assert trimmed is not None
            await until("middle", "1-6")
            # The engine goes without a word: nothing is settled, nothing leaves.
            group.cancel_scope.cancel()
        await bus.registry.register(described, ttl_s=10**6)
        await client.steer("middle", alpha=2.5)
        await client.pause("middle")
        await client.resume("middle")
        waiting = client.trace("tiny", "waiting", acts(), trace_id="waiting", deadline=10**10, **options)
        await waiting.start()
        submission = messages.Submission(trace="buried", model="tiny", invokes=[Invoke(prompt="buried")])
        entry = Taken("buried", {b"v": request_schema_text().encode(), b"t": b"buried", b"d": encode(submission)}, 0.0)
        await bus.queue.dead_letter("tiny", entry, "its engines were lost")
        await bus.blobs.put("middle", "blob", 0, b"\1" * 24)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def dump(bus: Bus, prefix: str) -> dict[str, list[Any]]:
    """Every key under a prefix, without the prefix: its type and what it holds, parts of which are base64."""
    reads = {
        b"string": ("GET",),
        b"hash": ("HGETALL",),
        b"list": ("LRANGE", 0, -1),
        b"set": ("SMEMBERS",),
        b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
        b"stream": ("XRANGE", "-", "+"),
    }
    found: dict[str, list[Any]] = {}
    for key in sorted(await bus.command("KEYS", f"{prefix}:*")):
        kind = await bus.command("TYPE", key)
        kind = kind if isinstance(kind, bytes) else kind.encode()
        name, *more = reads[kind]
        value = await bus.command(name, key, *more)
        if kind == b"string":
            parts: Any = [_text(value)]
        elif kind == b"stream":
            parts = [[_text(id_), *map(_text, flat)] for id_, flat in value]
        else:
            parts = [_text(part) for part in value]
        found[key.decode().removeprefix(f"{prefix}:")] = [kind.decode(), parts]
    return found


async def restore(bus: Bus, prefix: str, keys: dict[str, list[Any]]) -> None:
    """Put what `dump` read onto another Redis, under another prefix."""
    for name, (kind, parts) in keys.items():
        key = f"{prefix}:{name}"
        if kind == "stream":
            for entry in parts:
                await bus.command("XADD", key, *map(base64.b64decode, entry))
            continue
        data = [base64.b64decode(part) for part in parts]
        if kind == "string":
            await bus.command("SET", key, *data)
        elif kind == "zset":
            pairs = zip(data[1::2], data[::2], strict=True)
            await bus.command("ZADD", key, *(part for pair in pairs for part in pair))
        else:
            await bus.command({"hash": "HSET", "list": "RPUSH", "set": "SADD"}[kind], key, *data)


async def record(folder: Path) -> None:
    """Write both files."""
    written = {}
    for name, (decodes, message) in every_message().items():
        written[name] = {"decodes": decodes, "data": encode(message).hex()}
    async with EmbeddedServer.start() as server:
        await _at_work(server.url)
        async with Bus.open(server.url, prefix=PREFIX) as bus:
            keys = await dump(bus, PREFIX)
    folder.mkdir()  # noqa: ASYNC240
    for one in written.values():
        one["value"] = plain(decoded(one["decodes"], bytes.fromhex(one["data"])))
    for name, content in (("messages", written), ("bus", keys)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """As a command."""
    folder = HERE / schema_text()
    if folder.exists():
        print(f"{folder.name} is written down already, and stays as it is", file=sys.stderr)
        return 1
    anyio.run(record, folder)
    print(f"written down: {folder.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
