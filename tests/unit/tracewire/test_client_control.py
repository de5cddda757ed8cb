"""The client controls any trace by its id: pauses with an end of their own."""

from __future__ import annotations

import pytest

from tracewire import Client

pytestmark = pytest.mark.usefixtures("registered")


async def test_the_end_of_a_pause_is_checked(client: Client) -> None:
    async with client.trace("tiny", "hello", detach=True) as trace:
        with pytest.raises(ValueError, match=r"^timeout: expected more than 0"):
            await client.pause(trace.id, timeout=0)
        with pytest.raises(TypeError, match=r"^timeout: expected a number of seconds"):
            await client.pause(trace.id, timeout="soon")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^on_timeout: expected 'resume' or 'cancel'"):
            await client.pause(trace.id, timeout=1, on_timeout="stop")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^paused_by: expected text"):
            await client.resume(trace.id, paused_by=5)  # type: ignore[arg-type]
        assert await trace.cancel()
