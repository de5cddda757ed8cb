"""Whose blocks an engine runs, by its options and by its Redis."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.identities import Identities
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.domain.code_identity import DEFAULT_IMPORTS
from tracewire_bus.wire.messages import Block
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.launch.code_options import (
    check_code,
    code_policy,
    default_blocks,
    identity_of,
    limited_imports,
)
from tracewire_engine.launch.options import add_options


def parsed(*arguments: str, url: str = "redis://elsewhere") -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser.add_argument_group("engine"), {})
    options = parser.parse_args(["MODEL", *arguments])
    options.url = url
    return options


def test_the_default_is_none_on_a_bus_that_may_be_shared() -> None:
    policy = code_policy(parsed())
    assert (policy.code, policy.reason) == ("none", "the default, since the Redis at redis://elsewhere may be shared")
    with pytest.raises(Rejection, match="default, since the Redis at redis://elsewhere may be shared"):
        policy.check(Block(name="b", source=""))


async def test_and_any_on_one_that_is_private(embedded: str) -> None:
    policy = code_policy(parsed(url=embedded))
    assert policy.code == "any"
    assert "private to this user" in policy.reason
    policy.check_imports("b", ["os"])


@pytest.mark.parametrize("code", ["none", "signed", "any"])
def test_the_operator_may_say_otherwise(code: str, embedded: str) -> None:
    policy = code_policy(parsed("--code", code, url=embedded))
    assert (policy.code, policy.reason) == (code, "as the operator has set it")


@pytest.mark.parametrize("code", ["listed", "signed", "any"])
def test_blocks_of_others_run_in_hosts(code: str, embedded: str) -> None:
    file = ("--approved", "approved.json") if code == "listed" else ()
    options = parsed("--code", code, *file)
    assert default_blocks(options) == (
        "host",
        "the default, since the Redis at redis://elsewhere may be shared",
    )
    options = parsed("--code", code, *file, "--check-collect")
    assert default_blocks(options)[1].startswith("since --check-collect allows no other")
    # On a private bus nobody else can submit a block.
    assert default_blocks(parsed("--code", code, *file, url=embedded))[0] == "inline"


def test_without_blocks_there_are_no_hosts() -> None:
    assert default_blocks(parsed()) == ("inline", "the default, since no block runs")


def test_imports_are_limited_unless_any_block_runs() -> None:
    with pytest.raises(Rejection, match="imports 'os'"):
        code_policy(parsed("--code", "signed")).check_imports("b", ["os"])
    code_policy(parsed("--code", "any")).check_imports("b", ["os"])
    code_policy(parsed("--code", "signed", "--code-imports", "any")).check_imports("b", ["os"])
    given = parsed("--code", "any", "--code-imports", "os, a.b")
    assert limited_imports(given) == {"os", "a.b"}
    with pytest.raises(Rejection, match=r"imports 'a', and a block may import here only a\.b, os"):
        code_policy(given).check_imports("b", ["os", "a.b.c", "a"])
    assert limited_imports(parsed()) == DEFAULT_IMPORTS


def test_what_is_no_package_is_refused() -> None:
    with pytest.raises(
        argparse.ArgumentError, match="expected names of packages such as torch,numpy, or any; got 'a b'"
    ):
        parsed("--code-imports", "a b")


def test_listed_needs_the_file_and_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "approved.json"
    with pytest.raises(ValueError, match="--code listed needs --approved FILE"):
        check_code(parsed("--code", "listed"))
    with pytest.raises(ValueError, match="--approved needs --code listed"):
        check_code(parsed("--approved", str(file)))
    options = parsed("--code", "listed", "--approved", str(file))
    check_code(options)
    policy = code_policy(options)
    with pytest.raises(Rejection, match=r"not approved: its hash is (\w+);") as refused:
        policy.check(Block(name="b", source=""))
    Approvals(file).add("b", refused.value.failure.message.split("hash is ")[1][:64], "")
    policy.check(Block(name="b", source=""))
    file.write_text("{")
    with pytest.raises(ValueError, match=r"--approved: .*approved\.json"):
        check_code(options)


def test_unsigned_is_refused_where_a_keyring_is_and_the_bus_may_be_shared(tmp_path: Path, embedded: str) -> None:
    keys = Identities(tmp_path)
    ring = ("--keyring", str(keys.ring.path))
    for url, arguments, unsigned in (
        ("redis://elsewhere", (), True),
        ("redis://elsewhere", ring, False),
        ("redis://elsewhere", (*ring, "--unsigned", "accept"), True),
        (embedded, ring, True),
        (embedded, (*ring, "--unsigned", "refuse"), False),
    ):
        options = parsed(*arguments, url=url)
        check_code(options)
        found = identity_of(options)
        assert found.unsigned == unsigned, arguments
        assert (found.keyring is None) == (not arguments)
    assert "elsewhere may be shared" in identity_of(parsed(*ring)).reason
    signing = identity_of(parsed("--engine-key", str(keys.path("engine")))).signer
    assert signing is not None
    assert signing.public == keys.signer("engine").public


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--code", "signed"], "--code signed needs --keyring FILE"),
        (["--unsigned", "refuse"], "--unsigned refuse needs --keyring FILE"),
        (["--keyring", "NONE"], r"--keyring: .*none has no key"),
        (["--keyring", "BAD"], r"--keyring: .*bad: "),
        (["--engine-key", "NONE"], r"--engine-key: .*none: No such file"),
        (["--engine-key", "BAD"], r"--engine-key: .*bad is no key file"),
    ],
)
def test_options_that_lack_a_file_are_refused(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("{")
    named = {"NONE": str(tmp_path / "none"), "BAD": str(tmp_path / "bad")}
    with pytest.raises(ValueError, match=says):
        check_code(parsed(*(named.get(one, one) for one in arguments)))
