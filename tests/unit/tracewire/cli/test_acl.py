"""The access rules on the command line, and the scripts that users run."""

from __future__ import annotations

import pytest

from tests.support.access_files import FILES
from tests.support.cli import command
from tracewire_bus.bus import Bus


async def test_it_prints_the_shipped_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("acl") == 0
    assert capsys.readouterr().out == FILES["users.acl"]
    assert await command("acl", "--server", "6.2", "--cluster") == 0
    assert capsys.readouterr().out == FILES["users-cluster-6.2.acl"]


async def test_it_prints_a_tenants_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("acl", "controller", "--tenant", "acme", "--pinned", "--prefix", "mine") == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = line.split()
    assert words[:2] == ["user", "tracewire-controller"]
    assert "~mine:{t*}:trace:acme:*" in words
    assert not [word for word in words if word.endswith(":trace:*")]
    assert "+evalsha" not in words
    assert [word for word in words if word.startswith("+evalsha|")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["boss"], "expected one of consumer"), (["--tenant", "a*"], "--tenant: expected letters")],
)
async def test_a_wrong_word_is_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("acl", *arguments) == 2
    assert says in capsys.readouterr().err


async def test_it_loads_scripts(embedded: str, bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    await bus.command("SCRIPT", "FLUSH")
    for says in ("loaded the scripts", "the scripts were loaded already"):
        assert await command("acl", "--load", "--url", embedded) == 0
        assert says in capsys.readouterr().err
