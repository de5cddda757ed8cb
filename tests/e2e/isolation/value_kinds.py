"""Kinds of blocks that write wrong values: replacements, samples, values that are not finite, memory of others."""

from __future__ import annotations

from .kinds import Kind, by_step, once

__all__ = ["VALUE_KINDS"]

_SAMPLES = "for step in tracer.iter[:]:\n    s = model.samples\n    if step == 3:\n        "
_LOGITS = "for step in tracer.iter[:]:\n    l = model.logits\n    if step == 3:\n        "

VALUE_KINDS = [
    Kind("samples-too-large", _SAMPLES + "model.samples = s * 0 + 10 ** 6\n", error="NotInVocabulary|ValueError"),
    Kind("samples-too-large-in-place", "for step in tracer.iter[:]:\n    model.samples[:] = 10 ** 6 #!\n"),
    Kind("samples-negative", _SAMPLES + "model.samples = s * 0 - 5\n", error="NotInVocabulary|ValueError"),
    Kind("samples-negative-in-place", "for step in tracer.iter[:]:\n    model.samples[:] = -1 #!\n"),
    Kind("samples-float-nan", _SAMPLES + "model.samples = s.float() * float('nan')\n"),
    Kind("samples-other-shape", _SAMPLES + "model.samples = s.repeat(2, 2) #!\n"),
    Kind(
        "samples-kept-and-written-later",
        "kept = []\nfor step in tracer.iter[:]:\n    h = model.model.layers[2].output[0]\n"
        "    for old in kept: old.fill_(10 ** 6)\n    kept.append(model.samples)\n",
        meets="finishes",
    ),
    Kind("wrong-shape", once("model.model.layers[2].output = (h[:, :7], o[1]) #!")),
    Kind("rows-too-many", once("import torch\nmodel.model.layers[2].output = (torch.cat([h, h]), o[1]) #!")),
    Kind("rows-too-few", once("model.model.layers[2].output = (h[:0], o[1]) #!")),
    Kind("no-tensor", once("model.model.layers[2].output = 'nothing' #!")),
    Kind("tuple-too-short", once("model.model.layers[2].output = (h,) #!")),
    Kind("logits-other-width", _LOGITS + "model.logits = l[:, :100] #!\n"),
    Kind("logits-nan", _LOGITS + "model.logits = l * float('nan')\n", meets="ends"),
    Kind("logits-resized", _LOGITS + "l.resize_(1, 7)\n", meets="ends"),
    Kind("int64-replacement", once("model.model.layers[2].output = (h.long(), o[1])"), meets="ends"),
    Kind("complex-replacement", once("import torch\nmodel.model.layers[2].output = (h.cfloat(), o[1])"), meets="ends"),
    Kind("sparse-replacement", once("model.model.layers[2].output = (h.to_sparse(), o[1])"), meets="ends"),
    Kind("meta-replacement", once("model.model.layers[2].output = (h.to('meta'), o[1])"), meets="ends"),
    Kind("expanded-replacement", once("model.model.layers[2].output = (h[:1].expand_as(h), o[1])"), meets="finishes"),
    Kind("skip", once("model.model.layers[3].skip(o)"), meets="ends"),
    Kind("storage-resized", once("h.untyped_storage().resize_(0)"), meets="ends", inline=False),
    Kind("storage-filled", once("h.untyped_storage().fill_(0)"), meets="ends", inline=False),
    Kind(
        "strided-write",
        once("import torch\ntorch.as_strided(h, (8, h.shape[-1]), (h.shape[-1], 1), 0).fill_(1.0)"),
        meets="ends",
        inline=False,
    ),
    Kind(
        "strided-read",
        once("import torch\nothers = torch.as_strided(h, (8, h.shape[-1]), (h.shape[-1], 1), 0).clone().save()"),
        meets="ends",
    ),
    Kind(
        "set-data",
        once("import torch\nh.set_(torch.zeros(1))"),
        meets="ends",
    ),
    Kind("in-place-transpose", once("h.t_()"), meets="ends"),
    Kind("nan-rows", by_step("h[:] /= 0.0"), meets="ends"),
    Kind(
        "infinite-rows",
        by_step("model.model.layers[2].output = (h * 1e38 * 1e38, o[1])"),
        meets="ends",
    ),
    Kind(
        "nan-once",
        once("model.model.layers[2].output = (h * float('nan'), o[1])"),
        meets="ends",
    ),
    Kind(
        "old-view-written", by_step("for old in kept: old.fill_(9.0)\nkept.append(h)", before="kept = []"), "finishes"
    ),
    Kind("backward", once("h.float().requires_grad_().sum().backward() #!")),
    Kind(
        "kv-cache-zeroed",
        once(
            """
            import gc, torch
            for one in gc.get_objects():
                if type(one).__name__ == "_Runner":
                    for cache in one.kv_caches: cache.zero_()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "weights-zeroed",
        once(
            """
            inner = model.model.layers[1].mlp._module
            for weight in inner.parameters(): weight.data.zero_()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "others-lists-cleared",
        once(
            """
            found = getattr(model, "inter" + "leaver").mediators
            for one in found:
                for value in list(one.lcls.values()):
                    if type(value) is list: value.clear()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "kv-cache-read",
        once(
            """
            caches = model.model.layers[1].self_attn.attn.kv_cache
            caches = caches if isinstance(caches, (list, tuple)) else [caches]
            others = [float(one.float().abs().sum()) for one in caches].save()
            """
        ),
        meets="ends",
    ),
    Kind(
        "weights-converted",
        once(
            """
            inside = getattr(model, "inter" + "leaver")
            if hasattr(inside, "call"): inside.call("model.model.layers.1.double", ((), {}))
            else: model.model.layers[1]._module.double()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "others-saves-read",
        once(
            """
            found = getattr(model, "inter" + "leaver").mediators
            stolen = [repr(dict(one.lcls))[:200] for one in found if "innocent" in one.lcls].save()
            """
        ),
        meets="ends",
    ),
    Kind(
        "runner-tokens-changed",
        once(
            """
            import gc
            for one in gc.get_objects():
                if type(one).__name__ == "InputBatch": one.token_ids_cpu.fill(5)
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "forward-hook",
        once("model.model.layers[4]._module.register_forward_hook(lambda m, a, out: (out[0] * 0, out[1]))"),
        meets="ends",
        inline=False,
    ),
    Kind(
        "layer-removed",
        once("model.model.layers[4]._module.mlp = None"),
        meets="ends",
        inline=False,
    ),
    Kind(
        "forward-patched",
        once(
            """
            cls = type(model.model.layers[2].mlp._module)
            cls.forward = lambda self, x: x * 0
            """
        ),
        meets="ends",
        inline=False,
    ),
]
