"""The blocking client's thread: it ends with its program, and with an interrupt nothing is left hanging."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import anyio.to_thread
import pytest

from tests.support.bus_engine import BusEngine, Stage, engine_info

ENDS = {
    "a client that nobody closes": "client = tracewire.blocking.connect(url, prefix=prefix); client.models.get('tiny')",
    "a client that is collected": "tracewire.blocking.connect(url, prefix=prefix); import gc; gc.collect()",
    "an iteration that is left": """
        client = tracewire.blocking.connect(url, prefix=prefix)
        for text in client.trace("tiny", "x").text_stream():
            break
    """,
    "an interrupt": """
        import signal, sys, threading, time
        main = threading.main_thread().ident

        def waits():
            frame, functions = sys._current_frames()[main], set()
            while frame is not None:
                functions.add(frame.f_code.co_name)
                frame = frame.f_back
            return {"__next__", "_result"} <= functions

        def interrupt():
            while not waits():
                time.sleep(0)
            # Once only: also a signal that comes just before the thread begins to wait is noticed.
            signal.pthread_kill(main, signal.SIGINT)

        with tracewire.blocking.Client(url, prefix=prefix) as client:
            trace = client.trace("tiny", "x")
            assert next(trace).text == "one"
            try:
                threading.Thread(target=interrupt).start()
                next(trace)
            except KeyboardInterrupt:
                print("interrupted", trace.status)
            assert trace.cancel()
    """,
}


@pytest.mark.parametrize("case", ENDS)
async def test_a_program_ends(embedded: str, prefix: str, case: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await anyio.sleep_forever()

    program = f"import tracewire\nurl, prefix = {embedded!r}, {prefix!r}\n{textwrap.dedent(ENDS[case])}\nprint('end')"
    async with BusEngine.running(embedded, prefix, script, engine_info()):
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("end\n")
