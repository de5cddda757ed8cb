"""Kinds of blocks that end, divide, starve or spy on the process."""

from __future__ import annotations

from .kinds import Kind, once

__all__ = ["PROCESS_KINDS"]

PROCESS_KINDS = [
    Kind("os-exit", once("import os\nos._exit(3)"), inline=False),
    Kind("kill-itself", once("import os, signal\nos.kill(os.getpid(), signal.SIGKILL) #!")),
    Kind("kill-parent", once("import os, signal\nos.kill(os.getppid(), signal.SIGKILL) #!")),
    Kind("kill-group", once("import os, signal\nos.killpg(os.getpgid(0), signal.SIGKILL) #!")),
    Kind("terminate-itself", once("import os, signal\nos.kill(os.getpid(), signal.SIGTERM) #!")),
    Kind("raise-signal", once("import signal\nsignal.raise_signal(signal.SIGKILL)"), inline=False),
    Kind("abort", once("import os\nos.abort()"), inline=False),
    Kind("segmentation-fault", once("import ctypes\nctypes.string_at(0)"), inline=False),
    Kind(
        "exec",
        once("import os\nos.execv('/bin/sleep', ['sleep', '5']) #!"),
    ),
    Kind("fork-returns", once("import os\npid = os.fork() #!")),
    Kind(
        "fork-bomb",
        once("import os, time\nfor _ in range(48):\n    if os.fork() == 0: time.sleep(20); os._exit(0) #!"),
    ),
    Kind(
        "multiprocessing-fork",
        once(
            """
            import multiprocessing
            worker = multiprocessing.get_context("fork").Process(target=print)
            worker.start() #!
            """
        ),
    ),
    Kind(
        "thread-bomb",
        once(
            """
            import threading, time
            for _ in range(1500): threading.Thread(target=time.sleep, args=(15,), daemon=True).start()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "spinning-thread",
        once(
            """
            import threading, time
            def spin(until=time.monotonic() + 20):
                while time.monotonic() < until: pass
            threading.Thread(target=spin, daemon=True).start()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "thread-writes-later",
        once(
            """
            import threading, time
            def write(h=h):
                time.sleep(0.05)
                h.fill_(float("nan"))
            threading.Thread(target=write, daemon=True).start()
            """
        ),
        meets="ends",
    ),
    Kind(
        "child-process",
        once("import subprocess\nchild = subprocess.Popen(['sleep', '40'])"),
        meets="ends",
        inline=False,
    ),
    Kind("zombie", once("import subprocess\nchild = subprocess.Popen(['true'])"), meets="ends"),
    Kind("subprocess", once("import subprocess\nsubprocess.run(['true'], check=False)"), meets="ends"),
    Kind("descriptors-closed", once("import os\nos.closerange(3, 61)"), meets="ends", inline=False),
    Kind("stdout-closed", once("import os, sys\nsys.stdout.close()\nos.close(1)\nprint('x')"), "ends", inline=False),
    Kind("stderr-closed", once("import os, sys\nsys.stderr.close()"), "ends", inline=False),
    Kind(
        "descriptors-exhausted",
        once("import os\nheld = []\nwhile True: held.append(os.dup(2)) #!"),
        error="OSError",
        inline=False,
    ),
    Kind(
        "descriptors-exhausted-and-kept",
        once(
            """
            import builtins, os
            builtins.held = []
            try:
                while True: builtins.held.append(os.dup(2))
            except OSError: pass
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind("prints-200000", once("for i in range(200_000): print(i)"), meets="ends"),
    Kind("prints-without-end", once("while True: print('x' * 1000) #!")),
    Kind("file-damaged", once("open('{folder}/victim', 'w').write('damaged')"), meets="ends", inline=False),
    Kind(
        "symlink-damaged",
        once("import os\nos.remove('{folder}/victim')\nos.symlink('/etc/hostname', '{folder}/victim')"),
        meets="ends",
        inline=False,
    ),
    Kind("file-read", once("text = open('{folder}/victim').read().save()"), meets="ends", inline=False),
    Kind(
        "environment-read",
        once("import os\nfound = [f'{key}={os.environ[key]}' for key in os.environ].save()"),
        meets="ends",
        inline=False,
    ),
    Kind(
        "environment-of-parents-read",
        once(
            """
            import os
            found = [].save()
            pid = os.getppid()
            while pid > 1:
                found.append(open(f"/proc/{pid}/environ", "rb").read())
                pid = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "redis-reached",
        once(
            """
            import socket
            link = socket.create_connection(("127.0.0.1", {port}), 2)
            link.sendall(b"GET canary\\r\\n")
            said = link.recv(100).save()
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind("socket", once("import socket\nlink = socket.socket()\nlink.close()"), meets="ends"),
    Kind("virtual-memory", once("import mmap\nheld = mmap.mmap(-1, 1 << 46) #!")),
    Kind(
        "limits-lowered", once("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))"), "ends", "", False
    ),
    Kind("nice", once("import os\nos.nice(5)"), meets="ends", inline=False),
    Kind(
        "throws-into-hub",
        once(
            """
            import greenlet
            greenlet.getcurrent().parent.throw(ValueError("into the hub"))
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "switches-to-hub",
        once("import greenlet\ngreenlet.getcurrent().parent.switch(('odd', 'value'))"),
        meets="ends",
        inline=False,
    ),
    Kind(
        "frames-of-hub-changed",
        once(
            """
            import greenlet
            frame = greenlet.getcurrent().parent.gr_frame
            while frame is not None:
                frame.f_globals.pop("watchdog", None)
                frame = frame.f_back
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind(
        "error-in-another-thread",
        once(
            """
            import ctypes, threading
            for ident in list(threading._active):
                if ident != threading.main_thread().ident:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            """
        ),
        meets="ends",
        inline=False,
    ),
    Kind("at-exit", once("import atexit, os\natexit.register(os._exit, 3)"), meets="ends"),
]
