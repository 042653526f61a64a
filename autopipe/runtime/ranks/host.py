"""Two settings of a CPU rank's own process that make its steps faster and more even. Each does nothing elsewhere."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from pathlib import Path

_MALLOPT = {-4: 0, -1: -1, -2: 64 << 20}
"""M_MMAP_MAX (nothing has a mapping of its own, which goes back when it is freed: logits are larger than the 32 MiB to
which M_MMAP_THRESHOLD can be set everywhere), M_TRIM_THRESHOLD (never) and M_TOP_PAD of glibc's malloc.h."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of Linux's system call, by machine: the C library has no function for it."""
_SLICE_NS = 100_000


def keep_freed_memory() -> None:
    """Make the C library keep what is freed, so that a step does not fetch its memory from the system anew.

    A step frees its activations and the next one asks for as much again: with glibc's defaults each page is then given
    back, asked for, cleared and mapped, which costs several per cent of a step, and a quarter where tensors are large.
    What is kept has gaps: a step of an untied GPT-2 for which a process took 1.4 GB then took 1.6 to 1.7.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option, value in _MALLOPT.items():
        mallopt(option, value)


def hurry_messages() -> None:
    """Let the threads that carry gloo's messages interrupt the one that computes, on Linux 6.12 and later.

    A thread that wakes up for a message waits until the computing thread has used its slice of time, some
    milliseconds, unless its own slice is shorter (sched_setattr(2), sched_runtime of a SCHED_OTHER thread). To be
    called by the computing thread after the process group is made.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return
    call = ctypes.CDLL(None).syscall
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        if thread != threading.get_native_id() and "gloo" in _name(task):
            size, policy, flags, nice = 48, 0, 0, os.getpriority(os.PRIO_PROCESS, thread)
            call(number, thread, struct.pack("=IIQiIQQQ", size, policy, flags, nice, 0, _SLICE_NS, 0, 0), 0)


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""  # it has ended


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of time.perf_counter; some 0.1 ms longer, or less after ``wake_exactly``."""
    left = moment_s - time.perf_counter()
    if left > 0:
        time.sleep(left)


def wake_exactly() -> None:
    """Let this thread's sleeps end when they should, on Linux (prctl(2), PR_SET_TIMERSLACK); by default 50 µs later."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
