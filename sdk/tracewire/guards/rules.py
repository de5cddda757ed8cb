"""The rules of a guard: which save to watch, when to act, whom to ask, and what to do. Read from TOML and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tracewire.checks import shown
from tracewire.errors import InvalidRules

__all__ = ["Ask", "Budget", "Do", "Rule", "Rules", "read_rules"]

Do: TypeAlias = Literal["steer", "resume", "cancel"]
"""What a guard does with a trace: change its live parameters and let it go on, let it go on, or cancel it."""

_PLACE = re.compile(r" - at `\$(?:\.rules\[(\d+)\])?\.?(.*)`$")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom a rule asks: exactly one of these.

    Attributes:
        http: a URL, to which the guard posts the alarm as JSON. The answer is a decision as JSON.
        function: a Python function, `"module:function"`, async or not, of an `Alarm`. It returns a decision.
        model: a model, which gets `prompt` with the alarm's fields filled in (`{text}`, `{value}`, ...). `answers` maps
            the first word of its answer, in lower case, to what is done.
    """

    http: str = ""
    function: str = ""
    model: str = ""
    prompt: str = ""
    answers: dict[str, Do] = {}
    max_tokens: int = 8


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a guard acts, and how.

    Attributes:
        name: the rule's name, in the audit and as part of the author of what the guard does.
        save: the saved name that the rule reads: a list that gains a number a token, as a `Probe` saves it.
        above, below: the threshold, one of the two. A value that is NaN counts as beyond it.
        release: after an alarm the rule sleeps until a value is back on this side of `release`; by default of the
            threshold.
        tokens: for how many tokens in a row the values must be beyond the threshold.
        output: the index of the number to read, where an item has several.
        pause: whether the guard pauses the trace before it asks and acts.
        ask: whom to ask: `"terminal"`, an `Ask`, or nobody.
        timeout: how long the guard waits for an answer, in seconds.
        on_timeout: what becomes of the trace if no valid answer comes in time, or if the guard dies meanwhile.
        do: what the guard does if it asks nobody.
        live: the live parameters that `steer` sets.
        reason: the reason that consumers of a cancelled trace read.
    """

    name: str
    save: str
    above: float | None = None
    below: float | None = None
    release: float | None = None
    tokens: int = 1
    output: int | None = None
    pause: bool = True
    ask: Literal["terminal"] | Ask | None = None
    timeout: float = 30.0
    on_timeout: Literal["resume", "cancel"] = "resume"
    do: Do | None = None
    live: dict[str, Any] = {}
    reason: str = ""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often one guard process acts; 0 is no limit. Beyond the budget it ignores, pauses or cancels.

    `pause` pauses the trace, and the engine ends the pause after the rule's `timeout` as its `on_timeout` says.
    """

    actions_per_minute: int = 0
    actions_per_trace: int = 0
    beyond: Literal["ignore", "pause", "cancel"] = "ignore"


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a guard is told.

    Attributes:
        model: the model whose traces the guard reads.
        rules: the rules, each with a name of its own.
        group: the name of the guards that share the traces.
        since: where a new group begins: `now`, or `start` for all traces that Redis knows of, finished ones too.
        idle: after how many seconds of silence other guards of the group take a guard's traces over.
        dry_run: whether the guard only says what it would do.
        audit: a file to which the guard appends a line of JSON for each decision.
        budget: how often it acts.
    """

    model: str
    rules: list[Rule]
    group: str = "guards"
    since: Literal["now", "start"] = "now"
    idle: float = 10.0
    dry_run: bool = False
    audit: str = ""
    budget: Budget = Budget()


def read_rules(source: str | PathLike[str] | Mapping[str, Any] | Rules) -> Rules:
    """The rules in a TOML file, or in a dict of the same form, checked.

    Raises:
        InvalidRules: they cannot be read, or a rule is wrong. The error names the rule and the field.
    """
    if isinstance(source, Rules):
        return _checked(source)
    given = source if isinstance(source, Mapping) else _loaded(Path(source))
    try:
        rules = msgspec.convert(given, Rules)
    except msgspec.ValidationError as error:
        raise _named(str(error), given) from None
    return _checked(rules)


def _loaded(path: Path) -> Mapping[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRules("", "", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidRules("", "", f"{path}: expected TOML: {error}") from None


def _named(message: str, given: Mapping[str, Any]) -> InvalidRules:
    """msgspec's error with the name of the rule and the field in place of a path."""
    found = _PLACE.search(message)
    text = message if found is None else message[: found.start()]
    number, field = (None, "") if found is None else found.groups()
    if (unknown := re.search(r"unknown field `(.+?)`", text)) is not None:
        structs: dict[str, type] = {"ask": Ask, "budget": Budget}
        kind = structs.get(field) or (Rules if number is None else Rule)
        near = get_close_matches(unknown[1], kind.__struct_fields__, 1)  # type: ignore[attr-defined]
        text = f"unknown field{f'; did you mean {near[0]!r}?' if near else ''}"
        field = f"{field}.{unknown[1]}" if field else unknown[1]
    elif (missing := re.search(r"missing required field `(.+?)`", text)) is not None:
        text, field = "expected a value, got none", missing[1]
    rules = given.get("rules")
    rule: Any = rules[int(number)] if number is not None and isinstance(rules, list) else None
    name = rule.get("name") if isinstance(rule, Mapping) else None
    shown_rule = "" if number is None else name if isinstance(name, str) else f"number {int(number) + 1}"
    return InvalidRules(shown_rule, field, text[:1].lower() + text[1:])


