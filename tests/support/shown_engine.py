"""A scripted engine whose traces have something to show: text that a live parameter changes, scalars, lenses, norms.

Everything follows from a token's index and the live parameter `alpha`: `projection` is a wave about `alpha`, `lens`
what each layer would say next, `norm` a number for each layer. Words are of prose below an `alpha` of 4, and of code
from 4 on. A trace whose prompt begins with `<` says markup. One whose prompt begins with `@` has the prompt's words as
its tokens, and a pattern of two heads, `attends`: one looks at the prompt's first token, and one at the last token.

`python -m tests.support.shown_engine --url URL --rate 20` serves as a process of its own until SIGTERM.
"""

from __future__ import annotations

import argparse
import math
import signal
import struct
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import msgspec

from tests.support.scripted_engine import ScriptedEngine, _Request, info
from tracewire_bus.bus import Bus
from tracewire_bus.wire.arrays import array_payload, encoded_array
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.messages import Append, Set, Submission
from tracewire_bus.wire.packing import unpack
from tracewire_engine.adapter.engine_api import Choice, Prepared
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.messages import Changes, FinishRecord, StepRecord

__all__ = ["HOSTILE", "LAYERS", "ShownEngine", "projection_at", "token_at", "words_of"]

LAYERS = 6
#: What a hostile trace says.
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>document.title='owned'</script>",
    "</span><b>bold</b>",
    "javascript:alert(1)",
    "&lt;i&gt;",
    "\u202eevil\u202c",
]
_PROSE = [*"the model reads a line of text and then returns what it has found in it".split(), ".\n"]  # noqa: SIM905
_CODE = [*"def read ( line ) : return [ word for word in line . split ( )".split(), "]\n"]  # noqa: SIM905


#: What the ids of tokens stand for.
_VOCABULARY = [*(f" {word}" for word in dict.fromkeys([*_PROSE, *_CODE])), *HOSTILE]


def token_at(prompt: str, index: int, alpha: float) -> str:
    """The text of a token."""
    if prompt.startswith("<"):
        return HOSTILE[index % len(HOSTILE)]
    words = _CODE if alpha >= 4 else _PROSE
    return f" {words[index % len(words)]}"


def projection_at(index: int, alpha: float) -> float:
    """The projection at a token."""
    return round(6 * math.sin(index / 6) + alpha, 4)


class _Shown(_Request):
    """A request with saves to look at."""

    alpha = 0.0

    def step(self) -> StepRecord:
        """Its next token."""
        index, self.index = self.index, self.index + 1
        text = token_at(self.prompt, index, self.alpha)
        norms = [10 * (layer + 1) + 3 * math.cos(index / 4 + layer) for layer in range(LAYERS)]
        saves: dict[str, Any] = {
            "projection": projection_at(index, self.alpha),
            "norm": _array("float32", norms),
            "lens": self._lens(index, text),
        }
        if self.prompt.startswith("@"):
            saves["attends"] = _attends(len(words_of(self.prompt)) + index - 1)
        deltas = [
            Append(path=(name,), items=[value]) if index else Set(path=(name,), value=[value])
            for name, value in saves.items()
        ]
        finish = "length" if self.index == self.tokens else None
        self.put(Choice(0, [_VOCABULARY.index(text)], text, finish_reason=finish))
        return StepRecord(self.name, 0, index, msgspec.Raw(msgspec.msgpack.encode(deltas)))

    def _lens(self, index: int, text: str) -> dict[str, Any]:
        """What each layer would say: later layers say what is sampled."""
        strings, logits = [], []
        for layer in range(LAYERS):
            says = [text, *(f" {_PROSE[(index + layer + one) % (len(_PROSE) - 1)]}" for one in (3, 5))]
            strings.append(says[1:] + says[:1] if layer + index % 3 < LAYERS / 2 else says)
            logits += [4 + 2 * layer + math.sin(index + layer) - rank for rank in range(3)]
        ids = [_VOCABULARY.index(one) for says in strings for one in says]
        shape = (LAYERS, 3)
        found = {"token_ids": _array("int32", ids, shape), "logits": _array("float32", logits, shape)}
        return {**found, "token_strings": strings}

    def finish(self) -> FinishRecord:
        """Its end: no digest is sent, and none compared."""
        return FinishRecord(self.name, 0, msgspec.Raw(msgspec.msgpack.encode([])), [], steps=self.index)


def words_of(prompt: str) -> list[str]:
    """The tokens of a prompt that begins with `@`."""
    return [f" {word}" for word in prompt.split()]


def _attends(query: int) -> dict[str, Any]:
    """How two heads spread over the positions up to that of the query."""
    weights = [0.9, 0.1, 0.75, 0.0] if query else [1.0, 0.0, 1.0, 0.0]
    positions = [0, query or -1, query, -1]
    return {"positions": _array("int32", positions, (2, 2)), "weights": _array("float32", weights, (2, 2))}


def _array(dtype: str, values: list[Any], shape: tuple[int, ...] = ()) -> Any:
    """An array as it travels."""
    data = struct.pack(f"<{len(values)}{'i' if dtype == 'int32' else 'f'}", *values)
    return encoded_array(array_payload(dtype, shape or (len(values),), data))


class ShownEngine(ScriptedEngine):
    """A `ScriptedEngine` of such requests. `alpha` counts, as what a trace begins with and as what it is steered to."""

    request_type = _Shown

    def __init__(self, pace: Any) -> None:
        super().__init__(pace)
        self._alpha: dict[str, float] = {}

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """The words."""
        return [_VOCABULARY[token_id] for token_id in token_ids]

    @property
    def alphas(self) -> set[float]:
        """The values of `alpha` that the next step has."""
        return set(self._alpha.values())

    async def prepare(self, submission: Submission, index: int, *rest: Any, **more: Any) -> Prepared:
        """As the base does."""
        prepared = await super().prepare(submission, index, *rest, **more)
        if (prompt := submission.invokes[index].prompt or "").startswith("@"):
            prepared.token_strings = words_of(prompt)
            prepared.token_ids = [*range(len(prepared.token_strings))]
            prepared.prompt_tokens = len(prepared.token_ids)
        _, _, _, run, *_ = prepared.params
        value = unpack_live(submission.live).get("alpha")
        self._alpha.setdefault(run, 0.0 if value is None else float(value.value))
        return prepared

    async def start(self, request: str, prepared: Prepared, priority: int) -> Any:
        """Run it from the next step on."""
        begun = await super().start(request, prepared, priority)
        begun.alpha = self._alpha[begun.run]
        return begun

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        """Hold from the next step on."""
        await super().steer(changes, over, since)
        for run, (_, values) in changes.items():
            if "alpha" in values:
                self._alpha[run] = float(unpack(bytes(values["alpha"])))
                for request in self._requests.values():
                    if request.run == run:
                        request.alpha = self._alpha[run]
        for run in over:
            self._alpha.pop(run, None)


async def _main(options: argparse.Namespace) -> None:
    engine = ShownEngine(partial(anyio.sleep, 1 / options.rate))
    async with Bus.open(options.url, prefix=options.prefix) as bus, anyio.create_task_group() as group:
        adapter = Adapter(engine, info(options.model, engine=options.engine), bus, Settings(drain_s=0.1))

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    adapter.stop()

        group.start_soon(watch_signals)
        group.start_soon(engine.run)
        print(f"ready {options.engine}", flush=True)
        await adapter.run()
        group.cancel_scope.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """As a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prefix", default="tw")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine", default="shown")
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
