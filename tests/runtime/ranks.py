"""Real gloo ranks for tests: processes that are started once and run many functions."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

STUCK_S = 60.0
"""Ranks that have hardly computed for so long, all together, hang. A busy machine makes them slow, but not idle."""
_HARDLY = 0.02
"""The part of one processor that waiting ranks stay below: gloo's threads look around a hundred times a second."""
_TICK_S = 1.0
_GRACE_S = 2.0
"""How long the others may go on when one has failed: the first to be heard is often not the first to fail."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, pipe: Connection) -> None:
    from autopipe.runtime.ranks.launch import process_group

    while True:
        job = pipe.recv()
        if job is None:
            return
        function, args, ranks, port = job
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            with process_group(1, "cpu"):
                result = function(*args)
            pipe.send((True, result))
        except BaseException as error:
            pipe.send((False, (repr(error), traceback.format_exc())))


def processor_s(pid: int) -> float:
    """Seconds that a process has computed, by Linux's /proc; infinity elsewhere, where pytest's own limit must do."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Ranks:
    """A pool; ``run`` gives what the function returned on each rank, or fails with a failed rank's traceback."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, ranks: int, **options: Any) -> list[Any]:
        self._grow(ranks)
        port = _free_port()
        pipes = [pipe for _, pipe in self._workers[:ranks]]
        for pipe in pipes:
            pipe.send((partial(function, **options), args, ranks, port))
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        while len(results) + len(failures) < ranks:
            left = {p: r for r, p in enumerate(pipes) if r not in results and r not in failures}
            ready = wait(list(left), _GRACE_S) if failures else self._next(list(left))
            if not ready:
                break
            for pipe in ready:
                good, value = pipe.recv()
                (results if good else failures)[left[pipe]] = value
        if len(results) < ranks:
            self.close()
        if failures:
            # what others say of a lost peer is only an echo
            rank, (said, text) = min(failures.items(), key=lambda item: ("Connection" in item[1][0], item[0]))
            raise AssertionError(f"rank {rank} raised {said}\n{text}")
        if len(results) < ranks:
            late = set(range(ranks)) - set(results)
            raise TimeoutError(f"ranks {late} hang: all have hardly computed for {STUCK_S} s")
        return [results[rank] for rank in range(ranks)]

    def _next(self, pipes: list[Connection]) -> list[object]:
        """The pipes of ranks that are done; none where all ranks hang.

        Counted in ticks of this process, so that one that is stopped together with its ranks goes on afterwards.
        """
        quiet, used = 0.0, self._processor_s()
        while quiet < STUCK_S:
            ready = wait(pipes, _TICK_S)
            if ready:
                return ready
            quiet += _TICK_S
            if not self._processor_s() - used <= _HARDLY * STUCK_S:
                quiet, used = 0.0, self._processor_s()
        return []

    def _processor_s(self) -> float:
        """Seconds that the ranks have computed, all together."""
        return sum(map(processor_s, (process.pid for process, _ in self._workers)))

    def _grow(self, ranks: int) -> None:
        while len(self._workers) < ranks:
            mine, theirs = self._context.Pipe()
            rank = len(self._workers)
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self._workers.append((process, mine))

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
