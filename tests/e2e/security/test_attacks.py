"""What a hostile client of the bus tries, and how each attempt is refused. The engine is strict and scripted.

The client has all of Redis, as far as a test can: it calls the scripts as any client, and writes to keys beside them.
"""

from __future__ import annotations

import time
from functools import partial, wraps
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import tracewire
from tests.support.identities import ENGINE, Identities, running, signing_bus
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.until import until
from tracewire import Client, Final, TraceRejected
from tracewire_bus.bus import Bus
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.domain.code_identity import code_hash
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Ablate, Block, Edit, Helper, Invoke, Submission
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.signing import MOST_AT_ONCE, Envelope, unwrap, wrap
from tracewire_engine.adapter.code_policy import CodePolicy

UNSIGNED = "this engine accepts only what a key of its keyring has signed (--unsigned refuse: as the test has set it)"


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def with_engine(test: Any) -> Any:
    """Run a test while a strict engine serves."""

    @wraps(test)
    async def wrapped(keys: Identities, bus: Bus, **more: Any) -> None:
        async with keys.served(bus):
            await test(keys=keys, bus=bus, **more)

    return wrapped


async def refusal(client: Client, trace: str) -> Any:
    """With what a trace was refused."""
    async for event in client.subscribe(trace):
        if isinstance(event, Final):
            assert event.status == "rejected"
            return event.error
    raise AssertionError(trace)


def submission(trace: str = "t", **fields: Any) -> Submission:
    return Submission(**{"trace": trace, "model": "tiny", "invokes": [Invoke(prompt="valid")], "detach": True} | fields)


async def put(bus: Bus, trace: str, data: bytes) -> None:
    """Queue something as a trace's submission, beside all checks of a client."""
    await bus.command("HSET", bus.keys.record(trace), "m", "tiny")
    await bus.queue.put("tiny", trace, data)


# --- submissions ------------------------------------------------------------------------------------------------------


@with_engine
async def test_a_tenant_s_trace_runs_and_says_whose_it_is(keys: Identities, bus: Bus) -> None:
    async with keys.client(bus, "alice") as client:
        trace = client.trace("tiny", "valid", acts(), max_tokens=3)
        async with trace:
            await trace.result()
            accepted = await trace.accepted()
        assert (accepted.key, accepted.tenant) == ("alice", "red")
        assert len(accepted.code[0]) == 64


@pytest.mark.parametrize("id", ["", "olga"], ids=["nobody", "a key without the right"])
@with_engine
async def test_a_submission_of_nobody_who_may_is_refused(id: str, keys: Identities, bus: Bus) -> None:
    async with keys.client(bus, id) as client:
        with pytest.raises(TraceRejected, match=r"--unsigned refuse|has no right 'submit'") as refused:
            await client.trace("tiny", "valid", max_tokens=3).result()
        assert refused.value.field == "signature"


@with_engine
async def test_an_altered_submission_is_refused_and_not_decoded(keys: Identities, bus: Bus) -> None:
    proofs = Proofs(keys.signer("alice"), prefix=bus.keys.prefix)
    signed = proofs.content("submit", "tiny", "t", encode(submission("t")))
    async with keys.client(bus, "alice") as client:
        for trace, data in {
            "t": signed[:-1] + bytes([signed[-1] ^ 1]),
            # Nothing of it could be decoded; the signature is what is named.
            "bomb": signed[:100] + b"\xdd\xff\xff\xff\xff",
            "u": signed,
            "forged": signed.replace(b"alice", b"carol"),
        }.items():
            await put(bus, trace, data)
            error = await refusal(client, trace)
            assert (error.type, error.field) == ("SignatureRefused", "signature"), trace
        assert (await client.trace("tiny", "valid", max_tokens=2).result()).token_ids


