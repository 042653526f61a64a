"""What differs between a CPU process and a CUDA device: its clock, its memory, its name. The rest is one code path."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

AS_FAST = 0.25
"""Devices of one name whose times differ by less than this part are equally fast: busy machines vary as much."""

_TENSORS = 0.8
"""The part of a machine's memory that is for tensors: the C library keeps what is freed (host.py) with gaps of up to a
quarter of it, and each process has its interpreter and libraries."""


class Mark(Protocol):
    """A moment on a device."""


def default_device() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_for(planned: str) -> str:
    """What a plan for this device runs on here: the CPU where that was planned for, else what is there."""
    return "cpu" if planned.startswith("cpu") else default_device()


def own_device(kind: str) -> torch.device:
    """This rank's device."""
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch(Protocol):
    """Moments and the seconds between them: a device's clock, or one that counts what operations would take."""

    device: torch.device

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two moments."""


@dataclass
class Clock:
    """Moments on a device and the seconds between them: events on CUDA, so that nothing waits while it is timed."""

    device: torch.device
    _start: Mark = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Make now the moment 0, after all work so far is done."""
        synchronize(self.device)
        self._start = self.mark()

    def mark(self) -> Mark:
        """This moment in the device's own order of work."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: Mark, second: Mark) -> float:
        """Seconds between two marks; on CUDA both must have passed (see synchronize)."""
        if isinstance(first, float) and isinstance(second, float):
            return second - first
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3

    def since_start(self, mark: Mark) -> float:
        """Seconds from the moment 0 to a mark."""
        return self.seconds(self._start, mark)


def describe(kind: str, threads: int) -> str:
    """A name for the kind of device, equal on equal machines: ``NVIDIA H100 …`` or ``cpu … 1 thread``."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu {_cpu_model()} {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_bytes(kind: str, devices: int) -> int:
    """Memory of one device; CPU processes share the machine's evenly, but for what is no tensor."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(machine_bytes() * _TENSORS) // devices


def machine_bytes() -> int:
    """What this machine lets its processes use: its memory, or less where a container limits it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def is_as_fast(ratio: float) -> bool:
    """Whether two devices of one name whose times have this ratio are taken to be equally fast."""
    return abs(ratio - 1) < AS_FAST


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
