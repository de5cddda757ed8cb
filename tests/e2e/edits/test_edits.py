"""Standing interventions on the real engine: run on every request, or on those that ask for them, live.

The shared engine checks what a traced block saves, and what edits save beside it, against nnsight's own collect.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.blocks import edits as blocks
from tracewire import Client, Edits, Probe, Prompt, Steer, StopWhen
from tracewire_bus.wire.messages import Block, Edit

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5}
MODEL = "demo"


async def run(client: Client, block: Any = None, prompt: Any = PROMPT, **options: Any) -> Any:
    async with client.trace(MODEL, prompt, block, **{**GREEDY, **options}) as trace:
        return await trace.result()


async def test_an_edit_saves_on_every_trace_under_its_name(client: Client, edits: Edits) -> None:
    own = await run(client, blocks.watch)
    await edits.install("seen", blocks.watch)
    plain, traced = await run(client), await run(client, blocks.whole(layer=1))
    assert plain.token_ids == traced.token_ids == own.token_ids
    assert set(plain.saves) == {"seen/hidden"}
    assert set(traced.saves) == {"seen/hidden", "hidden"}
    for result in (plain, traced):
        assert [vector.shape for vector in result.saves["seen/hidden"]] == [(256,)] * 5
        for vector, wanted in zip(result.saves["seen/hidden"], own.saves["hidden"], strict=True):
            assert np.array_equal(vector, wanted)
        assert {entry.name for entry in result.manifest} == set(result.saves)
    assert plain.saves["seen/hidden"][0] is not traced.saves["seen/hidden"][0]
    assert traced.saves["hidden"].shape[0] == traced.usage.prompt_tokens


async def test_what_it_saves_streams_with_each_token(client: Client, edits: Edits) -> None:
    await edits.install("seen", blocks.watch)
    async with client.trace(MODEL, PROMPT, **GREEDY) as trace:
        assert (await trace.accepted()).edits == [[("seen", (await edits.get("seen")).version)]]
        steps = [step async for output in trace for step in output.deltas]
    assert [[delta.path[0] for delta in step] for step in steps] == [["seen/hidden"]] * 5


async def test_a_removed_edit_runs_no_more(client: Client, edits: Edits) -> None:
    before = await run(client)
    await edits.install("off", blocks.fill(value=3.0))
    during = await run(client)
    await edits.remove("off")
    after = await run(client)
    assert during.token_ids != before.token_ids
    assert after.token_ids == before.token_ids
    assert after.accepted.edits == []
    with pytest.raises(tracewire.UnknownEdit):
        await edits.remove("off")


async def test_several_keep_their_names_and_apply_in_the_order_of_their_installation(
    client: Client, edits: Edits
) -> None:
    await edits.install("one", blocks.fill(value=1.0))
    await edits.install("two", blocks.fill(value=2.0))
    # Replaced, it keeps its place.
    await edits.install("one", blocks.fill(value=3.0))
    result = await run(client, blocks.seen)
    assert set(result.saves) == {"one/before", "two/before", "norms"}
    assert result.saves["two/before"] == [3.0] * 5
    assert abs(result.saves["one/before"][0]) < 1.0
    # The trace's own block comes last.
    assert result.saves["norms"] == pytest.approx([2.0 * 256**0.5] * 5)
    assert [edit.name for edit in await edits.list()] == ["one", "two"]


async def test_who_asks_for_which(client: Client, edits: Edits) -> None:
    await edits.install("always", blocks.watch)
    await edits.install("default", blocks.watch, scope="default")
    await edits.install("asked", blocks.watch, scope="asked")
    for asked, names in (
        (None, {"always", "default"}),
        ([], {"always"}),
        (["asked"], {"always", "asked"}),
        (("default", "always"), {"always", "default"}),
    ):
        result = await run(client, edits=asked)
        assert set(result.saves) == {f"{name}/hidden" for name in names}, asked


async def test_a_prompts_own_word_counts(client: Client, edits: Edits) -> None:
    await edits.install("a", blocks.watch, scope="asked")
    await edits.install("b", blocks.whole, scope="asked")
    prompts = [PROMPT, Prompt("print(", edits=["b"]), Prompt("x = [", edits=[])]
    async with client.trace(MODEL, prompts=prompts, edits=["a"], **GREEDY) as trace:
        result = await trace.result()
    assert [set(invoke.choices[0].saves) for invoke in result.invokes] == [{"a/hidden"}, {"b/hidden"}, set()]
    version = {edit.name: edit.version for edit in await edits.list()}
    assert result.accepted.edits == [[("a", version["a"])], [("b", version["b"])], []]


async def test_every_choice_has_its_own(client: Client, edits: Edits) -> None:
    await edits.install("seen", blocks.watch)
    result = await run(client, blocks.seen, n=2, temperature=1.0, seed=3)
    (invoke,) = result.invokes
    assert [len(choice.saves["seen/hidden"]) for choice in invoke.choices] == [5, 5]
    first, second = ([vector.tobytes() for vector in choice.saves["seen/hidden"]] for choice in invoke.choices)
    assert first != second


async def test_a_name_that_is_not_installed_is_refused(client: Client, edits: Edits) -> None:
    await edits.install("a", blocks.watch)
    with pytest.raises(tracewire.TraceRejected, match=r"no edit 'nope' is installed on 'demo' \(installed: 'a'\)") as e:
        await run(client, edits=["a", "nope"])
    assert (e.value.field, e.value.type) == ("edits", "UnknownEdit")
    with pytest.raises(tracewire.TraceRejected, match="list of names") as wrong:
        client.trace(MODEL, PROMPT, edits="a")
    assert wrong.value.field == "edits"


async def test_a_running_trace_keeps_what_it_began_with(client: Client, edits: Edits) -> None:
    first = await edits.install("seen", blocks.fill(value=1.0))
    async with client.trace(MODEL, PROMPT, blocks.seen, **{**GREEDY, "max_tokens": 400}) as trace:
        await trace.accepted()
        second = await edits.install("seen", blocks.fill(value=2.0))
        other = await run(client, blocks.seen)
        assert trace.status is None, "the trace ended before anything was tried"
        await edits.remove("seen")
        result = await trace.result()
    assert first.version < second.version
    assert other.saves["norms"] == pytest.approx([32.0] * 5)
    assert result.saves["norms"] == pytest.approx([16.0] * 400)
    assert result.accepted.edits == [[("seen", first.version)]]


async def test_two_requests_at_once_have_their_own(client: Client, edits: Edits) -> None:
    await edits.install("seen", blocks.whole)
    prompts = ["x", PROMPT, "print(1, 2, 3)\n" * 4]
    results: dict[str, Any] = {}

    async def one(prompt: str) -> None:
        results[prompt] = await run(client, blocks.seen, prompt)

    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(one, prompt)
    for prompt in prompts:
        result = results[prompt]
        assert result.saves["seen/hidden"].shape[0] == result.usage.prompt_tokens
    assert len({result.usage.prompt_tokens for result in results.values()}) == 3


async def test_declared_interventions_stand_too(client: Client, edits: Edits) -> None:
    direction = np.ones(256, dtype=np.float32)
    probe = Probe("score", "residual(2)", weight=direction)
    plain = await run(client, interventions=[probe])
    await edits.install("shift", interventions=[Steer("residual(2)", direction, scale=0.5), probe])
    alone, beside = await run(client), await run(client, blocks.seen, interventions=[probe])
    assert set(alone.saves) == {"shift/score"}
    assert set(beside.saves) == {"shift/score", "score", "norms"}
    # 0.5 along each of 256 places; the trace's own reads what the edit left.
    assert alone.saves["shift/score"][0] == pytest.approx(plain.saves["score"][0] + 128, abs=1.0)
    assert beside.saves["score"] == beside.saves["shift/score"]
    assert len(alone.saves["shift/score"]) == 5


async def test_a_block_and_declared_interventions_in_one_edit(client: Client, edits: Edits) -> None:
    await edits.install("both", blocks.watch, interventions=[Probe("norm", "residual(2)", reduce="norm")])
    result = await run(client)
    assert set(result.saves) == {"both/hidden", "both/norm"}
    for vector, norm in zip(result.saves["both/hidden"], result.saves["both/norm"], strict=True):
        assert np.linalg.norm(vector.astype(np.float32)) == pytest.approx(norm, rel=1e-2)


async def test_a_large_value_is_a_reference(client: Client, edits: Edits) -> None:
    await edits.install("large", blocks.large)
    result = await run(client)
    reference = result.saves["large/rows"]
    assert isinstance(reference, tracewire.ArrayRef)
    assert (await reference.load()).shape == (result.usage.prompt_tokens, 256 * 64)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "kind", "message", "left"),
    [
        (blocks.raising, "ValueError", "boom, every request", 3),
        (blocks.raising_at_once, "RuntimeError", "before anything", 0),
    ],
)
async def test_a_request_goes_on_without_an_edit_that_raised(
    client: Client, edits: Edits, block: Any, kind: str, message: str, left: int
) -> None:
    plain = await run(client, blocks.seen)
    await edits.install("bad", block)
    await edits.install("good", blocks.watch)
    async with edits.watch("bad") as told:
        result = await run(client, blocks.seen)
        item = await anext(told)
    assert result.status == "finished"
    assert result.token_ids == plain.token_ids
    assert result.saves["norms"] == plain.saves["norms"]
    assert len(result.saves["good/hidden"]) == 5
    assert len(result.saves.get("bad/steps", [])) == left
    assert result.save_errors == {"0.0.bad": f"the edit raised {kind}: {message}"}
    assert (item.trace_id, item.edit, item.saves) == (result.trace_id, "bad", {})
    assert (item.error.type, item.error.message) == (kind, message)
    assert item.error.filename == blocks.__file__
    assert "raise" in item.error.source


async def test_an_edit_that_cannot_be_built_counts_as_one_that_raised(client: Client, edits: Edits) -> None:
    block = blocks.importing.block()
    block.modules = {"nothing": "no_such_module_anywhere"}
    await edits.install("bad", block)
    result = await run(client, blocks.seen)
    assert result.status == "finished"
    assert "No module named 'no_such_module_anywhere'" in result.save_errors["0.0.bad"]


async def test_with_on_error_fail_the_request_ends(client: Client, edits: Edits) -> None:
    await edits.install("guard", blocks.raising, on_error="fail")
    for block in (blocks.seen, None):
        with pytest.raises(tracewire.TraceFailed, match="edit 'guard': boom, every request") as failed:
            await run(client, block, max_tokens=50)
        assert len(failed.value.result.token_ids) == 3
        assert failed.value.result.error.field == "edits.guard"
        assert failed.value.result.saves["guard/steps"] == [failed.value.result.usage.prompt_tokens, 1, 1]


async def test_one_that_raises_each_time_is_disabled_visibly(client: Client, edits: Edits) -> None:
    await edits.install("bad", blocks.raising_at_once, max_failures=3)
    for _ in range(3):
        assert set((await run(client)).save_errors) == {"0.0.bad"}
    with anyio.fail_after(30):
        # It is disabled by whoever counts, while the next request may be on its way already.
        while (await run(client)).save_errors:
            pass
    disabled = (await edits.get("bad")).disabled
    assert "raised on 3 requests" in disabled
    assert "RuntimeError: before anything" in disabled
    assert (await edits.get("bad")).engines == ()
    with pytest.raises(tracewire.TraceRejected, match="it is disabled: it raised on 3 requests"):
        await run(client, edits=["bad"])
    await edits.install("bad", blocks.watch)
    assert set((await run(client)).saves) == {"bad/hidden"}


async def test_a_request_that_went_well_ends_a_row_of_failures(client: Client, edits: Edits) -> None:
    await edits.install("bad", blocks.raising, max_failures=2)
    for tokens in (5, 1, 5, 1):
        await run(client, max_tokens=tokens)
    assert (await edits.get("bad")).disabled == ""


async def test_an_edits_stop_is_its_own(client: Client, edits: Edits) -> None:
    await edits.install("stop", blocks.stopping)
    result = await run(client, blocks.seen)
    assert result.status == "finished"
    assert len(result.token_ids) == len(result.saves["norms"]) == 5
    assert result.saves["stop/steps"] == [0, 1]
    assert result.save_errors == {}


async def test_one_that_waits_for_what_never_comes_is_unwound_quietly(client: Client, edits: Edits) -> None:
    await edits.install("late", blocks.out_of_reach)
    result = await run(client, blocks.seen)
    assert set(result.saves) == {"norms", "late/early"}
    assert result.save_errors == {}


# --- what is refused at installation ----------------------------------------------------------------------------------


async def test_a_faulty_edit_is_refused_at_installation(client: Client, edits: Edits) -> None:
    with pytest.raises(tracewire.UnknownModulePath, match="mlp") as path:
        await edits.install("bad", blocks.mistaken)
    assert path.value.line is not None
    for name, arguments, field, message in (
        ("bad", {}, "block", "got neither"),
        ("a/b", {"block": blocks.watch}, "name", "expected 1 to 64 letters"),
        ("bad", {"block": blocks.watch, "scope": "some"}, "scope", "'all', 'default', 'asked'"),
        ("bad", {"block": blocks.watch, "on_error": "ignore"}, "on_error", "'continue', 'fail'"),
        ("bad", {"block": blocks.watch, "max_failures": -1}, "max_failures", "expected a number"),
        ("bad", {"block": blocks.steered}, "block", "no live parameters"),
        ("bad", {"block": Block(name="f", source="x = (")}, "block", "does not compile at line 1"),
        ("bad", {"interventions": [Probe("p", "residual(99)")]}, "interventions[0].at", "0 to"),
        ("bad", {"interventions": [Steer("residual(1)", [1.0] * 3)]}, "interventions[0].vector", "256"),
        ("bad", {"interventions": [StopWhen("p", above=1.0)]}, "interventions[0]", "belongs to a trace"),
        ("bad", {"block": blocks.fill(value=np.zeros(2**21))}, "block", "bytes with its variables"),
    ):
        with pytest.raises(tracewire.EditRejected, match=message) as refused:
            await edits.install(name, **arguments)
        assert refused.value.field == field
    assert await edits.list() == []
    with pytest.raises(tracewire.UnknownModel):
        await client.edits("nobody's").install("a", blocks.watch)


async def test_what_an_engine_refuses_is_put_back(
    client: Client, edits: Edits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older client's, which does not know what is wrong."""
    monkeypatch.setattr("tracewire.admin.edits.check_paths", lambda block, trees: None)
    with pytest.raises(tracewire.EditRejected, match=r"module path 'model.*mpl' does not exist in demo"):
        await edits.install("a", blocks.mistaken)
    assert await edits.list() == []
    good = await edits.install("a", blocks.watch)
    with pytest.raises(tracewire.EditRejected, match=r"mpl.*says engine"):
        await edits.install("a", blocks.mistaken)
    (standing,) = await edits.list()
    assert standing.block == "watch"
    assert standing.version > good.version
    assert set((await run(client, edits=["a"])).saves) == {"a/hidden"}


