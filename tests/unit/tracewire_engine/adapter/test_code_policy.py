"""Whose blocks an adapter runs, by its policy, and how a refusal reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine
from tests.support.scripted_engine import expected
from tests.support.served import failure, served, submission
from tracewire_bus.bus import Bus
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.domain.code_identity import DEFAULT_IMPORTS, code_hash
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Block, Edit, Helper
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter.code_policy import CodePolicy
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.permits import Permits

BLOCK = Block(
    name="watch", source="x = 1", variables=pack({"a": 1}), helpers=[Helper(name="f", source="def f(): pass")]
)


def refused(policy: CodePolicy, block: Block = BLOCK, *, may_ship: bool = False) -> str:
    with pytest.raises(Rejection) as caught:
        policy.check(block, may_ship=may_ship)
    found = caught.value.failure
    assert (found.type, found.field) == ("CodeRefused", "block")
    return found.message


def test_none_runs_no_block_and_says_why() -> None:
    said = refused(CodePolicy("none", "the default, since the Redis at redis://h may be shared"), may_ship=True)
    assert "--code none: the default, since the Redis at redis://h may be shared" in said
    assert "declared interventions" in said


def test_any_runs_every_block() -> None:
    assert CodePolicy().check(BLOCK) == code_hash(BLOCK)


def test_listed_runs_what_is_approved_at_that_time(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path / "approved.json")
    policy = CodePolicy("listed", approvals=approvals)
    assert code_hash(BLOCK) in refused(policy)
    approvals.add("watch", code_hash(BLOCK), "")
    assert policy.check(BLOCK) == code_hash(BLOCK)
    # A file that cannot be read approves nothing.
    approvals.path.write_text("{")
    refused(policy)


def test_signed_runs_what_a_key_may_ship() -> None:
    assert "right 'code'" in refused(CodePolicy("signed"))
    assert CodePolicy("signed").check(BLOCK, may_ship=True) == code_hash(BLOCK)


def test_imports_are_limited_where_the_policy_says_so() -> None:
    CodePolicy().check_imports("watch", ["os"])
    limited = CodePolicy(imports=DEFAULT_IMPORTS)
    limited.check_imports("watch", ["torch.nn", "math"])
    with pytest.raises(Rejection, match=r"watch imports 'os', and a block may import here only .*torch.* \(--code-imp"):
        limited.check_imports("watch", ["torch", "os"])


def test_a_permit_says_whether_imports_are_limited() -> None:
    permits = Permits(b"k" * 32)
    assert permits.check(b"b", CodePolicy(imports=["torch"], permits=permits).permit(b"b"))
    assert not permits.check(b"b", CodePolicy(permits=permits).permit(b"b"))


def test_variables_that_cannot_be_decoded_are_named() -> None:
    with pytest.raises(Rejection, match="the variables of watch could not be decoded"):
        CodePolicy().check(Block(name="watch", source="", variables=b"\x90"))


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (BLOCK, ""),
        (Block(name="watch", source="import os"), "imports 'os'"),
        (
            Block(name="watch", source="x = 1", helpers=[Helper(name="f", source="def f():\n    import os")]),
            "f imports",
        ),
        (Block(name="watch", source="x = 1", modules={"o": "os"}), "imports 'os'"),
        (Block(name="watch", source="x = 1", imports={"o": ("os", "system")}), "imports 'os'"),
    ],
    ids=["none", "the source", "a helper", "a module", "an import"],
)
async def test_a_submission_with_a_refused_block_is_rejected_and_the_engine_goes_on(
    block: Block, says: str, bus: Bus, embedded: str, prefix: str
) -> None:
    policy = CodePolicy("any", imports=DEFAULT_IMPORTS) if says else CodePolicy("none", "so")
    async with served(bus, embedded, prefix, code=policy) as (_, client):
        assert (await client.engines.list())[0].code == policy.code
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny")
        await bus.queue.put("tiny", "t", encode(submission("t", block=block)))
        error = await failure(client, "t")
        assert error.type == "CodeRefused"
        assert says in error.message
        assert (await client.trace("tiny", "valid", max_tokens=5).result()).token_ids == expected("valid", 5)[0]


async def test_edits_are_under_the_same_policy(bus: Bus) -> None:
    described = engine_info()
    adapter = Adapter(PlayedEngine(), described, bus, Settings(code=CodePolicy("none", "so")))
    await bus.edits.install("tiny", Edit(name="all", block=BLOCK))
    await adapter._standing.refresh()
    assert "--code none" in described.edit_errors["all"]
    assert (described.code, described.code_reason) == ("none", "so")
