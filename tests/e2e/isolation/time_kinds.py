"""Kinds of blocks that take time: in turns, in C code, in code that reads saves and errors, and in clean-up."""

from __future__ import annotations

from .kinds import Kind, by_step, once

__all__ = ["TIME_KINDS"]

TIME_KINDS = [
    Kind("asks-again-output", "while True:\n    model.model.layers[2].output #!\n"),
    Kind("asks-again-logits", "while True:\n    model.logits #!\n"),
    Kind("asks-in-turn", "while True:\n    model.model.layers[2].output\n    model.model.layers[2].output[0].sum()\n"),
    Kind("endless-loop", once("while True: pass #!")),
    Kind("endless-sleep", once("import time\ntime.sleep(60) #!")),
    Kind(
        "deadlock",
        once(
            """
            import threading
            lock = threading.Lock()
            lock.acquire()
            lock.acquire() #!
            """
        ),
    ),
    Kind("regex", once("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b') #!")),
    Kind("power", once("x = 7 ** 10 ** 8 #!"), inline=False),
    Kind("c-loop", once("sum(range(10 ** 11)) #!"), inline=False),
    Kind(
        "catch-all",
        once(
            """
            while True:
                try:
                    while True: pass
                except BaseException: pass
            """
        ),
    ),
    Kind(
        "catch-all-with-body",
        once(
            """
            import time
            count = 0
            while True:
                try:
                    count += 1
                    time.sleep(0.01)
                except BaseException: count -= 1
            """
        ),
        inline=False,
    ),
    Kind(
        "recursive-finally",
        once(
            """
            def again():
                try:
                    while True: pass
                finally:
                    again()
            again()
            """
        ),
    ),
    Kind(
        "alarm-ignored",
        once("import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass #!"),
    ),
    Kind(
        "alarm-blocked",
        once("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\nwhile True: pass #!"),
    ),
    Kind("timer-off", once("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass #!")),
    Kind(
        "error-text-loops",
        once(
            """
            class Odd(Exception):
                def __str__(self):
                    while True: pass
            raise Odd() #!
            """
        ),
    ),
    Kind(
        "save-iter-loops",
        once(
            """
            class Odd(list):
                def __iter__(self):
                    while True: pass
            odd = {"odd": Odd([1])}.save()
            """
        ),
    ),
    Kind(
        "save-getattribute-loops",
        once(
            """
            class Odd(list):
                def __getattribute__(self, name):
                    while True: pass
            kept = [Odd([1])].save()
            """
        ),
        meets="ends",
    ),
    Kind(
        "save-del-loops",
        once(
            """
            class Odd(list):
                def __del__(self):
                    while True: pass
            kept = {"odd": Odd([1])}.save()
            """
        ),
        meets="ends",
    ),
    Kind(
        "save-key-loops",
        by_step(
            """
            if step == 3:
                armed.append(1)
                kept[Odd()] = 2
            """,
            before="""
            armed = []
            class Odd(str):
                def __hash__(self): return 1
                def __eq__(self, other):
                    while armed: pass
                    return False
            kept = {Odd(): 1}.save()
            """,
        ),
        meets="ends",
    ),
    Kind(
        "save-torch-function-loops",
        once(
            """
            import torch
            class Odd(torch.Tensor):
                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    while True: pass
            kept = h[0].clone().as_subclass(Odd)
            saved = [kept].save()
            """
        ),
        meets="ends",
    ),
    Kind("nested-comprehensions", "x = " + "[" * 180 + "0" + " for i in range(2)]" * 180 + "\n", inline=False),
    Kind("large-source", "x = [" + "1," * 20_000 + "]\nmodel.model.layers[2].output\n", meets="finishes"),
    Kind("half-the-limit-each-step", by_step("import time\ntime.sleep(0.6)"), meets="ends", inline=False),
    Kind("asyncio-loop", once("import asyncio\nasyncio.run(asyncio.sleep(60))")),
    Kind("free-deep-list", once("deep = []\nfor _ in range(3_000_000): deep = [deep]\ndel deep"), meets="ends"),
    Kind(
        "slow-getattr-of-error",
        once(
            """
            class Meta(type):
                def __getattribute__(cls, name):
                    while True: pass
            class Odd(Exception, metaclass=Meta): pass
            raise Odd() #!
            """
        ),
    ),
    Kind(
        "large-exception-group",
        once("raise ExceptionGroup('many', [ValueError(str(i)) for i in range(100_000)]) #!"),
    ),
    Kind(
        "endless-iterator",
        once("import itertools\nseen = []\nfor x in itertools.count(): seen.append(x) if x < 10 else None #!"),
    ),
    Kind("tracer-loop-forever", "for step in tracer.iter[:10 ** 12]:\n    pass\n"),
]
