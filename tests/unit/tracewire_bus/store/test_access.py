"""The access rules of each role: from the text of its scripts, and of its tenant's traces only."""

from __future__ import annotations

import pytest

from tracewire_bus.store.access import ROLES, Role, all_scripts, rules, users
from tracewire_bus.transport.scripts import Script


@pytest.mark.parametrize("role", ROLES)
def test_redis_62_gets_the_same_rules_without_modes(role: Role) -> None:
    later = rules(role).replace("%R~", "~").replace("%W~", "~").split()
    later = ["+xinfo" if word.startswith("+xinfo|") else word for word in later]
    assert [*dict.fromkeys(later)] == [*dict.fromkeys(rules(role, server="6.2").split())]


def test_a_roles_commands_are_those_of_its_scripts() -> None:
    words = set(rules("controller").split())
    # Of the scripts that steer and that queue, which the client itself never sends.
    assert {"+hincrby", "+rpush", "+xadd", "+zremrangebyrank"} <= words
    assert not {"+blpop", "+xtrim", "+zpopmin", "+eval"} & words
    assert not {"+xadd", "+evalsha", "+hset"} & set(rules("consumer").split())


def test_a_pinned_user_has_the_digests_of_its_scripts() -> None:
    words = set(rules("operator", pinned=True).split())
    assert f"+evalsha|{Script('control_drain').digest}" in words
    assert "+evalsha" not in words


def test_a_tenants_name_stands_for_itself() -> None:
    assert "~tw:{t*}:trace:a\\-b:*" in rules("controller", tenant="a-b").split()
    assert "%W~tw:{t*}:firehose" in rules("controller", tenant="a").split()
    assert "~tw:{t*}:firehose" in rules("controller").split()


def test_a_guard_may_what_a_controller_may_and_share_events() -> None:
    guard, controller = set(rules("guard").split()), set(rules("controller").split())
    assert controller < guard
    assert {"~tw:watch-groups", "~tw:{t*}:guarded:*", "+xreadgroup", "+xgroup|create"} <= guard - controller
    assert "~tw:{t*}:guarded:a:*" in rules("guard", tenant="a").split()
    # Nor may it forge the engines' audit trail.
    assert not any("audit" in word for word in guard)


def test_users_are_called_for_their_roles() -> None:
    assert [line.split()[1] for line in users(["engine", "editor"])] == ["tracewire-engine", "tracewire-editor"]
    assert "queue_put" in all_scripts()
