"""Scripts run wherever commands do, and are loaded when Redis does not know them."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from tests.support.redis.proxy import proxy
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.store import submission_queue as queue
from tracewire_bus.store import trace_records as records
from tracewire_bus.store.lifecycle import KEEP_S
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.link import AfterOthers
from tracewire_bus.transport.scripts import FOLDER, Script, assemble, with_text
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Invoke, Submission


def unknown(text: str) -> Script:
    """A script that no Redis knows."""
    return Script(text=f"{text} -- {uuid.uuid4()}")


async def known(bus: Bus, script: Script) -> bool:
    return bool((await bus.command("SCRIPT", "EXISTS", script.digest))[0])


async def test_a_script_is_loaded_when_it_is_not_known(bus: Bus) -> None:
    script = unknown("return {KEYS[1], ARGV[1], ARGV[2]}")
    assert not await known(bus, script)
    for _ in range(2):
        assert await bus.command(*script(["{k}"], b"\xff", 3)) == [b"{k}", b"\xff", b"3"]
        assert await known(bus, script)


async def test_scripts_stand_between_other_commands(bus: Bus) -> None:
    key = bus.keys.dead()
    first, second = (unknown(f"return redis.call('RPUSH', KEYS[1], {number})") for number in (1, 2))
    replies = await bus._connections.commands(
        ("RPUSH", key, 0), first([key]), ("ECHO", "between"), second([key]), ("ECHO", "last")
    )
    assert replies == [1, 2, b"between", 3, b"last"]
    assert await bus.command("LRANGE", key, 0, -1) == [b"0", b"1", b"2"]


async def test_what_a_script_raises_is_said(bus: Bus) -> None:
    for _ in range(2):
        with pytest.raises(BusError, match="so it is"):
            await bus.command(*unknown("return redis.error_reply('so it is')")([]))


def test_lua_and_python_agree_on_what_both_know() -> None:
    (final,) = re.findall(r"^local FINAL_ID = '(.+)'$", assemble("record_end"), re.MULTILINE)
    assert final == FINAL_ID
    (seconds,) = re.findall(r"^local ENTRIES, SECONDS = \d+, (\d+) \* 3600$", assemble("record_end"), re.MULTILINE)
    assert int(seconds) * 3600 == KEEP_S


def test_every_script_is_used_and_every_module_included() -> None:
    code = "".join(path.read_text() for path in FOLDER.parent.rglob("*.py"))
    for path in FOLDER.glob("*.lua"):
        assert f'Script("{path.stem}")' in code, path
    text = "".join(path.read_text() for path in FOLDER.rglob("*.lua"))
    for path in (FOLDER / "shared").glob("*.lua"):
        assert f"-- #include {path.stem}\n" in text, path


def test_a_module_is_included_once_and_behind_its_own() -> None:
    text = assemble("record_cancel")
    modules = re.findall(r"^local (\w+) = \(function\(\)$", text, re.MULTILINE)
    assert len(set(modules)) == len(modules)
    assert modules.index("clock") < modules.index("finished") < modules.index("finish")


async def test_a_digest_that_is_nobodys_is_an_error(bus: Bus) -> None:
    with pytest.raises(BusError, match="No matching script"):
        await bus.command("EVALSHA", "0" * 40, 0)


async def test_what_is_to_come_after_a_script_never_comes_before_one_that_redis_does_not_know(bus: Bus) -> None:
    key = bus.keys.dead()
    known_one = unknown("return redis.call('RPUSH', KEYS[1], 'after')")
    await bus.command(*known_one([key]))
    await bus.command("DEL", key)
    first, second = (unknown(f"return redis.call('RPUSH', KEYS[1], {number})") for number in (1, 2))
    replies = await bus._connections.commands(first([key]), second([key]), AfterOthers(known_one([key])))
    assert replies == [1, 2, 3]
    assert await bus.command("LRANGE", key, 0, -1) == [b"1", b"2", b"after"]


async def test_a_trace_is_never_queued_before_its_record_exists(prefix: str, tmp_path: Path) -> None:
    submission = Submission(trace="t", model="m", invokes=[Invoke(prompt="x")])
    async with (
        EmbeddedServer.start() as server,
        proxy(server.url, tmp_path) as way,
        Bus.open(server.url, prefix=prefix) as bus,
    ):
        # This Redis knows the script that queues, but not (any more) the one that makes the record.
        text = with_text(("EVALSHA", queue._PUT.digest))
        assert text is not None
        await bus.command("SCRIPT", "LOAD", text[1])
        assert await bus.command("SCRIPT", "EXISTS", queue._PUT.digest, records._CREATE.digest) == [1, 0]
        async with Bus.open(way.url, prefix=prefix, patience_s=0) as client:
            # And the client is cut off before it reads the reply.
            way.swallow = queue._PUT.digest.encode()
            with pytest.raises(BusUnavailable):
                await client.submit(submission)
        assert way.swallowed.is_set()
        assert await bus.queue.waiting("m") == 1
        assert await bus.exists("t")
