"""Lines have the fields of the task that logs them."""

from __future__ import annotations

import anyio

from tracewire_bus.log_fields import add_log_fields, current_log_fields, log_fields


def test_fields_hold_within_their_block() -> None:
    assert current_log_fields() == {}
    with log_fields(a="1"):
        with log_fields(b="2", a="3"):
            assert current_log_fields() == {"a": "3", "b": "2"}
        assert current_log_fields() == {"a": "1"}
    assert current_log_fields() == {}


async def test_each_task_has_its_own() -> None:
    found = {}

    async def inner(name: str) -> None:
        await anyio.lowlevel.checkpoint()
        found[name] = dict(current_log_fields())

    async def task(name: str) -> None:
        add_log_fields(trace_id=name)
        await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as group:
            group.start_soon(inner, name)

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(task, name)
    assert found == {name: {"trace_id": name} for name in "abc"}
    assert current_log_fields() == {}