@with_engine
async def test_a_submission_is_not_moved_into_what_was_signed_together(keys: Identities, bus: Bus) -> None:
    proofs = Proofs(keys.signer("alice"), prefix=bus.keys.prefix)

    async def together(*traces: str) -> dict[str, tuple[Envelope, bytes]]:
        made: dict[str, tuple[Envelope, bytes]] = {}

        async def sign(trace: str) -> None:
            envelope, content = unwrap(await proofs.submission("tiny", trace, encode(submission(trace))))
            assert envelope is not None
            made[trace] = envelope, content

        async with anyio.create_task_group() as group:
            for trace in traces:
                group.start_soon(sign, trace)
        assert len({envelope.signature for envelope, _ in made.values()}) == 1
        return made

    first, second = await together("a", "b", "c", "d", "e", "f", "g"), await together("x", "y")
    async with keys.client(bus, "alice") as client:
        # The engine knows the signatures of both by then.
        for trace, (envelope, content) in {"a": first["a"], "x": second["x"]}.items():
            await put(bus, trace, wrap(envelope, content))
            assert (await client.subscribe(trace).result()).token_ids
        foreign, other = second["y"][0], encode(submission("e", invokes=[Invoke(prompt="valid"), Invoke(prompt="x")]))
        for trace, wrong in {
            "b": {"signature": foreign.signature, "digests": foreign.digests},
            "c": {"digests": first["c"][0].digests + foreign.digests},
            "d": {"digests": first["d"][0].digests * MOST_AT_ONCE},
            "e": {},
            "f": {"key": "bob"},
            "g": {"nonce": first["a"][0].nonce},
        }.items():
            envelope, content = first[trace]
            await put(bus, trace, wrap(msgspec.structs.replace(envelope, **wrong), content if wrong else other))
            error = await refusal(client, trace)
            assert (error.type, error.field) == ("SignatureRefused", "signature"), trace
        # One that nobody has touched runs, and once only.
        await put(bus, "y", wrap(*second["y"]))
        assert (await client.subscribe("y").result()).token_ids
        await bus.command("DEL", bus.keys.record("y"), bus.keys.events("y"), bus.keys.submitted("tiny", "y"))
        await put(bus, "y", wrap(*second["y"]))
        assert "was replayed" in (await refusal(client, "y")).message


@with_engine
async def test_a_replayed_submission_does_not_run_again(keys: Identities, bus: Bus) -> None:
    data = Proofs(keys.signer("alice"), prefix=bus.keys.prefix).content(
        "submit", "tiny", "t", encode(submission("t", invokes=[Invoke(prompt="valid", sampling={"max_tokens": 2})]))
    )
    async with keys.client(bus, "alice") as client:
        await put(bus, "t", data)
        await client.subscribe("t").result()
        # Redis itself knows the trace's id.
        await bus.queue.put("tiny", "t", data)
        # And if somebody makes Redis forget the trace, the engine knows the signature.
        await bus.command("DEL", bus.keys.record("t"), bus.keys.events("t"), bus.keys.submitted("tiny", "t"))
        await put(bus, "t", data)
        error = await refusal(client, "t")
        assert "was replayed: an engine has taken it before" in error.message


