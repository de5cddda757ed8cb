"""Confines a process to computing: no files but libraries, no network, no other process, and bounded memory.

Everything here is of the kernel and holds for all code of the process, also for compiled code. What a kernel lacks is
left out; `confine` says what is in force. Linux on x86-64 and arm64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable

import torch

__all__ = ["MOST_THREADS", "confine", "die_with_parent"]

_libc = ctypes.CDLL(None, use_errno=True)

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES, _SET_SECCOMP = 1, 4, 38, 22
_FILTER = 2
_NEW_USERS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000

#: A user without rights, to which a process of root changes; and how many threads all processes of that user have at
#: most.
_NOBODY, MOST_THREADS = 65534, 4096

#: The audit architecture, and the numbers of the refused system calls: on x86-64 and on arm64.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setuid": (105, 146),
    "setgid": (106, 144),
}
_CLONE, _CLONE3, _PRCTL = (56, 220), (435, 435), (157, 167)
_CLONE_THREAD = 0x00010000

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

#: Rights of Landlock over files: all that its first version knows, and of these to read files and list folders.
_ALL_RIGHTS, _READING = (1 << 13) - 1, (1 << 2) | (1 << 3)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def confine(readable: Iterable[str], *, memory: int) -> list[str]:
    """Confine this process for good. Called in a process of one thread, before any code of others runs in it.

    Args:
        readable: folders that the process may still read.
        memory: how many bytes of address space it may take beyond those that it has.

    Returns:
        What this kernel lacks or refuses, to be logged.
    """
    missing = []
    for what, step in (
        # Another user, and a process that cannot be traced, may not set it.
        ("an early end when memory is short", _end_first),
        ("namespaces", _leave_namespaces),
        ("another user", _change_user),
        # A change of the user clears it.
        ("a death signal", die_with_parent),
        ("no core dumps, no tracing", lambda: _control(_SET_DUMPABLE, 0)),
        ("no new privileges", lambda: _control(_SET_NO_NEW_PRIVILEGES, 1)),
        ("limits", lambda: _limit(memory)),
        ("closed files", lambda: _close_files(list(readable))),
        ("refused system calls", _refuse_calls),
    ):
        try:
            step()
        except OSError as error:
            missing.append(f"{what}: {error}")
    return missing


def die_with_parent() -> None:
    """End this process when the thread that started it ends."""
    _control(_SET_DEATH_SIGNAL, 9)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _control(option: int, value: int, more: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _leave_namespaces() -> None:
    kinds = _NEW_NETWORK | _NEW_IPC
    # Only root may leave these without a user namespace of its own.
    _checked(_libc.unshare(kinds if os.geteuid() == 0 else kinds | _NEW_USERS))


def _change_user() -> None:
    if os.geteuid() != 0:
        return
    os.setgroups([])
    # Libraries may lie in a folder that root alone can read. Then the process stays root, without any of its rights.
    os.seteuid(_NOBODY)
    readable = all(os.access(one, os.R_OK, effective_ids=True) for one in (torch.__file__, os.__file__))
    os.seteuid(0)
    if readable:
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        return
    head, rights = struct.pack("<II", 0x20080522, 0), bytes(24)
    _checked(_libc.capset(head, rights))


def _limit(memory: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for limit, most in (
        (resource.RLIMIT_AS, used + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NICE, 0),
        # Another user than root shares this limit with the engine.
        *([(resource.RLIMIT_NPROC, MOST_THREADS)] if os.getuid() == _NOBODY else []),
    ):
        resource.setrlimit(limit, (most, most))


def _end_first() -> None:
    """Have the kernel end this process before others of the machine, such as the engine, when memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _close_files(readable: list[str]) -> None:
    rights = ctypes.c_uint64(_ALL_RIGHTS)
    rules = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(8), 0))
    try:
        for folder in readable:
            try:
                descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):
                continue
            rule = _Rule(_READING if os.path.isdir(folder) else 1 << 2, descriptor)
            _checked(_libc.syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))
            os.close(descriptor)
        _checked(_libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _refuse_calls() -> None:
    machine = platform.machine()
    audit = _ARCHITECTURES.get(machine)
    if audit is None or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    numbers = sorted(found for one in _REFUSED.values() if (found := one[column]) is not None)
    code = _filter(audit, numbers, _CLONE[column], _CLONE3[column], _PRCTL[column])
    program = b"".join(struct.pack("<HBBI", *line) for line in code)
    held = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(held)))
    _control(_SET_SECCOMP, _FILTER, ctypes.addressof(described))


def _filter(audit: int, refused: list[int], clone: int, clone3: int, prctl: int) -> list[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter: each line an operation, two jumps and a value."""
    no = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    lines = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        no,
        (_LOAD, 0, 0, 0),
        # Numbers of x86-64's second table of calls.
        (_AT_LEAST, 0, 1, 0x40000000),
        no,
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), no]
    lines += [
        # The death signal stays: a process without one would outlive the engine.
        (_EQUAL, 0, 4, prctl),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 1, _SET_DEATH_SIGNAL),
        no,
        (_RETURN, 0, 0, _ALLOW),
        # The C library falls back to the older call, whose flags can be looked at.
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        no,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return lines