async def test_one_that_was_put_there_past_all_checks_runs_nowhere(client: Client, edits: Edits) -> None:
    bus = client._session.open_bus()
    await bus.edits.install(MODEL, Edit(name="empty"))
    await bus.edits.install(MODEL, Edit(name="bad", block=Block(name="f", source="return 1")))
    version = (await edits.install("good", blocks.watch)).version
    bad = await edits.get("bad")
    assert bad.engines == ()
    assert all("block: f does not compile" in problem for problem in bad.problems.values())
    result = await run(client)
    assert result.accepted.edits == [[("good", version)]]
    with pytest.raises(tracewire.TraceRejected, match="edit 'empty' does not run on 'demo': edit: it has neither"):
        await run(client, edits=["empty"])


async def test_only_the_version_that_is_meant_is_replaced(edits: Edits) -> None:
    first = await edits.install("a", blocks.watch, replacing=0)
    with pytest.raises(tracewire.EditConflict) as conflict:
        await edits.install("a", blocks.whole, replacing=0)
    assert conflict.value.version == first.version
    second = await edits.install("a", blocks.whole, replacing=first.version)
    assert (second.block, second.by, second.engines) == ("whole", first.by, first.engines)
    assert len(second.engines) == 1
    with pytest.raises(tracewire.UnknownEdit):
        await edits.remove("a", version=first.version)


async def test_the_code_of_the_page_runs(edits: Edits, engine_bus: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "edits.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    block, connecting, body = text.replace("redis://localhost", engine_bus).partition("async with tracewire.connect")
    main = f"async def main(direction):\n{textwrap.indent(connecting + body, '    ')}    return result\n"
    path = tmp_path / "page_of_edits.py"
    path.write_text(f"{block}\n\n{main}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = await module.main(np.ones(256, np.float32))
    assert len(result.saves["norms/norms"]) == len(result.token_ids)
    assert [edit.name for edit in await edits.list()] == ["norms", "calm"]


async def test_nothing_is_left_of_all_this(client: Client, edits: Edits) -> None:
    """A worker that kept what edits held would still count their requests."""
    await edits.install("seen", blocks.watch)
    await edits.install("bad", blocks.raising)
    results = []

    async def one() -> None:
        results.append(await run(client))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(one)
    assert {tuple(result.token_ids) for result in results} == {tuple(results[0].token_ids)}
    (engine,) = [one for one in await client._session.open_bus().registry.list() if one.model == MODEL]
    assert engine.edit_errors == {}
