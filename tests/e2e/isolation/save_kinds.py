"""Kinds of blocks whose saves and errors are odd or large."""

from __future__ import annotations

from .kinds import Kind, by_step, once

__all__ = ["SAVE_KINDS"]


def _odd(method: str) -> str:
    return once(
        f"""
        class Odd(list):
            def {method}(self, *args): return 1 / 0
        kept = {{"odd": Odd([1]), "fine": 1}}.save()
        """
    )


SAVE_KINDS = [
    Kind("save-of-2gb-bytes", once("held = bytes(2 << 30).save()"), meets="ends", inline=False),
    Kind("save-of-2gb-tensor", once("import torch\nheld = torch.ones(1 << 29).save()"), meets="ends", inline=False),
    Kind(
        "integers-250000-a-step",
        by_step("held.extend(range(250_000))", before="held = [].save()"),
        meets="ends",
        patience_s=90,
    ),
    Kind("integers-1000000-a-step", by_step("held.extend(range(1_000_000))", before="held = [].save()"), "ends"),
    Kind("save-itself", once("held = []\nheld.append(held)\nheld.save()"), meets="ends"),
    Kind("save-deep", once("held = [1]\nfor _ in range(5000): held = [held]\nheld.save()"), meets="ends"),
    Kind("save-len-raises", _odd("__len__"), meets="ends"),
    Kind("save-eq-raises", _odd("__eq__"), meets="ends"),
    Kind("save-reduce-raises", _odd("__reduce__"), meets="ends"),
    Kind("save-del-raises", _odd("__del__"), meets="ends"),
    Kind("save-hash-raises", once("class Odd:\n    def __hash__(self): return 1 / 0\nkept = [Odd()].save()"), "ends"),
    Kind("saves-10000-names", once("for i in range(10_000): globals()[f'name{i}'] = [i].save()"), meets="ends"),
    Kind(
        "tensor-subclass-raises",
        once(
            """
            import torch
            class Odd(torch.Tensor):
                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None): raise ValueError("odd")
            kept = [h[0].clone().as_subclass(Odd)].save()
            """
        ),
        meets="ends",
    ),
    Kind("message-of-200mb", once("raise ValueError('x' * 200_000_000) #!"), error="ValueError|BlockTimeout"),
    Kind("error-text-raises", once("class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd() #!")),
    Kind("error-lies-about-class", once("class Odd(Exception):\n    __class__ = int\nraise Odd() #!")),
    Kind("recursion", once("def deeper(): return deeper()\ndeeper()"), error="RecursionError"),
    Kind("system-exit", once("raise SystemExit(3) #!")),
    Kind("sys-exit", once("import sys\nsys.exit(3) #!")),
    Kind("keyboard-interrupt", once("raise KeyboardInterrupt #!")),
    Kind("base-exception", once("raise BaseException('base') #!")),
    Kind("generator-exit", once("raise GeneratorExit #!")),
    Kind("stop-iteration", once("raise StopIteration #!")),
    Kind("greenlet-exit", once("import greenlet\nraise greenlet.GreenletExit() #!")),
    Kind(
        "raised-block-timeout",
        once("from tracewire_engine.worker.blocks.time_limit import BlockTimeout\nraise BlockTimeout('mine') #!"),
    ),
    Kind("empty-too-large", once("import torch\ntorch.empty(10 ** 13) #!")),
    Kind("text-too-large", once("x = 'x' * 10 ** 14 #!"), error="MemoryError|OverflowError"),
    Kind(
        "memory-bomb", by_step("held.append(bytearray(b'x') * (512 << 20))", before="held = []"), "ends", inline=False
    ),
    Kind("stop", once("tracer.stop()"), meets="finishes"),
]
