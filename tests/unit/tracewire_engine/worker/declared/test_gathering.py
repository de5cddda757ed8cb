"""Interventions of several requests, gathered at once where the requests bring the same ones."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Ablate, AttentionPattern, Clamp, LogitLens, Patch, Probe, Steer
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.drafted_rows import Served
from tracewire_engine.worker.declared.gathering import Gathering
from tracewire_engine.worker.declared.members import Member
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.spans import Chunk

CPU = torch.device("cpu")
HIDDEN = 4
VECTOR, OTHER = np.arange(HIDDEN, dtype=np.float32), np.ones(HIDDEN, np.float32)
#: What requests bring, each list any number of them.
SPECS: list[list[Any]] = [
    [Probe("p", "", weight=VECTOR), Steer("", VECTOR, scale=0.5), Probe("all", "", positions="all")],
    [Probe("p", "", weight=OTHER), Steer("", OTHER, scale=0.5), Probe("all", "", positions="generated")],
    [Steer("", VECTOR, positions="prompt"), LogitLens("lens", ""), Ablate("", VECTOR, positions="last")],
    [Patch("", np.stack([VECTOR, OTHER]), positions=[1, 3]), Clamp("", OTHER, min=0.0)],
    [AttentionPattern("a", ""), Probe("p", "", reduce="norm")],
    [AttentionPattern("a", "", top_k=2), Steer("", VECTOR)],
]
#: What differs only in its values from the list at the same place.
LIKE: list[list[Any]] = [
    [Probe("p", "", weight=OTHER), Steer("", OTHER, scale=0.25), Probe("all", "", positions="all")],
    [Probe("q", "", weight=VECTOR), Steer("", VECTOR, scale=0.5), Probe("all", "", positions="generated")],
    [Steer("", OTHER, positions="prompt"), LogitLens("other", ""), Ablate("", OTHER, positions="last")],
    [Patch("", np.stack([OTHER, VECTOR]), positions=[0, 2]), Clamp("", VECTOR, min=1.0)],
]


def encoded(spec: list[Any]) -> bytes:
    return msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)]) for one in normalize(spec)])


def batch(seed: int, known: DeclaredRequests) -> list[tuple[Declaration, Chunk, int]]:
    """Requests of a step: prompts, pieces of prompts, drafts and generated tokens."""
    rng = random.Random(seed)
    like = rng.randrange(len(LIKE))
    specs = [encoded(one) for one in rng.choice([rng.choices(SPECS, k=2), [SPECS[like], LIKE[like]]])]
    found, start = [], 0
    for number in range(rng.randint(1, 9)):
        declaration = Declaration(f"r{number}", 0, rng.choice(specs), LiveRun(""), known.decoded)
        prompt = rng.randint(2, 6)
        first, count = rng.choice([(0, prompt), (0, prompt - 1), (prompt - 1, 1), (prompt + 2, 1)])
        declaration.seen = rng.choice([0, first, first + 3])
        for draft in range(rng.choice([1, 1, 3]) if first > prompt else 1):
            found.append((declaration, Chunk(start, first + draft, count, prompt), draft))
            start += count
    return found


STEP = 40


def served(declaration: Declaration, chunk: Chunk) -> Served | None:
    """How a request is served that has been served likewise for some steps; `None` if it cannot be."""
    if chunk.count > 1 or chunk.first < chunk.prompt or chunk.first < declaration.seen:
        return None
    since = STEP - chunk.first % 3
    end = chunk.first + 1 - (STEP - since)
    return Served(declaration, end, end - chunk.prompt, row=chunk.start, since=since, lasting=True)


def gathered(
    pieces: list[tuple[Declaration, Chunk, int]], *, lasting: bool = False, apart: bool = False
) -> tuple[Any, ...]:
    """All that is found of each group, with the members that failed.

    Args:
        pieces: of the requests.
        lasting: requests are served as before.
        apart: each piece is gathered by itself.
    """
    failed: list[tuple[str, str]] = []

    def fail(members: list[Member], error: Exception) -> None:
        failed.extend((one.declaration.request, str(error)) for one in members)

    gathering = Gathering(fail, STEP)
    for declaration, chunk, draft in pieces:
        if apart:
            gathering._gather()
        known = served(declaration, chunk) if lasting and not draft else None
        if known is not None:
            gathering.add_lasting(known)
        else:
            gathering.add(declaration, chunk, draft)
    total = sum(chunk.count for _, chunk, _ in pieces)
    groups = []
    #: The members of `Steer`s, by place and intervention: those with one row may be apart from those with several.
    steers: dict[tuple[int, int], list[Any]] = {}
    for members, rows in gathering.groups(total, CPU):
        assert rows.owners == tuple((id(one.declaration), one.draft) for one in members)
        assert rows.counts == [one.span[1] for one in members]
        described = [
            (one.declaration.request, id(one.op), one.span, one.at, one.place, one.index, one.draft, one.keys)
            for one in members
        ]
        groups.append((described, rows.numbers.tolist()))
    places = [described[0][4] for described, _ in groups]
    assert places == sorted(places)
    for described, _ in [group for group in groups if _steers(group[0], pieces)]:
        for one in described:
            steers.setdefault((one[4], one[1]), []).append(one)
    groups = [group for group in groups if not _steers(group[0], pieces)]
    groups += [(sorted(every, key=lambda one: one[2]), []) for every in steers.values()]
    # Groups of one place have no row in common.
    groups.sort(key=lambda group: (group[0][0][4], group[0][0][7], group[1]))
    return groups, sorted(failed), gathering.recordable, gathering.steady


def _steers(described: list[Any], pieces: list[tuple[Declaration, Chunk, int]]) -> bool:
    """Whether a group's members add a vector."""
    kinds = {id(op): type(op.one) for declaration, _, _ in pieces for op in declaration.ops}
    return kinds[described[0][1]] is Steer


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("lasting", [False, True])
def test_requests_are_gathered_at_once_as_they_would_be_one_by_one(seed: int, lasting: bool) -> None:
    pieces = batch(seed, DeclaredRequests(CPU))
    assert gathered(pieces, lasting=lasting) == gathered(pieces, apart=True)


