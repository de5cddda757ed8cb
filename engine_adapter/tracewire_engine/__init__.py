"""The engine adapter: runs vLLM's `AsyncLLM` with nnsight in its workers, and publishes traces to the bus.

The *adapter* process (`adapter/`) owns the bus connection and `AsyncLLM`. vLLM starts *EngineCore* (`core/`), which
schedules requests, and the *workers* (`worker/`), which run the blocks. The workers report to the adapter over the
sockets of `link/`. `launch/` starts and ends these processes, and `protocol/` has the messages between them.
"""

# nnsight puts a `save` attribute on every object. anyio defines its attribute sets when they are first imported, and
# refuses unknown attributes then. So import them before any module here imports nnsight.
from anyio.abc import SocketAttribute as _SocketAttribute  # noqa: F401
from anyio.streams.file import FileStreamAttribute as _FileStreamAttribute  # noqa: F401
from anyio.streams.tls import TLSAttribute as _TLSAttribute  # noqa: F401
