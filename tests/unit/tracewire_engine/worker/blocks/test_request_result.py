"""Results wait for requests, and requests for results."""

from __future__ import annotations

import msgspec

from tracewire_engine.protocol.messages import (
    Generated,
    GeneratedChoice,
)
from tracewire_engine.worker.blocks.request_result import RequestResults, output_of


def test_results_wait_for_requests_and_requests_for_results() -> None:
    results = RequestResults()
    generated = Generated(
        "t1", "a prompt", [1, 2], [GeneratedChoice(0, " b", [3], "stop", None, [{3: (-0.5, 1, " b")}])]
    )
    waiting = object()
    results.waiting["t1"] = [waiting]
    assert results.take(msgspec.msgpack.encode(generated)) == ("t1", [waiting])
    assert results.waiting == {}
    output = results.output("t1")
    assert (output.prompt, output.outputs[0].text, output.outputs[0].cumulative_logprob) == ("a prompt", " b", -0.5)
    assert results.has("t1")
    results.forget("t1")
    assert not results.has("t1")
    assert output_of(Generated("t2", None, [])) is None
    for number in range(2000):
        results.take(msgspec.msgpack.encode(Generated(f"early {number}", None, [])))
    assert not results.has("early 0")
