"""Kinds of blocks that attack the worker from their host: by what a host may ask for, or by messages of their own.

A block can reach all of its host: the sockets 3 (turns and replies) and 4 (reports) to the worker, 5 (saves) to the
save relay, and the memory that they share. In inline mode these are other descriptors of the worker, so that no kind
here is for inline mode.
"""

from __future__ import annotations

import textwrap

from .kinds import Kind, Meets, once

__all__ = ["HOST_KINDS"]

#: Sends a message to the worker: its length, and the message.
_SEND = """
import os, struct
import msgspec
encode = msgspec.msgpack.encode
def send(message, to=4):
    data = struct.pack("<I", len(message)) + message
    while data:
        try:
            data = data[os.write(to, data):]
        except BlockingIOError:
            pass
"""

#: Finds the host's own part that asks the worker.
_DRIVER = """
import gc
import msgspec
from tracewire_engine.block_host.driver import Driver
from tracewire_engine.protocol.block_host import Request, Shape, Shared
def driver():
    return next(one for one in gc.get_objects() if isinstance(one, Driver))
"""

#: Asks the worker. The error of a request names this line of the block, the innermost one.
_ASK = (
    _DRIVER
    + """
def ask(path, attribute="", value=None):
    return driver()._ask(Request(path, attribute, value)) #!
"""
)


def _sends(name: str, code: str, *, meets: Meets = "error", error: str = "BlockHostLost|BlockTimeout") -> Kind:
    source = once(code, before=_SEND)
    return Kind(name, source, meets=meets, error=error if meets == "error" else "", inline=False)


def _asks(name: str, code: str, error: str) -> Kind:
    return Kind(name, once(code, before=_ASK), error=error, inline=False)


def _named(code: str) -> str:
    """Code that knows `request`, the name under which the block's request is reported."""
    find = """
        import gc
        from tracewire_engine.block_host.session import Session
        session = next(one for one in gc.get_objects() if isinstance(one, Session))
        request = next(iter(session._requests.requests.values())).engine_id
    """
    return textwrap.dedent(find) + textwrap.dedent(code)


