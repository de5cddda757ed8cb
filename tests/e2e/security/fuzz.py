"""Mutated messages for every decoder and a live intake: `python -m tests.e2e.security.fuzz --messages 200000 --json`.

The messages are mutated from a kept corpus: the recordings of every schema in tests/golden/, and corpus.json beside
this file, which has messages that expand, nest or collide. Nine of ten messages go to the decoders of this process, and
one of ten to the queue, control streams, records, edits and registry of a live adapter (`tests/fuzz.py`).

A *crash* is an exception that a decoder does not declare, or anything wrong with the adapter, its valid traces or
its consumers. A *stall* is a message, or a callback of the adapter's event loop, that takes more than 100 ms of
processor time. The adapter counts and decodes large submissions on a thread beside its loop: these may take a second.
What clients write is counted before it is decoded, as the adapter does. What only engines write is not, so the
decoders of events and states get messages of up to 64 KiB. *Growth* is what a process has in use at the end beyond what
it had after a fifth of the messages, the greater of both processes. Memory in use is what its code keeps. Resident
memory grows beside it, by up to the size of the largest message. A run fails if it finds a crash, a stall, or growth
of `GROWTH_MIB` or more. The last line of output is the result. `--json` leaves out the others. The seed of a run is
printed first.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from tests import fuzz
from tests.golden import record
from tests.support.memory_in_use import in_use_mib
from tracewire_bus.domain.limits import MAX_LIVE_VALUES, MAX_VALUES, LimitExceeded, check_submission, measure
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.urls import parse_url, redacted
from tracewire_bus.wire import codec
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol import messages as protocol

__all__ = ["CORPUS", "DECODERS", "GROWTH_MIB", "STALL_S", "Found", "fuzz_decoders", "main"]

CORPUS = Path(__file__).with_name("corpus.json")
#: How much processor time makes a stall, in seconds: of a message on the loop, and of one on a thread beside it.
STALL_S, BESIDE_S = 0.1, 1.0
#: From how much growth on a run fails, in MiB. 160,000 messages that leave 30 bytes each make 5.
GROWTH_MIB = 4.0
#: The decoders that run beside the adapter's loop, and those of what only engines and operators write.
_BESIDE = frozenset(("submission", "measured", "value"))
_OF_CLIENTS = frozenset((*_BESIDE, "live values", "value", "change"))
_MOST_BYTES = 64 * 1024
#: What a decoder may raise.
_DECLARED = (ValueError, msgspec.MsgspecError)


def _submission(data: bytes) -> None:
    """As an adapter reads one: by its size, then by its values, then as a whole."""
    measure(data, "submission")
    submission = codec.decode_submission(data)
    check_submission(submission)
    for part in (submission.live, submission.shared, *(one.media for one in submission.invokes)):
        measure(part, "part")
        unpack(part)


def _event(data: bytes) -> None:
    event: Any = codec.decode_event(data)
    # An output's deltas are decoded when they are read.
    getattr(event, "deltas", None)
    codec.find_bulk(data)


def _measured(decode: Callable[[bytes], Any], most: int = MAX_VALUES) -> Callable[[bytes], None]:
    """As an adapter reads a part of what a client has sent."""

    def read(data: bytes) -> None:
        measure(data, "part", most)
        decode(data)

    return read


def _text(use: Callable[[str], Any]) -> Callable[[bytes], None]:
    return lambda data: use(data.decode("utf-8", "surrogateescape"))


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "submission": _submission,
    "event": _event,
    "plain event": codec.decode_plain,
    "deltas": codec.decode_deltas,
    "change": _measured(codec.decode_change, MAX_LIVE_VALUES),
    "snapshot": codec.decode_snapshot,
    "edit": codec.decode_edit,
    "edit record": codec.decode_edit_record,
    "engine": codec.decode_engine,
    "live values": _measured(unpack_live, MAX_LIVE_VALUES),
    "value": _measured(unpack),
    "schema": _text(codec.check_schema),
    "number": integer,
    "url": _text(parse_url),
    "shown url": _text(redacted),
    "measured": lambda data: measure(data, "field"),
    "reports": msgspec.msgpack.Decoder(list[protocol.Report]).decode,
}


class Found(NamedTuple):
    """What a run has found: messages, crashes and stalls by decoder, and growth in MiB."""

    messages: int
    crashes: Counter[str]
    stalls: Counter[str]
    growth_mib: float


def corpus() -> list[bytes]:
    """The messages that are mutated."""
    found = [base64.b64decode(one) for one in json.loads(CORPUS.read_text()).values()]
    for folder in sorted(record.HERE.iterdir()):
        path = folder / "messages.json"
        if path.is_file():
            found += [bytes.fromhex(one["data"]) for one in json.loads(path.read_text()).values()]
    return found


def _mutated(seeds: Sequence[bytes], chosen: random.Random) -> Iterator[bytes]:
    mutator = fuzz.Mutator(chosen)
    while True:
        if chosen.randrange(2000) == 0:
            yield mutator.huge()
        elif chosen.randrange(20) == 0:
            # A message as it is, for each decoder that is not its own.
            yield chosen.choice(seeds)
        else:
            seed = chosen.choice(seeds)
            try:
                yield mutator.message(seed)
            except (*_DECLARED, RecursionError):
                # The corpus has messages that nobody can decode.
                yield mutator.bytes(seed)


def fuzz_decoders(count: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Found:
    """Give `count` mutated messages to the decoders, each to one of them."""
    chosen, seeds = random.Random(seed), corpus()
    names = list(DECODERS)
    crashes: Counter[str] = Counter()
    stalls: Counter[str] = Counter()
    before = 0.0
    made = _mutated(seeds, chosen)
    gc.collect()
    gc.freeze()
    for number in range(count):
        if number == count // 5:
            before = in_use_mib()
        data, name = next(made), chosen.choice(names)
        if name not in _OF_CLIENTS and len(data) > _MOST_BYTES:
            name = "submission"
        decode = DECODERS.get(name) or DECODERS[names[0]]
        began = time.thread_time()
        try:
            decode(data)
        except (*_DECLARED, LimitExceeded):
            pass
        except Exception as error:  # what this program is for
            crashes[name] += 1
            say(f"{name}: {error!r} for {base64.b64encode(data[:2000]).decode()}")
        took = time.thread_time() - began
        if took > (BESIDE_S if name in _BESIDE else STALL_S):
            stalls[name] += 1
            say(f"{name}: {took * 1000:.0f} ms for {len(data)} bytes: {base64.b64encode(data[:300]).decode()}")
    growth = in_use_mib() - before
    gc.unfreeze()
    return Found(count, crashes, stalls, growth)


async def fuzz_intake(count: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Found:
    """Write `count` malformed entries for a live adapter to read."""
    told = await fuzz.run(count, seed)
    crashes: Counter[str] = Counter()
    wrong = [*told["valid"]["wrong"], *told["consumers_wrong"], *told["loop"].get("tracebacks", ())]
    if told["adapter"] != "served to the end":
        wrong.append(told["adapter"])
    if not told["registered"]:
        wrong.append("the adapter has left the registry")
    for one in wrong:
        crashes["intake"] += 1
        say(f"intake: {one}")
    stalls = Counter({"intake": told["loop"].get("stalls", 0)})
    if stalls["intake"]:
        say(f"intake: a callback of {told['loop']['callback_cpu_ms']} ms at {told['loop']['longest_callback']}")
    return Found(count, crashes, stalls, told["growth_mib"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000, help="how many in all")
    parser.add_argument("--live", type=int, default=None, help="of them for the live intake (default: a tenth)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    live = options.messages // 10 if options.live is None else options.live

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    say(f"seed {seed}")
    found = [fuzz_decoders(options.messages - live, seed, say)] if live < options.messages else []
    if live:
        found.append(anyio.run(partial(fuzz_intake, live, seed, say)))
    if not options.json:
        for one in found:
            print(one)
    result = {
        "messages": sum(one.messages for one in found),
        "crashes": sum(one.crashes.total() for one in found),
        "stalls": sum(one.stalls.total() for one in found),
        "growth_mib": round(max(0.0, *(one.growth_mib for one in found)), 1),
    }
    print(json.dumps(result))
    return 1 if result["crashes"] or result["stalls"] or result["growth_mib"] >= GROWTH_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
