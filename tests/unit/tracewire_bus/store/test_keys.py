"""Names of keys."""

from __future__ import annotations

from tracewire_bus.bus import Keys


def test_keys_of_a_trace_share_a_tag_and_so_do_those_of_a_queue() -> None:
    keys = Keys("p")

    def tag(key: str) -> str:
        return key[key.index("{") : key.index("}")]

    for trace in ("a", "b", "täxt", "{x}"):
        assert tag(keys.events(trace)) == tag(keys.record(trace))
    assert len({tag(keys.events(str(number))) for number in range(2000)}) == 64
    parts = ("entries", "data", "taken", "state", "turns", "bell", "leases", "client:c", "lease:l", "engine:e")
    queue = [*(keys.queue("m", part) for part in parts), keys.submitted("m", "t")]
    assert {tag(key) for key in queue} == {"{m"}
    assert all(key.startswith("p:") for key in (*queue, keys.events("t"), keys.engines(), keys.dead()))
