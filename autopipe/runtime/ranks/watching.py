"""What every rank is doing, in a small shared file, and the end of all of them when none does anything any more."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BUILDING, CAPTURING = "building the model", "capturing the model"
"""Phases in which a rank gets ready: a large model takes its time in each, and nothing moves meanwhile."""
START_TIMEOUT_S = 300.0
"""Until a rank is ready: importing torch and a model library may be slow on a cold disk, too."""
_GRACE_S = 3.0
_ROW = struct.Struct("=dqB47s88s")


def start(folder: Path, ranks: int) -> None:
    """Make the file in which the ranks write."""
    (folder / "beats").write_bytes(bytes(_ROW.size * ranks))


class Beat:
    """What one rank is doing, for those who watch it: written in a microsecond, read by the parent."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._file = open(folder / "beats", "r+b")  # noqa: SIM115  (lives as long as its map)
        self._map = mmap.mmap(self._file.fileno(), ranks * _ROW.size)
        self._at = rank * _ROW.size
        self._phase = b""

    def __call__(self, doing: str, *, waiting: bool = False) -> None:
        """Note the time and what begins now; ``waiting`` says that another rank has to move first."""
        row = (time.monotonic(), os.getpid(), waiting, doing.encode()[:47], self._phase[:88])
        _ROW.pack_into(self._map, self._at, *row)

    def phase(self, text: str) -> None:
        """Begin a part of the job that a user is told of."""
        self._phase = text.encode()
        self(text)


class Silent:
    """The beat of a process that nobody watches."""

    def __call__(self, doing: str, *, waiting: bool = False) -> None:
        """Nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""


class Row(NamedTuple):
    """A rank's last beat."""

    at: float
    pid: int
    waiting: bool
    doing: str
    phase: str


def watch(
    folder: Path,
    ranks: int,
    timeout_s: float,
    deadline: float,
    stop: threading.Event,
    progress: Callable[[str], None] | None,
) -> None:
    """Kill all ranks when none has moved for too long, their time is over, or one has failed and the others linger.

    ``deadline`` is a moment of time.monotonic; ``progress`` is told each phase of rank 0.
    """
    begun, failed_at, told = time.monotonic(), None, ""
    while not stop.wait(0.2):
        now, rows = time.monotonic(), rows_of(folder, ranks)
        if progress is not None and rows[0].phase != told:
            told = rows[0].phase
            progress(told)
        if failed_at is None and any(folder.glob("error-*")):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_S:
            _kill(rows)
        starting = any(row.doing in ("", "starting", BUILDING, CAPTURING) for row in rows)
        limit = max(timeout_s, START_TIMEOUT_S) if starting else timeout_s
        silent = now - max(begun, *(row.at for row in rows)) > limit
        if failed_at is None and (silent or now > deadline):
            (folder / "hung").write_text(
                _hung_text(rows, limit) if silent else "its time was over: all ranks were ended"
            )
            _kill(rows)
            failed_at = now


def _hung_text(rows: list[Row], limit: float) -> str:
    """Blame a rank that computes before one that waits, the longest silent one first."""
    rank = min(range(len(rows)), key=lambda r: (rows[r].waiting, rows[r].at))
    return (
        f"rank {rank} hung in {rows[rank].doing or 'starting'}: nothing moved for {limit:g} s; "
        f"all ranks were ended. Use --timeout for a longer wait"
    )


def rows_of(folder: Path, ranks: int) -> list[Row]:
    """The last beat of every rank."""
    content = (folder / "beats").read_bytes()
    rows = [_ROW.unpack_from(content, rank * _ROW.size) for rank in range(ranks)]
    return [Row(at, pid, bool(waiting), _text(doing), _text(phase)) for at, pid, waiting, doing, phase in rows]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _kill(rows: list[Row]) -> None:
    for row in rows:
        if row.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(row.pid, signal.SIGKILL)


def kill_all(folder: Path, ranks: int) -> None:
    """Whatever is left, a stopped process too, when the launcher has returned or was interrupted."""
    _kill([row for row in rows_of(folder, ranks) if _is_ours(row.pid)])


def _is_ours(pid: int) -> bool:
    """Whether the process is still a child, or forked from one of ours: its number may have been given away."""
    if not pid:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return os.getpid() == _parent(_parent(pid))


def _parent(pid: int) -> int:
    """The parent of a process on Linux; 0 where it has ended, and on other systems."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