@with_engine
async def test_a_submission_that_was_kept_back_is_refused(
    keys: Identities, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.domain.identity._LIFETIMES", {"submit": -600})
    data = Proofs(keys.signer("alice"), prefix=bus.keys.prefix).content("submit", "tiny", "t", encode(submission("t")))
    async with keys.client(bus, "alice") as client:
        await put(bus, "t", data)
        assert "had expired" in (await refusal(client, "t")).message


@with_engine
async def test_a_key_that_is_revoked_while_its_traffic_runs(keys: Identities, bus: Bus) -> None:
    async with keys.client(bus, "alice") as alice, keys.client(bus, "ann") as ann:
        trace = await running(alice)
        known = keys.ring.listed()
        revoked = [msgspec.structs.replace(key, revoked=time.time()) if key.id == "alice" else key for key in known]
        keys.ring.write(revoked)
        with pytest.raises(TraceRejected, match="key 'alice' was revoked"):
            await alice.trace("tiny", "valid", max_tokens=3).result()
        await alice.steer(trace.id, alpha=9.0)
        # The other key of the tenant goes on, and so does the trace.
        await ann.steer(trace.id, alpha=2.0)
        async for event in ann.subscribe(trace.id, since="start"):
            if event.type == "steered":
                assert [change.values for change in event.changes] == [{"alpha": 2.0}]
                break
        keys.ring.write(known)
        assert (await alice.trace("tiny", "valid", max_tokens=3).result()).token_ids
        await ann.cancel(trace.id)


@with_engine
async def test_a_tenant_has_no_more_traces_than_its_quota(keys: Identities, bus: Bus) -> None:
    known = keys.ring.listed()
    keys.ring.write([msgspec.structs.replace(key, quotas={"traces": 1}) for key in known])
    async with keys.client(bus, "alice") as alice, keys.client(bus, "bob") as bob:
        trace = await running(alice)
        with pytest.raises(TraceRejected, match="1 traces of tenant 'red' run here, its key's quota is 1"):
            await alice.trace("tiny", "valid", max_tokens=3).result()
        await bob.trace("tiny", "valid", max_tokens=3).result()
        await alice.cancel(trace.id)
        with pytest.raises(tracewire.TraceCancelled):
            await trace.result()
        await alice.trace("tiny", "valid", max_tokens=3).result()


async def test_traces_that_come_together_are_no_more_than_the_quota(keys: Identities, bus: Bus) -> None:
    keys.ring.write([msgspec.structs.replace(key, quotas={"traces": 2}) for key in keys.ring.listed()])
    proofs = Proofs(keys.signer("alice"), prefix=bus.keys.prefix)
    for number in range(8):
        long = Invoke(prompt="valid", sampling={"max_tokens": 100_000})
        await put(
            bus,
            f"t{number}",
            proofs.content("submit", "tiny", f"t{number}", encode(submission(f"t{number}", invokes=[long]))),
        )
    # The engine takes all of them at once.
    async with keys.served(bus), keys.client(bus, "alice") as client:
        refused = 0
        async with anyio.create_task_group() as group:

            async def wait(trace: str) -> None:
                nonlocal refused
                assert (await refusal(client, trace)).type == "QuotaExceeded"
                refused += 1
                if refused == 6:
                    group.cancel_scope.cancel()

            for number in range(8):
                group.start_soon(wait, f"t{number}")


@pytest.mark.parametrize("signed", [False, True], ids=["nobody", "a key of another tenant"])
async def test_an_entry_in_another_model_s_queue_neither_ends_nor_takes_a_trace(
    signed: bool, keys: Identities, bus: Bus
) -> None:
    """Everybody who may submit can put an entry under another's trace id there, by the scripts alone."""
    other = ScriptedEngine(partial(anyio.sleep, 0.005))
    signer = keys.signer("bob") if signed else None
    data = Proofs(signer, prefix=bus.keys.prefix).content
    async with (
        keys.served(bus),
        serving(bus, other, info("other", engine="other-engine"), identity=keys.strict),
        keys.client(bus, "alice") as alice,
    ):
        await until(lambda: bus.registry.alive("other-engine"))
        trace = await running(alice)
        mine = encode(submission(trace.id, model="other"))
        await bus.queue.put("other", trace.id, data("submit", "other", trace.id, mine))
        await until(bus.dead_letters.count)
        (letter,) = await bus.dead_letters.list()
        assert letter.trace == trace.id
        assert ("was submitted to another model" if signed else "--unsigned refuse") in letter.reason
        # It runs on, and its owner steers it.
        await alice.steer(trace.id, alpha=2.0)
        async for event in alice.subscribe(trace.id, since="start"):
            assert event.type not in ("final", "restarted")
            if event.type == "steered":
                break
        await alice.cancel(trace.id)


@pytest.mark.parametrize(
    "name",
    ["a" * 257, "t\n", "../../x", "{t0}", "\u202e", "'; DROP TABLE", "t\0", "%s%n", "$(reboot)"],
)
@with_engine
async def test_a_hostile_name_does_no_harm(name: str, keys: Identities, bus: Bus) -> None:
    data = Proofs(keys.signer("alice"), prefix=bus.keys.prefix).content(
        "submit", "tiny", name, encode(submission(name))
    )
    await put(bus, name, data)
    async with keys.client(bus, "alice") as client:
        assert (await client.trace("tiny", "valid", max_tokens=2).result()).token_ids


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["", "bob"], ids=["nobody", "another tenant"])
@with_engine
async def test_another_s_trace_is_neither_steered_nor_paused_nor_cancelled(
    id: str, keys: Identities, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async with keys.client(bus, "alice") as alice, keys.client(bus, id) as hostile:
        trace = await running(alice)
        await hostile.steer(trace.id, alpha=666.0)
        await hostile.pause(trace.id)
        await hostile.cancel(trace.id, "because")
        # The order that comes last is carried out last.
        await alice.steer(trace.id, alpha=2.0)
        async for event in alice.subscribe(trace.id, since="start"):
            assert event.type not in ("paused", "final")
            if event.type == "steered":
                assert [change.values for change in event.changes] == [{"alpha": 2.0}]
                break
        # The forged value is not in the record either: who asks for it gets what holds.
        with anyio.fail_after(10):
            while (await alice.get_live(trace.id)).values != {"alpha": 2.0}:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        for kind in ("a change of live parameters", "an order to pause", "an order to cancel"):
            assert any(kind in line and "refused" in line for line in caplog.messages), kind
        # The owner is not kept from cancelling by the forged cancellation.
        await alice.cancel(trace.id)
        with pytest.raises(tracewire.TraceCancelled):
            await trace.result()


@with_engine
async def test_a_replayed_or_moved_change_is_refused(keys: Identities, bus: Bus) -> None:
    async with keys.client(bus, "alice") as alice:
        one, other = await running(alice), await running(alice)
        await alice.steer(one.id, alpha=3.0)
        (change,) = await bus.command("HMGET", bus.keys.record(one.id), "g:alpha")
        await alice.steer(one.id, alpha=4.0)
        version, *rest = msgspec.msgpack.decode(change)
        for trace, number in ((one, version + 2), (other, 1)):
            forged = msgspec.msgpack.encode([number, *rest])
            stream = bus.keys.control(bus.keys.tag(trace.id), ENGINE)
            await bus.command("XADD", stream, "*", "k", "steer", "t", trace.id, "d", forged)
        await alice.steer(one.id, alpha=5.0)
        await alice.steer(other.id, alpha=6.0)
        for trace, last, allowed in ((one, 5.0, {3.0, 4.0, 5.0}), (other, 6.0, {6.0})):
            seen = []
            async for event in alice.subscribe(trace.id, since="start"):
                if event.type == "steered":
                    seen += [change.values["alpha"] for change in event.changes]
                    if last in seen:
                        break
            assert len(seen) == len(set(seen)), seen
            assert set(seen) == allowed
            await alice.cancel(trace.id)


@with_engine
async def test_a_replayed_pause_is_refused(keys: Identities, bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """Who reads the order's signature in the trace's record, and calls the script with it."""
    async with keys.client(bus, "alice") as alice:
        trace = await running(alice)
        await alice.pause(trace.id)
        stream = bus.keys.control(bus.keys.tag(trace.id), ENGINE)
        author, proof = await bus.command("HMGET", bus.keys.record(trace.id), "z", "zg")
        await alice.resume(trace.id)
        for number in (3, 4):
            order = ("k", "pause", "t", trace.id, "b", author, "n", number, "g", proof)
            await bus.command("XADD", stream, "*", *order)
        await alice.steer(trace.id, alpha=2.0)
        seen = []
        async for event in alice.subscribe(trace.id, since="start"):
            seen.append(event.type)
            if event.type == "steered":
                break
        assert [one for one in seen if one in ("paused", "resumed")] == ["paused", "resumed"]
        assert sum("the order of key 'alice' was replayed" in line for line in caplog.messages) == 2
        # Its owner pauses it again.
        await alice.pause(trace.id)
        pauses = 0
        async for event in alice.subscribe(trace.id, since="start"):
            pauses += event.type == "paused"
            if pauses == 2:
                break
        await alice.cancel(trace.id)


@with_engine
async def test_an_engine_is_not_drained_by_a_tenant(keys: Identities, bus: Bus) -> None:
    async with keys.client(bus) as nobody, keys.client(bus, "alice") as alice, keys.client(bus, "olga") as olga:
        await nobody.engines.drain(ENGINE)
        await alice.engines.drain(ENGINE)
        trace = await running(alice)
        assert not keys.adapter.draining.is_set()
        await alice.cancel(trace.id)
        with pytest.raises(tracewire.TraceCancelled):
            await trace.result()
        await olga.engines.drain(ENGINE)
        await keys.adapter.draining.wait()


@with_engine
async def test_a_gateway_acts_for_its_tenants(keys: Identities, bus: Bus) -> None:
    from tracewire_bus.domain.identity import acting_for

    async with keys.client(bus, "door") as door, keys.client(bus, "bob") as bob:
        acting_for.set("red")
        trace = await running(door)
        accepted = await trace.accepted()
        assert (accepted.key, accepted.tenant) == ("door", "red")
        await bob.cancel(trace.id)
        acting_for.set("blue")
        await door.steer(trace.id, alpha=666.0)
        acting_for.set("red")
        await door.steer(trace.id, alpha=2.0)
        async for event in door.subscribe(trace.id, since="start"):
            if event.type == "steered":
                assert [change.values for change in event.changes] == [{"alpha": 2.0}]
                break
        await door.cancel(trace.id)
        acting_for.set("")


# --- code and edits ---------------------------------------------------------------------------------------------------

BLOCK = Block(
    name="watch",
    source="x = f(1, scale)",
    helpers=[Helper(name="f", source="def f(a, b):\n    return a")],
    variables=pack({"scale": 2.0}),
)


@pytest.mark.parametrize(
    ("policy", "id", "block", "says"),
    [
        (CodePolicy("none", "so"), "alice", BLOCK, "--code none: so"),
        (CodePolicy("signed"), "ann", BLOCK, "right 'code'"),
        (
            "listed",
            "alice",
            msgspec.structs.replace(BLOCK, helpers=[Helper(name="f", source="def f(a, b): 1")]),
            "not ap",
        ),
        ("listed", "alice", msgspec.structs.replace(BLOCK, variables=pack({"scale": 3.0})), "is not approved"),
        ("listed", "alice", msgspec.structs.replace(BLOCK, arguments=["scale"]), "is not approved"),
        ("listed", "alice", BLOCK, ""),
        (CodePolicy("signed"), "alice", BLOCK, ""),
    ],
    ids=["none", "no right", "a helper", "a default", "a default as an argument", "approved", "signed"],
)
async def test_code_runs_only_where_the_policy_lets_it(
    policy: Any, id: str, block: Block, says: str, keys: Identities, bus: Bus
) -> None:
    if policy == "listed":
        approvals = Approvals(keys.folder / "approved.json")
        approvals.add("watch", code_hash(BLOCK), "")
        policy = CodePolicy("listed", approvals=approvals)
    async with keys.served(bus, code=policy), keys.client(bus, id) as client:
        trace = client.trace("tiny", "valid", block, max_tokens=2)
        if not says:
            await trace.result()
            return
        with pytest.raises(tracewire.CodeRefused, match=says):
            await trace.result()


async def test_an_edit_needs_a_signature_the_right_and_the_right_to_its_code(keys: Identities, bus: Bus) -> None:
    edit = Edit(name="calm", block=BLOCK)
    async with keys.served(bus, code=CodePolicy("signed")) as adapter:
        for id, says in (("", "--unsigned refuse"), ("ann", "no right 'edit'"), ("alice", "")):
            signer = keys.signer(id) if id else None
            async with signing_bus(bus, signer) as own:
                await own.edits.install("tiny", edit)
            await adapter._standing.refresh()
            errors = adapter._info.edit_errors
            assert says in errors.get("calm", "")
            assert bool(errors) == bool(says)
        # Somebody copies the signed edit under another name.
        entries = bus.keys.edits("tiny", "entries")
        signed = await bus.command("HGET", entries, "calm")
        await bus.edits.install("tiny", msgspec.structs.replace(edit, name="loud"))
        await bus.command("HSET", entries, "loud", signed)
        # The engine may have read it before: another change has it look again.
        await bus.edits.install("tiny", msgspec.structs.replace(edit, name="other"))
        await adapter._standing.refresh()
        assert "the signature is not of key 'alice'" in adapter._info.edit_errors["loud"]
        assert "calm" not in adapter._info.edit_errors


async def test_an_edit_is_neither_removed_nor_replaced_without_a_signature(keys: Identities, bus: Bus) -> None:
    edit = Edit(name="calm", interventions=[Ablate("residual(0)")])
    async with (
        keys.served(bus) as adapter,
        signing_bus(bus, keys.signer("alice")) as alice,
        signing_bus(bus, keys.signer("ann")) as ann,
    ):

        async def seen() -> tuple[list[str], str]:
            await adapter._standing.refresh()
            return [one.name for one in adapter._standing._ready], adapter._info.edit_errors.get("calm", "")

        first = await alice.edits.install("tiny", edit)
        assert await seen() == (["calm"], "")
        # A copy of a valid removal, of an edit that was installed again since.
        await alice.edits.remove("tiny", "calm")
        proof = await bus.command("HGET", bus.keys.edits("tiny", "removed"), "calm")
        assert await seen() == ([], "")
        second = await alice.edits.install("tiny", edit)
        assert second > first
        assert await seen() == (["calm"], "")
        await bus.edits.remove("tiny", "calm")
        assert await seen() == (["calm"], f"its removal is refused: {UNSIGNED}")
        await bus.command("HSET", bus.keys.edits("tiny", "removed"), "calm", proof)
        await bus.edits.install("tiny", msgspec.structs.replace(edit, name="calm", scope="asked"))
        names, why = await seen()
        assert names == ["calm"]
        assert f"its replacement is refused: the removal is of version {first}" in why
        assert adapter._standing._ready[0].scope == "all"
        # A key without the right.
        await ann.edits.remove("tiny", "calm")
        names, why = await seen()
        assert names == ["calm"]
        assert "no right 'edit'" in why
        # A signed edit replaces it, and a signed removal ends it, also of a version that the engine has not seen.
        await alice.edits.install("tiny", edit)
        assert await seen() == (["calm"], "")
        await alice.edits.install("tiny", edit)
        await alice.edits.remove("tiny", "calm")
        assert await seen() == ([], "")
        # An edit does not outlive its key.
        await alice.edits.install("tiny", edit)
        assert await seen() == (["calm"], "")
        known = keys.ring.listed()
        keys.ring.write([msgspec.structs.replace(key, revoked=1.0) if key.id == "alice" else key for key in known])
        # Although nobody has changed an edit since.
        names, why = await seen()
        assert names == []
        assert "was revoked" in why
        # And it is back with its key.
        keys.ring.write(known)
        assert await seen() == (["calm"], "")
        keys.ring.write([])
        names, why = await seen()
        assert names == []
        assert "no key 'alice'" in why
        await bus.edits.remove("tiny", "calm")
        assert await seen() == ([], "")


# --- finals -----------------------------------------------------------------------------------------------------------


@with_engine
async def test_a_forged_final_shows(keys: Identities, bus: Bus) -> None:
    trusted = {"engine_keys": [keys.signer("engine").public]}
    async with keys.client(bus, "alice", **trusted) as client:
        result = await client.trace("tiny", "valid", max_tokens=2, trace_id="genuine").result()
        assert result.token_ids
        assert (await client.engines.list())[0].public_key == keys.signer("engine").public
        trace = await running(client)
        await client.pause(trace.id)
        async for event in trace:
            if event.type == "paused":
                break
        attempt, _, seq = (await bus.tail_id(trace.id)).partition("-")
        final = encode(Final(attempt=int(attempt), seq=int(seq) + 1, status="finished"))
        await bus.command("XADD", bus.keys.events(trace.id), FINAL_ID, "v", schema_text(), "d", final)
        with pytest.raises(tracewire.UnverifiedFinal) as shown:
            await client.subscribe(trace.id).result()
        assert shown.value.final.status == "finished"
