"""The rules of a guard are checked when they are read; an error names the rule and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tracewire.errors import InvalidRules
from tracewire.guards.rules import Ask, Rules, read_rules

GOOD = """
model = "demo"
audit = "guard.jsonl"

[budget]
actions_per_minute = 60
beyond = "cancel"

[[rules]]
name = "code"
save = "projection"
above = 4
release = 2.5
tokens = 3
do = "steer"
live = { alpha = 0.0 }

[[rules]]
name = "prose"
save = "projection"
below = -4.0
ask = { model = "judge", prompt = "Is this prose? {text}", answers = { yes = "resume", no = "cancel" } }
on_timeout = "cancel"
"""


def test_rules_are_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(GOOD)
    rules = read_rules(path)
    assert (rules.model, rules.group, rules.since, rules.budget.beyond) == ("demo", "guards", "now", "cancel")
    code, prose = rules.rules
    assert (code.above, code.release, code.tokens, code.live, code.pause) == (4.0, 2.5, 3, {"alpha": 0.0}, True)
    assert isinstance(prose.ask, Ask)
    assert prose.ask.answers == {"yes": "resume", "no": "cancel"}
    assert read_rules(rules) is rules


def given(**rule: Any) -> dict[str, Any]:
    return {"model": "m", "rules": [{"name": "r", "save": "s", "above": 1.0, "do": "resume", **rule}]}


def test_a_dict_is_read_alike() -> None:
    assert isinstance(read_rules(given()), Rules)


@pytest.mark.parametrize(
    ("wrong", "field", "said"),
    [
        ({"tokens": "3"}, "tokens", "expected `int`, got `str`"),
        ({"tokens": 0}, "tokens", "expected a positive number"),
        ({"abov": 1.0}, "abov", "did you mean 'above'"),
        ({"above": None, "below": None}, "above", "expected one of above and below"),
        ({"below": 0.0}, "above", "expected one of above and below"),
        ({"above": float("nan")}, "above", "expected a finite number"),
        ({"release": 2.0}, "release", r"expected at most above \(1\)"),
        ({"above": None, "below": 1.0, "release": 0.0}, "release", "expected at least below"),
        ({"save": ""}, "save", "expected the name of a save"),
        ({"output": -1}, "output", "expected an index"),
        ({"timeout": 0.0}, "timeout", "expected seconds"),
        ({"on_timeout": "steer"}, "on_timeout", "invalid enum value"),
        ({"do": None}, "do", "since the rule asks nobody"),
        ({"ask": "terminal"}, "do", "expected none"),
        ({"do": "steer"}, "live", "expected the live parameters"),
        ({"do": "steer", "live": {"a": float("inf")}}, "live.a", "finite"),
        ({"do": None, "ask": "somebody"}, "ask", "invalid enum value"),
        ({"do": None, "ask": {}}, "ask", "one of http, function and model"),
        ({"do": None, "ask": {"htp": "x"}}, "ask.htp", "did you mean 'http'"),
        ({"do": None, "ask": {"http": "ftp://x"}}, "ask.http", "begins with http"),
        ({"do": None, "ask": {"function": "decide"}}, "ask.function", "expected 'module:function'"),
        ({"do": None, "ask": {"http": "http://x", "prompt": "y"}}, "ask.model", "to which prompt and answers belong"),
        ({"do": None, "ask": {"model": "j", "prompt": "{text}"}}, "ask.answers", "expected what to do"),
        ({"do": None, "ask": {"model": "j", "prompt": "x", "answers": {"y": "cancel"}}}, "ask.prompt", "with {text}"),
        ({"do": None, "ask": {"model": "j", "prompt": "{x}", "answers": {"y": "cancel"}}}, "ask.prompt", "{text}"),
    ],
)
def test_an_error_names_the_rule_and_the_field(wrong: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidRules, match=said) as caught:
        read_rules(given(**wrong))
    assert (caught.value.rule, caught.value.field) == ("r", field)
    assert str(caught.value).startswith(f"rule 'r', {field}: ")


@pytest.mark.parametrize(
    ("wrong", "rule", "field"),
    [
        ({"model": ""}, "", "model"),
        ({"group": ""}, "", "group"),
        ({"idle": 0.0}, "", "idle"),
        ({"rules": []}, "", "rules"),
        ({"rule": []}, "", "rule"),
        ({"budget": {"actions_per_minute": -1}}, "", "budget.actions_per_minute"),
        ({"budget": {"beyond": "panic"}}, "", "budget.beyond"),
        ({"rules": [{"save": "s"}]}, "number 1", "name"),
        ({"rules": [{"name": "a/b", "save": "s", "above": 1.0, "do": "resume"}]}, "number 1", "name"),
        ({"rules": [given()["rules"][0], given()["rules"][0]]}, "r", "name"),
    ],
)
def test_errors_beside_a_rule(wrong: dict[str, Any], rule: str, field: str) -> None:
    with pytest.raises(InvalidRules) as caught:
        read_rules({**given(), **wrong})
    assert (caught.value.rule, caught.value.field) == (rule, field)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRules, match=r"nowhere.toml: No such file"):
        read_rules(tmp_path / "nowhere.toml")
    (tmp_path / "odd.toml").write_text("model = ")
    with pytest.raises(InvalidRules, match=r"odd.toml: expected TOML: Invalid value"):
        read_rules(tmp_path / "odd.toml")
