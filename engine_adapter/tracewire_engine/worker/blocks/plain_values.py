"""Turns objects that nnsight and vLLM hand to a block into plain values that can travel.

A `tracer.cache()` becomes a dict by module path. Each path has a list of its visits, and each visit is a dict with the
recorded `output` and `inputs` (positional ones, then those by name). A `tracer.result` becomes a dict of fields of
vLLM's `RequestOutput`. The plain value is made once for an object and grows with it, so that each step sends only what
is new.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.intervention.cache import Cache, CacheView
from nnsight.util import apply
from vllm.outputs import RequestOutput

__all__ = ["CopyingCache", "plain", "trim"]


class CopyingCache(Cache):
    """nnsight's cache, but it keeps copies.

    Without a copy, a tensor that is already on the wanted device is the model's own buffer, which the model overwrites.
    """

    def subscriptions(self) -> dict[str, tuple[str, str]]:
        """nnsight's subscriptions, without the locations in encoders, whose values belong to no single request."""
        found: dict[str, tuple[str, str]] = super().subscriptions()
        encoders: tuple[str, ...] = getattr(self.model.interleaver, "encoders", ())
        return {at: kept for at, kept in found.items() if not at.startswith(encoders)} if encoders else found

    def _transform(self, value: Any) -> Any:
        return apply(value, self._kept, torch.Tensor)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach() if self.detach else tensor
        if self.device is not None or self.dtype is not None:
            kept = kept.to(device=self.device, dtype=self.dtype, non_blocking=self.non_blocking)
        return kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept


def plain(value: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    """The plain value of `value`, or `value` itself if it needs none.

    Args:
        value: an object that a block has saved.
        made: by `id` of an object, the object and the plain value made of it earlier. It is extended.
    """
    if type(value) is CacheView:
        _, known = made.setdefault(id(value), (value, {}))
        _extend(known, value._cache)
        return known
    # Not `isinstance`: a block can define a class whose `__class__` lies.
    if issubclass(type(value), RequestOutput):
        if id(value) not in made:
            made[id(value)] = value, _output(value)
        return made[id(value)][1]
    return value


def _extend(known: dict[str, list[Any]], cache: Cache) -> None:
    for path, entries in cache.entries.items():
        visits = known.setdefault(path, [])
        for entry in entries[len(visits) :]:
            visit: dict[str, Any] = {}
            if cache.include_output:
                visit["output"] = entry.output
            if cache.include_inputs:
                visit["inputs"] = entry.inputs
            visits.append(visit)


def trim(made: dict[int, tuple[Any, Any]]) -> None:
    """Drop the entries of caches that were taken out of the plain values made of them."""
    for value, known in made.values():
        if type(value) is CacheView:
            entries = value._cache.entries
            for path in list(entries):
                del entries[path][len(known.get(path, ())) :]
                if not entries[path]:
                    del entries[path]


def _output(output: RequestOutput) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids or ()),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "cumulative_logprob": one.cumulative_logprob,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
        "finished": output.finished,
    }