def test_prompts_and_generated_tokens_share_the_group_that_adds_a_vector() -> None:
    known = DeclaredRequests(CPU)
    spec = encoded([Probe("p", ""), Steer("", VECTOR)])
    gathering = Gathering(lambda members, error: None)
    # The prompt comes first in the batch.
    for number, chunk in enumerate([Chunk(0, 0, 5, 5), Chunk(5, 7, 1, 5), Chunk(6, 6, 1, 5)]):
        gathering.add(Declaration(f"r{number}", 0, spec, LiveRun(""), known.decoded), chunk, 0)
    (read, at), (steered, rows) = gathering.groups(7, CPU)
    assert [one.span for one in read] == [(4, 1), (5, 1), (6, 1)]
    assert at.numbers.tolist() == [4, 5, 6]
    assert [(one.declaration.request, one.span) for one in steered] == [("r0", (0, 5)), ("r1", (5, 1)), ("r2", (6, 1))]
    # All rows of the step, so they need no index.
    assert rows.index is None


def test_groups_with_the_same_rows_share_them() -> None:
    known = DeclaredRequests(CPU)
    spec = encoded([Probe(f"p{layer}", "", weight=VECTOR) for layer in range(3)])
    gathering = Gathering(lambda members, error: None)
    for number in range(4):
        gathering.add(Declaration(f"r{number}", 0, spec, LiveRun(""), known.decoded), Chunk(number, 7, 1, 5), 0)
    groups = list(gathering.groups(4, CPU))
    assert [members[0].place for members, _ in groups] == [0, 1, 2]
    assert len({id(rows) for _, rows in groups}) == 1
    assert [member.index for member in groups[0][0]] == [3] * 4
    assert gathering.steady
    assert gathering.recordable


def test_requests_with_vectors_of_their_own_are_one_run() -> None:
    """Each member has the intervention of its own request."""
    known = DeclaredRequests(CPU)
    gathering = Gathering(lambda members, error: None)
    declarations = []
    for number in range(4):
        spec = encoded([Probe("p", "", weight=VECTOR), Steer("", VECTOR + max(1, number), scale=float(number))])
        declarations.append(Declaration(f"r{number}", 0, spec, LiveRun(""), known.decoded))
        gathering.add(declarations[-1], Chunk(number, 7, 1, 5), 0)
    assert len(gathering._run) == 4
    probes, steers = (members for members, _ in gathering.groups(4, CPU))
    assert probes.ops() == [one.ops[0] for one in declarations]
    assert steers.ops() == [one.ops[1] for one in declarations]
    assert [one.op for one in steers] == steers.distinct_ops() == steers.ops()


def test_one_that_does_not_fit_its_prompt_fails_alone() -> None:
    known, failed = DeclaredRequests(CPU), []
    spec = encoded([Patch("", np.stack([VECTOR, OTHER]), positions=[1, 3]), Probe("p", "")])
    gathering = Gathering(lambda members, error: failed.extend(one.declaration.request for one in members))
    for number, prompt in enumerate((3, 5)):
        declaration = Declaration(f"r{number}", 0, spec, LiveRun(""), known.decoded)
        gathering.add(declaration, Chunk(3 * number, 0, prompt, prompt), 0)
    requests = [[one.declaration.request for one in members] for members, _ in gathering.groups(8, CPU)]
    assert failed == ["r0"]
    assert requests == [["r1", "r1"], ["r0", "r1"]]
