"""The engine adapter: hosts vLLM's `AsyncLLM` with nnsight's interleaving in its workers, and publishes to the bus.

Two kinds of process run this package. The *adapter* (`service.py`, `trace_run.py`, `cli.py`) owns the bus connection
and `AsyncLLM`. The *workers* (`worker.py`, `runner.py`, `compiler.py`, `save_tracker.py`), started by vLLM, run the
blocks. One `step_link.py` socket leads from the second to the first.
"""

# nnsight puts a `save` attribute on every object. anyio's attribute sets refuse attributes they do not know when they
# are defined, and anyio defines them when first asked for: ask before anything here imports nnsight.
from anyio.abc import SocketAttribute as _SocketAttribute  # noqa: F401
from anyio.streams.file import FileStreamAttribute as _FileStreamAttribute  # noqa: F401
from anyio.streams.tls import TLSAttribute as _TLSAttribute  # noqa: F401