HOST_KINDS = [
    # What a block can ask of the model.
    Kind("kv-cache-saved", once("cache = model.model.layers[2].self_attn.attn.kv_cache.save() #!"), inline=False),
    Kind(
        "attention-called",
        once("import torch\nmodel.model.layers[2].self_attn(torch.zeros(len(h), dtype=torch.long), h * 9) #!"),
        error="NotImplementedError",
        inline=False,
    ),
    Kind(
        "layer-called-on-many-rows",
        once("import torch\nmodel.model.layers[2].mlp(torch.ones(20_000, 256)) #!"),
        error="ValueError",
        inline=False,
    ),
    Kind(
        "embedding-of-no-token",
        once("import torch\nmodel.model.embed_tokens(torch.tensor([10 ** 9])) #!"),
        error="ValueError",
        inline=False,
    ),
    Kind(
        "norm-of-wide-rows",
        once("import torch\nmodel.model.norm(torch.ones(4, 1 << 20)) #!"),
        error="ValueError",
        inline=False,
    ),
    # Of matrices that are packed for a CPU: their kernel takes the rows to be as wide, and of the same kind of number.
    *(
        Kind(name, once(f"import torch\n{call} #!"), error="ValueError", inline=False)
        for name, call in (
            ("head-called-on-wide-rows", "model.logits_processor(model.lm_head, torch.ones(64, 512, dtype=h.dtype))"),
            ("head-called-on-narrow-rows", "model.logits_processor(model.lm_head, torch.ones(64, 128, dtype=h.dtype))"),
            ("mlp-called-on-other-numbers", "model.model.layers[2].mlp(torch.ones(64, 256, dtype=torch.float32))"),
        )
    ),
    # Requests that no host makes.
    _asks(
        "path-of-globals", "ask('model.get.__func__.__globals__.clear', '', Shared([1, [1], [3]], []))", "LookupError"
    ),
    _asks(
        "path-of-tokenizer", "ask('model.tokenizer.save_pretrained', '', Shared([1, [1, 'x'], [3]], []))", "LookupError"
    ),
    _asks("attribute-of-classes", "ask('model.model.norm', '__class__')", "AttributeError"),
    _asks(
        "one-tensor-many-times",
        """
        shape = Shape("float32", (1 << 16, 1 << 10), 0)
        ask("model.model.norm", "", Shared([1, [1, *[[0, i] for i in range(500)]], [3]], [shape] * 500))
        """,
        "RuntimeError",
    ),
    _asks(
        "tensor-outside-the-memory",
        "ask('model.model.norm', '', Shared([1, [1, [0, 0]], [3]], [('float32', (1, 256), 1 << 60)]))",
        "RuntimeError",
    ),
    Kind(
        "requests-without-end",
        once(
            """
            request = msgspec.msgpack.encode(Request("model.lm_head", "weight"))
            while True: driver()._calls.send(request)
            """,
            before=_DRIVER,
        ),
        error="BlockHostLost|BlockTimeout|ChannelClosed",
        inline=False,
    ),
    # Messages that are no messages.
    _sends("no-message-to-the-model", "send(b'\\xc1' * 100, 3)"),
    _sends("large-message-to-the-model", "send(bytes(64 << 20), 3)"),
    _sends("message-without-an-end", "os.write(4, struct.pack('<I', 1 << 27) + b'x')", meets="ends"),
    _sends("message-of-4gb", "os.write(4, struct.pack('<I', 0xFFFFFFFF) + b'x')"),
    _sends(
        "message-in-single-bytes", "os.write(4, struct.pack('<I', 1 << 20))\nfor _ in range(1 << 20): os.write(4, b'x')"
    ),
    _sends(
        "report-nested-deep", "send(b'\\x93\\xa8reported\\x91\\x95\\xa1r\\x00\\x00' + b'\\x91' * 100_000 + b'\\xc0')"
    ),
    _sends("reports-without-end", "message = encode(['reported', [], [], 1, 0])\nwhile True: send(message)"),
    _sends("ready-without-end", "message = encode(['ready', ['x' * 1000]])\nwhile True: send(message)"),
    _sends("report-of-a-million-records", "send(encode(['reported', [['r', 0, 0, [], '']] * 1_000_000, [], 1, 0]))"),
    _sends("reply-that-was-not-asked-for", "send(encode(['reply', [], [], False, [], None]), 3)", meets="ends"),
    _sends(
        "reply-with-foreign-rows",
        "send(encode(['reply', [], [], False, [[0, ['float32', [64, 256], 0]]], None]), 3)",
        meets="ends",
    ),
    _sends(
        "reply-with-rows-twice",
        "send(encode(['reply', [], [], False, [[0, ['float32', [1, 256], 0]]] * 20_000, None]), 3)",
        meets="ends",
    ),
    # Records that the adapter cannot read, of the block's own request.
    _sends("record-without-changes", _named("send(encode(['reported', [[request, 0, 7, 5, '']], [], 1, 0]))")),
    _sends(
        "record-without-a-name", _named("send(encode(['reported', [[request, 0, 7, [['a', [], [1]]], '']], [], 1, 0]))")
    ),
    _sends("record-of-a-far-token", _named("send(encode(['reported', [[request, 0, 1 << 60, [], '']], [], 1, 0]))")),
    _sends(
        "record-of-others",
        "send(encode(['reported', [[f'r{i}', 0, 0, [], 'error'] for i in range(1000)], [], 1, 0]))",
        meets="ends",
    ),
    _sends(
        "array-of-others",
        "for i in range(60): send(encode(['chunk', f'r{i}', '0' * 16, 0, b'x' * 99]))",
        meets="ends",
    ),
    _sends("array-with-an-odd-name", _named("send(encode(['chunk', request, '../../victim', -1, b'x']))")),
    _sends(
        "socket-passed",
        "import socket\nlink = socket.fromfd(4, socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "for _ in range(50): socket.send_fds(link, [b''], [3, 4, 5, 6])",
        meets="ends",
    ),
    # The same to the save relay.
    _sends("saves-that-are-none", "send(b'\\xc1' * 100, 5)"),
    _sends("saves-without-an-end", "os.write(5, struct.pack('<I', 1 << 27) + b'x')", meets="ends"),
    _sends("saves-of-4gb", "os.write(5, struct.pack('<I', 0x7FFFFFFF) + b'x')"),
    _sends(
        "saves-in-single-bytes", "os.write(5, struct.pack('<I', 1 << 20))\nfor _ in range(1 << 20): os.write(5, b'x')"
    ),
    _sends(
        "saves-outside-the-memory",
        "os.write(5, struct.pack('<IQQQ', 24 | 1 << 31, 1 << 60, 1 << 17, 1 << 21))",
    ),
    _sends("saves-nested-deep", "send(b'\\x91\\x91\\x95\\xa1r\\x00\\x00' + b'\\x91' * 100_000 + b'\\xc0', 5)"),
    _sends(
        "saves-nested-deeper-each-time",
        _named(
            """
            for depth in range(240, 990, 5):
                head = bytes.fromhex("9193a17391a161")
                nested = msgspec.Raw(head + bytes([0x91]) * depth + bytes([0xC0]))
                send(encode([[[request, 0, 0, nested, ""]]]), 5)
            """
        ),
        meets="ends",
    ),
    _sends(
        "saves-of-tokens-ahead",
        _named(
            """
            large = msgspec.Raw(encode([["s", ["x"], bytes(60 << 20)]]))
            for index in range(6):
                send(encode([[[request, 0, 1000 + index, large, ""]]]), 5)
            """
        ),
        meets="ends",
    ),
    _sends(
        "saves-of-many-changes",
        _named("send(encode([[[request, 0, 0, [['d', ['a', str(i)]] for i in range(1_000_000)], '']]]), 5)"),
        meets="ends",
    ),
    _sends(
        "end-of-many-changes",
        _named("send(encode(['reported', [], [[request, 0, [['d', ['a']]] * 1_000_000]], 1, 0]))"),
        meets="ends",
    ),
    _sends(
        "end-of-many-names",
        _named("send(encode(['reported', [], [[request, 0, [], [], {str(i): 'x' for i in range(500_000)}]], 1, 0]))"),
        meets="ends",
    ),
    _sends(
        "reply-with-many-locations",
        "send(encode(['reply', [], [f'model.x{i}' for i in range(60_000)], False, [], None]), 3)",
        meets="ends",
    ),
    _sends(
        "reply-that-waits-less-than-no-time",
        "send(encode(['reply', [['model.logits', -(2 ** 63)]], [], False, [], None]), 3)",
        meets="ends",
    ),
    _sends(
        "reply-nested-deep",
        "send(encode(['reply', [], [], False, [], [msgspec.Raw(bytes([0x91]) * 600 + bytes([0xC0])), []]]), 3)",
        meets="ends",
    ),
    _sends(
        "requests-in-a-row",
        "many = encode(['request', 'model', 'tokenizer', None])\n"
        "os.write(3, (struct.pack('<I', len(many)) + many) * 900)",
        meets="ends",
    ),
    _sends("saves-for-ever", "message = encode([[]])\nwhile True: send(message, 5)"),
    _sends("saves-of-a-million-records", "send(encode([[['r', 0, 0, [], '']] * 1_000_000]), 5)"),
    _sends("saves-without-changes", _named("send(encode([[[request, 0, 7, 5, '']]]), 5)")),
    _sends("saves-without-a-name", _named("send(encode([[[request, 0, 7, [['a', [], [1]]], '']]]), 5)")),
    _sends("saves-of-a-far-token", _named("send(encode([[[request, 0, 1 << 60, [], '']]]), 5)")),
    _sends(
        "saves-of-others",
        "send(encode([[[f'r{i}', 0, 0, [], 'error'] for i in range(1000)]]), 5)",
        meets="ends",
    ),
    _sends("saves-closed", "os.close(5)", meets="ends"),
    _sends(
        "socket-passed-to-the-relay",
        "import socket\nlink = socket.fromfd(5, socket.AF_UNIX, socket.SOCK_STREAM)\n"
        "for _ in range(50): socket.send_fds(link, [b''], [3, 4, 5, 6])",
        meets="ends",
    ),
    # Saves that grow.
    Kind(
        "save-grows-by-a-byte-a-step",
        "held = {'text': ''}.save()\nfor step in tracer.iter[:]:\n    model.model.layers[2].output\n"
        "    held['text'] += 'x'\n    held['all'] = held['text'] * 100_000\n",
        meets="finishes",
    ),
    Kind(
        "many-full-lists",
        once("held = {f'n{i}': [0] * 262_000 for i in range(60)}.save()"),
        meets="ends",
        inline=False,
    ),
    # Shared memory that the worker reads, written to all the time.
    Kind(
        "memory-written-all-the-time",
        once(
            """
            import threading
            memory = driver()._returned
            def write():
                while True: memory._bytes.fill_(255)
            threading.Thread(target=write, daemon=True).start()
            model.model.layers[2].output = (h * 1.001, o[1])
            """,
            before=_DRIVER,
        ),
        meets="ends",
        inline=False,
    ),
]
