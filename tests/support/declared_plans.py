"""Random plans of declared interventions, and the same done request by request."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.vectors import by_reference
from tracewire_bus.domain.fold import Fold
from tracewire_bus.domain.intervention_checks import normalize, substitute_live
from tracewire_bus.domain.patch_checks import prompt_positions
from tracewire_bus.wire.messages import Ablate, Clamp, DecodedOutput, Delta, Final, Live, LogitLens, Patch, Probe, Steer
from tracewire_bus.wire.packing import decoder, pack
from tracewire_engine.adapter.read_decoder import NO_READS, ChoiceReads, ReadDecoder, StepReads
from tracewire_engine.link.step_link import encode_changes
from tracewire_engine.protocol.messages import Batch, Layout, Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

HIDDEN, VOCABULARY, LAYERS = 16, 40, 3


HEAD = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))


DELTAS = decoder(list[Delta])


def interventions(rng: random.Random, prompt: int) -> list[tuple[Any, list[int]]]:
    """A list of interventions, each with its layers, for a prompt of this many tokens."""
    shared = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    found = []
    for number in range(rng.randint(1, 4)):
        own = np.random.default_rng(rng.randint(0, 5)).standard_normal((2, HIDDEN)).astype(np.float32)
        vector = shared if rng.random() < 0.5 else own[0]
        layers = [0, 2] if rng.random() < 0.3 else [rng.randrange(LAYERS)]
        positions = rng.choice(["last", "last", "all", "prompt", "generated"])
        name = f"s{number}"
        found.append(
            (
                rng.choice(
                    [
                        Probe(name, "", positions=positions),
                        Probe(name, "", weight=vector, bias=rng.choice([None, 0.5]), positions=positions),
                        Probe(name, "", weight=own, bias=own[:, 0], activation="softmax", positions=positions),
                        Probe(name, "", reduce="norm", positions=positions),
                        Probe(name, "", weight=own, reduce="mean", positions=positions),
                        LogitLens(name, "", top_k=3, positions=positions),
                        Steer("", vector, scale=rng.choice([0.5, 2.0]), positions=positions),
                        Steer("", Live("vector"), scale=Live("scale"), positions=positions),
                        Ablate("", Live("vector"), keep=Live("scale"), positions=positions),
                        Clamp("", Live("vector"), min=-0.5, max=Live("scale"), positions=positions),
                        Clamp("", vector, min=-0.5, max=rng.choice([0.25, None]), positions=positions),
                        Ablate("", own, keep=rng.choice([0.0, 0.5]), positions=positions),
                        Ablate("", None, keep=0.5, positions=positions),
                        patch(rng, prompt, positions),
                        patch(rng, prompt, positions),
                    ]
                ),
                layers,
            )
        )
    return found


def patch(rng: random.Random, prompt: int, named: str) -> Patch:
    """A patch of some positions, with one row for all of them or a row for each."""
    several = rng.sample(range(-prompt, 0), rng.randint(1, prompt))
    several = [one % prompt if rng.random() < 0.5 else one for one in several]
    positions: Any = rng.choice([named, -1, several, "prompt", "-1:", f"0:{rng.randint(1, prompt)}"])
    found = prompt_positions(positions, prompt)
    values = np.random.default_rng(rng.randint(0, 5)).standard_normal((6, HIDDEN)).astype(np.float32)
    values = values[0] if found is None or rng.random() < 0.5 else values[: len(found)]
    return Patch("", values, positions=positions, strength=rng.choice([1.0, 0.25, Live("scale")]))


class Request:
    def __init__(self, name: str, rng: random.Random, folder: Path | None = None) -> None:
        """With a `folder`, arrays are files in it, and the interventions refer to them."""
        self.name = name
        self.prompt = rng.randint(1, 5)
        self.declared = interventions(rng, self.prompt)
        self.length = self.prompt + rng.randint(1, 8)
        self.state = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=self.prompt)
        self.tokens = 0
        self.seen = 0
        self.expected: dict[str, list[Any]] = {}
        self.reads = ChoiceReads()
        plain = normalize([one for one, _ in self.declared])
        if folder is not None:
            plain = [by_reference(one, folder) for one in plain]
        placed = [
            Placed(one, [(f"layer.{layer}.output", True) for layer in layers], len(layers) > 1)
            for one, layers in zip(plain, [at for _, at in self.declared], strict=True)
        ]
        self.live: dict[str, Any] = {}
        self.change(rng)
        self.encoded = msgspec.msgpack.encode(placed)

    def change(self, rng: random.Random) -> dict[str, Any]:
        """Other live parameters, one of them or both."""
        vector = np.random.default_rng(rng.randrange(100)).standard_normal(HIDDEN).astype(np.float32)
        changed = {"scale": rng.choice([0.0, 0.25, 1.5]), "vector": vector}
        if self.live and rng.random() < 0.5:
            del changed[rng.choice(["scale", "vector"])]
        self.live |= changed
        return changed


class Graph(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: operations and the memory they read and write, recorded without a change."""

    def __init__(self, launch: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        with self:
            launch()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = args[0] if function._schema.is_mutable else function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, made in self.calls:
            both = [x if isinstance(x, (tuple, list)) else (x,) for x in (made, function(*args, **kwargs))]
            for tensor, fresh in zip(*both, strict=True):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != fresh.data_ptr():
                    tensor.copy_(fresh)


class Graphs:
    """Stands for the recorder of a GPU."""

    def __init__(self) -> None:
        self.made: list[Graph] = []

    def record(self, launch: Any) -> Graph:
        self.made.append(Graph(launch))
        return self.made[-1]


def naive(
    request: Request, streams: list[torch.Tensor], first: int, count: int, start: int, *, counts: bool = True
) -> None:
    """What the request's interventions mean for its rows, in place, layer by layer. Reads of rows that do not count are
    not expected.
    """
    prompt, end = request.prompt, first + count
    found: dict[str, dict[int, torch.Tensor]] = {}
    for layer, stream in enumerate(streams):
        rows = stream[start : start + count]
        for intended, layers in request.declared:
            if layer not in layers:
                continue
            one = substitute_live(intended, request.live)
            reading = isinstance(one, (Probe, LogitLens))
            chosen = []
            for position in range(first, end):
                if isinstance(one, Patch):
                    at = prompt_positions(one.positions, prompt)
                    if at is not None and position in at:
                        chosen.append(position - first)
                    if at is not None:
                        continue
                generated = position >= prompt
                wanted = {
                    "all": True,
                    "prompt": not generated,
                    "generated": generated,
                    "last": position == end - 1 if reading else position >= prompt - 1,
                }[one.positions]
                if wanted and not (reading and one.positions != "last" and position < request.seen):
                    chosen.append(position - first)
            for row in chosen:
                value = rows[row]
                if isinstance(one, Steer):
                    value += one.scale * torch.tensor(one.vector)
                elif isinstance(one, Patch):
                    new = torch.tensor(np.atleast_2d(one.values))
                    at = prompt_positions(one.positions, prompt)
                    new = new[at.index(first + row)] if len(new) > 1 and at is not None else new[0]
                    value += one.strength * (new - value)
                elif isinstance(one, Clamp):
                    unit = torch.tensor(one.direction) / torch.tensor(one.direction).norm()
                    along = value @ unit
                    low, high = -np.inf if one.min is None else one.min, np.inf if one.max is None else one.max
                    value += (along.clamp(low, high) - along) * unit
                elif isinstance(one, Ablate):
                    if one.direction is None:
                        value *= one.keep
                    else:
                        basis = torch.linalg.qr(torch.tensor(np.atleast_2d(one.direction)).T)[0].T
                        value += (one.keep - 1) * (basis @ value) @ basis
            if reading and chosen:
                values = rows[chosen].clone()
                if isinstance(one, Probe):
                    if one.weight is not None:
                        values = values @ torch.tensor(np.atleast_2d(one.weight)).T
                        if one.bias is not None:
                            values = values + torch.tensor(one.bias)
                        if one.activation == "softmax":
                            values = values.softmax(-1)
                        if one.weight.ndim == 1:
                            values = values[:, 0]
                    elif one.reduce == "norm":
                        values = values.norm(dim=-1)
                    if one.reduce == "mean":
                        values = values.mean(0, keepdim=True)
                found.setdefault(one.name, {})[layer] = values
    if not counts:
        return
    for one, layers in request.declared:
        by_layer = found.get(getattr(one, "name", ""))
        if by_layer:
            values = torch.stack([by_layer[layer] for layer in layers], 1)
            values = values if len(layers) > 1 else values[:, 0]
            if one.positions == "last" or getattr(one, "reduce", "") == "mean":
                values = values[0]
            if isinstance(one, LogitLens):
                top = (values @ HEAD.T).topk(3)
                request.expected.setdefault(one.name, []).append((top.indices.int().numpy(), top.values.numpy()))
            else:
                request.expected.setdefault(one.name, []).append(values.numpy() if values.dim() else float(values))
    request.seen = max(request.seen, end)


def handed_on(
    feed: ReadDecoder, layout: Layout | None, piece: Batch, flat: torch.Tensor
) -> tuple[memoryview, list[tuple[StepReads, int]]]:
    """Hand a step's reads to the adapter's decoder: the bytes, and the reads of each request with the token's index."""
    data = piece.data = memoryview(flat.numpy().tobytes())
    if layout is not None:
        feed.layout(layout)
    return data, feed.batch(piece)


def play(seed: int, declared: DeclaredRequests, folder: Path | None = None, drafts: int = 0) -> int:
    """Play random traffic, and compare what a plan reads and edits with `naive`.

    With a `folder`, interventions refer to their arrays, which are files in it. With `drafts`, a request that generates
    can have so many in a step, of which some are taken.
    With `declared.buffers`, the taps' kernels serve the steps that fit. Returns the number of these steps.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    feed, runs = ReadDecoder(), LiveRuns()
    #: As a CUDA graph has them: where they lie depends on the size of the batch.
    buffers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    versions = count(1)
    live: dict[str, Request] = {}
    finished: list[Request] = []
    built = buffered = 0
    for step in range(40):
        if step < 25 and (not live or rng.random() < 0.25):
            request = Request(f"r{step}", rng, folder)
            live[request.name] = request
            if rng.random() < 0.85:
                run = runs.join(f"run of {request.name}", pack(request.live), request.name, request.name, 0)
                declaration = Declaration(request.name, 0, request.encoded, run, declared.decoded)
                declared.add(request.name, declaration)
            else:
                request.declared = []  # another tenant's
        if live and rng.random() < 0.1:
            rng.choice(list(live.values())).state.num_computed_tokens = 0  # preempted
        while live and rng.random() < 0.4:
            steered = rng.choice(list(live.values()))
            values = {name: msgspec.Raw(pack(value)) for name, value in steered.change(rng).items()}
            runs.steer(encode_changes({f"run of {steered.name}": (next(versions), values)}))
        for run in runs.apply():
            declared.update_live(run)
        batch = [request for request in live.values() if rng.random() < 0.97]
        if rng.random() < 0.1:
            rng.shuffle(batch)
        scheduled = {
            request.name: request.prompt + request.tokens - request.state.num_computed_tokens for request in batch
        }
        tried = {
            request.name: [-1] * rng.randint(1, drafts)
            for request in batch
            if drafts and request.state.num_computed_tokens >= request.prompt and scheduled[request.name] == 1
            if rng.random() < 0.6
        }
        for name, given in tried.items():
            scheduled[name] += len(given)
        total = sum(scheduled.values())
        states = {request.name: request.state for request in batch}
        before = declared.plan
        declared.begin([request.name for request in batch], scheduled, total, states, tried)
        built += declared.plan is not before
        # The residual stream is the sum of two halves; a graph's tensors are longer than the step.
        if total not in buffers:
            buffers[total] = [(torch.empty(total + 3, HIDDEN), torch.empty(total + 3, HIDDEN)) for _ in range(LAYERS)]
        halves = buffers[total]
        for half in (half for pair in halves for half in pair):
            half.copy_(torch.randn(total + 3, HIDDEN))
        streams = [(hidden + residual)[:total].clone() for hidden, residual in halves]
        whole = declared.fits_buffers()
        buffered += whole
        for layer, pair in enumerate(halves):
            stage = declared.hooks.get(f"layer.{layer}.output")
            if whole:
                assert declared.buffers is not None
                declared.buffers.launch(f"layer.{layer}.output", pair)
            elif stage is not None:
                stage.replay(pair)
        got = {request.name: 1 + rng.randint(0, len(tried.get(request.name, ()))) for request in batch}
        if tried and declared.plan is not None:
            declared.plan.accept(list(got.values()))
        collected = declared.collect(lambda values: values @ HEAD.T)
        start = 0
        for request in batch:
            first, tokens = request.state.num_computed_tokens, scheduled[request.name]
            if request.name in tried:
                # Each row as if it were a step.
                for row in range(tokens):
                    naive(request, streams, first + row, 1, start + row, counts=row < got[request.name])
            else:
                naive(request, streams, first, tokens, start)
            start += tokens
        for (hidden, residual), stream in zip(halves, streams, strict=True):
            torch.testing.assert_close((hidden + residual)[:total], stream, rtol=1e-4, atol=1e-4)
        if collected is not None:
            data, arrived = handed_on(feed, *collected)
            indices: dict[str, list[int]] = {}
            for reads, index in arrived:
                indices.setdefault(reads.request, []).append(index)
                live[reads.request].reads.take(index, reads, data)
            for name, found in indices.items():
                assert found == list(range(live[name].tokens, live[name].tokens + got[name]))
        for request in batch:
            request.state.num_computed_tokens += scheduled[request.name] - len(tried.get(request.name, ()))
            request.state.num_computed_tokens += got[request.name] - 1
            request.tokens += got[request.name]
            if request.prompt + request.tokens > request.length:
                finished.append(live.pop(request.name))
                declared.pop(request.name)
                runs.leave(f"run of {request.name}", request.name)
                runs.steer(encode_changes({}, [f"run of {request.name}"]))
    assert len(finished) > 3
    assert built < 40 or drafts
    assert len(runs.runs) == len([request for request in live.values() if request.declared])
    for request in finished:
        assert not request.declared or not any(d.failure for d in declared.live.values())
        compare(request)
    return buffered


def compare(request: Request) -> None:
    fold = Fold()
    for index in range(request.tokens):
        deltas = DELTAS(request.reads.steps.get(index, NO_READS))
        fold.apply(DecodedOutput(attempt=1, seq=index, index=index, token_ids=[0], deltas=[deltas]))
    columns = request.reads.columns_manifest(0, 0, request.tokens)
    fold.apply(
        Final(
            attempt=1,
            seq=request.tokens,
            status="finished",
            manifest=request.reads.manifest(0, request.tokens),
            columns=[] if columns is None else [columns],
        )
    )
    fold.verify()
    saves = fold.choices[0, 0].saves
    assert set(saves) == set(request.expected)
    for name, items in request.expected.items():
        assert len(saves[name]) == len(items)
        for mine, other in zip(saves[name], items, strict=True):
            if isinstance(other, tuple):
                # What a lens saves, or features.
                ids, values = mine.values()
                assert ids.tolist() == np.asarray(other[0]).tolist()
                mine, other = values, other[1]
            assert np.shape(mine) == np.shape(other)
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-3)
