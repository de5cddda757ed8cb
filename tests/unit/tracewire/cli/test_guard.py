"""`tracewire guard`: rules are checked at the start, and each decision is printed."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.support.cli import command
from tests.support.guards import alarms_of, audited, ended, guard_process
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.until import until
from tracewire import Client
from tracewire.cli.main import main
from tracewire_bus.bus import Bus

RULES = """
model = "tiny"
since = "start"

[[rules]]
name = "high"
save = "acts"
output = 0
above = 3800
do = "cancel"
"""


async def test_wrong_rules_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULES.replace("above = 3800", 'above = "3800"'))
    assert await command("guard", str(path), "--url", "redis://nowhere") == 2
    assert "tracewire: rule 'high', above: expected `float | null`, got `str`" in capsys.readouterr().err
    path.write_text(RULES)
    assert await command("guard", str(path), "--check") == 0
    assert "1 rules for tiny" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--check",)], ids=["run", "check"])
@pytest.mark.parametrize(
    ("change", "audit", "says"),
    [
        (
            ('do = "cancel"', 'ask = { function = "no_such_module:f" }'),
            "",
            "rule 'high', ask.function: no_such_module:f",
        ),
        (("", ""), "none/audit.jsonl", "audit: 'none/audit.jsonl': No such file or directory"),
        (("", ""), ".", "audit: '.': Is a directory"),
        (("since", 'audit = "none/a.jsonl"\nsince'), "", "audit: 'none/a.jsonl': No such file or directory"),
    ],
    ids=["function", "no folder", "a folder", "in the rules"],
)
def test_what_the_rules_need_is_checked_at_the_start(
    change: tuple[str, str],
    audit: str,
    says: str,
    more: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rules.toml"
    path.write_text(RULES.replace(*change) if any(change) else RULES)
    given = ("--audit", audit) if audit else ()
    assert main(["guard", str(path), "--url", "redis://nowhere", *given, *more]) == 2
    assert f"tracewire: {says}" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["rules.toml"]


@pytest.mark.parametrize("dry", [False, True])
async def test_decisions_are_printed(client: Client, bus: Bus, tmp_path: Path, dry: bool) -> None:
    name = next(name for name in (f"t{number}" for number in range(100)) if len(alarms_of(name, 200)) > 2)
    path, audit = tmp_path / "rules.toml", tmp_path / "audit.jsonl"
    path.write_text(RULES)
    decided = len(alarms_of(name, 200)) if dry else 1
    more = ("--json", "--audit", str(audit), *(["--dry-run"] if dry else []))
    process = guard_process(client.url, bus.keys.prefix, path, "g", *more)
    with anyio.fail_after(60):
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.02)), info()):
            try:
                await client.models.get("tiny", timeout=60)
                await until(lambda: bus.command("HEXISTS", bus.keys.watch_groups(), "guards"))
                status = await client.trace("tiny", name, acts, max_tokens=200, trace_id=name, detach=True).until_done()
                await until(lambda: len(audited(audit)) >= decided)
                process.send_signal(signal.SIGTERM)
                printed, _ = await anyio.to_thread.run_sync(process.communicate)
            finally:
                ended(process)
    assert process.returncode == 0
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["alarm"]["token"] for line in lines] == alarms_of(name, 200)[: len(lines)]
    assert (lines[0]["outcome"], lines[0]["do"]) == ("dry run" if dry else "done", "cancel")
    # Tokens that came before the cancellation may set off alarms, too.
    assert {line["outcome"] for line in lines[1:]} <= {"dry run" if dry else "late"}
    assert status == ("finished" if dry else "cancelled")