def _checked(rules: Rules) -> Rules:
    for field, text in (("model", rules.model), ("group", rules.group)):
        if not text:
            raise InvalidRules("", field, "expected a name, got an empty one")
    if not 0 < rules.idle <= 3600:
        raise InvalidRules("", "idle", f"expected seconds, more than 0 and at most 3600, got {shown(rules.idle)}")
    if not rules.rules:
        raise InvalidRules("", "rules", "expected at least one rule, as [[rules]]")
    for field in ("actions_per_minute", "actions_per_trace"):
        if getattr(rules.budget, field) < 0:
            raise InvalidRules("", f"budget.{field}", "expected 0 (no limit) or more")
    names: set[str] = set()
    for number, rule in enumerate(rules.rules):
        if not rule.name or "/" in rule.name:
            raise InvalidRules(f"number {number + 1}", "name", f"expected a name without '/', got {shown(rule.name)}")
        if rule.name in names:
            raise InvalidRules(rule.name, "name", "expected a name of its own, and an earlier rule has it")
        names.add(rule.name)
        _check(rule)
    return rules


def _check(rule: Rule) -> None:
    def refuse(field: str, message: str) -> InvalidRules:
        return InvalidRules(rule.name, field, message)

    if not rule.save:
        raise refuse("save", "expected the name of a save, got an empty one")
    if (rule.above is None) == (rule.below is None):
        raise refuse("above", "expected one of above and below")
    for field in ("above", "below", "release"):
        value = getattr(rule, field)
        if value is not None and not math.isfinite(value):
            raise refuse(field, f"expected a finite number, got {value}")
    if rule.release is not None:
        if rule.above is not None and rule.release > rule.above:
            raise refuse("release", f"expected at most above ({rule.above:g}), got {rule.release:g}")
        if rule.below is not None and rule.release < rule.below:
            raise refuse("release", f"expected at least below ({rule.below:g}), got {rule.release:g}")
    if rule.tokens < 1:
        raise refuse("tokens", f"expected a positive number, got {rule.tokens}")
    if rule.output is not None and rule.output < 0:
        raise refuse("output", f"expected an index from 0 on, got {rule.output}")
    if not 0 < rule.timeout <= 7 * 24 * 3600:
        raise refuse("timeout", f"expected seconds, more than 0 and at most 7 days, got {rule.timeout:g}")
    if rule.ask is None and rule.do is None:
        raise refuse("do", "expected 'steer', 'resume' or 'cancel', since the rule asks nobody")
    if rule.ask is not None and rule.do is not None:
        raise refuse("do", "expected none, since the answer to ask decides")
    if rule.do == "steer" and not rule.live:
        raise refuse("live", "expected the live parameters that 'steer' sets")
    _check_live(rule)
    if isinstance(rule.ask, Ask):
        _check_ask(rule.name, rule.ask)


def _check_live(rule: Rule) -> None:
    from tracewire_bus.wire.live_values import LiveError, live_values

    try:
        live_values(rule.live)
    except LiveError as error:
        raise InvalidRules(rule.name, f"live.{error.name}" if error.name else "live", error.message) from None


def _check_ask(name: str, ask: Ask) -> None:
    if sum(map(bool, (ask.http, ask.function, ask.model))) != 1:
        raise InvalidRules(name, "ask", "expected 'terminal', or one of http, function and model")
    if ask.http and not ask.http.startswith(("http://", "https://")):
        raise InvalidRules(name, "ask.http", f"expected a URL that begins with http:// or https://, got {ask.http!r}")
    if ask.function and not _FUNCTION.fullmatch(ask.function):
        raise InvalidRules(name, "ask.function", f"expected 'module:function', got {ask.function!r}")
    if not ask.model:
        if ask.prompt or ask.answers:
            raise InvalidRules(name, "ask.model", "expected the model to which prompt and answers belong")
        return
    if ask.max_tokens < 1:
        raise InvalidRules(name, "ask.max_tokens", f"expected a positive number, got {ask.max_tokens}")
    if not ask.answers:
        raise InvalidRules(name, "ask.answers", "expected what to do for each answer, as in { yes = 'cancel' }")
    try:
        filled = ask.prompt.format(**_FIELDS)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{field}}}" for field in _FIELDS)
        raise InvalidRules(name, "ask.prompt", f"expected fields from {known}: {error!r}") from None
    if filled == ask.prompt:
        raise InvalidRules(name, "ask.prompt", "expected a prompt with {text}, so that the model sees what it judges")


_FIELDS: dict[str, Any] = {"text": "", "value": 0.0, "rule": "", "save": "", "token": 0, "trace_id": "", "model": ""}
