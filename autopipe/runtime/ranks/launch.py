"""Run one function on several local ranks, and end all of them whatever happens.

Processes come from torch's elastic launcher, so that a function runs under the same environment as under torchrun;
inside torchrun ``launch`` joins the processes that are there. On top of it:

- every rank notes what it is doing in a small shared file (watching.py); when no rank has moved for ``timeout_s``, the
  one that computes, rather than waits for another, is named and all are killed;
- the first rank to fail is the one whose error is raised, as the error that it was;
- a rank that finds its parent gone ends itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopipe.core.errors import ModelError, RankFailed
from autopipe.runtime.ranks import watching
from autopipe.runtime.ranks.failures import LATER_S, first_error, is_echo, leave, note_error, told_exits
from autopipe.runtime.ranks.host import hurry_messages, keep_freed_memory

T = TypeVar("T")

beat: watching.Beat | watching.Silent = watching.Silent()
"""Called by long-running code on every rank; see watching.Beat."""

_deadline = float("inf")


@contextlib.contextmanager
def until(moment: float) -> Iterator[None]:
    """Everything launched inside is ended at this moment of time.monotonic, with RankFailed, if it has not ended."""
    global _deadline
    before, _deadline = _deadline, min(moment, _deadline)
    try:
        yield
    finally:
        _deadline = before


def launch(
    function: Callable[..., T],
    args: tuple[Any, ...],
    *,
    ranks: int,
    timeout_s: float,
    threads: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> list[T]:
    """Run ``function(*args)`` on ``ranks`` processes with a process group, and return what each returned.

    ``progress`` is told rank 0's phase whenever that changes. Arguments and results are pickled, so the
    function must be importable. Under torchrun the group that is there is used. Raises the first failing rank's
    AutopipeError, or RankFailed when a rank raised something else, died, or did nothing for ``timeout_s``.
    """
    if dist.is_torchelastic_launched():
        return _joined(function, args, ranks, threads, device)
    _quiet_tracker()
    with tempfile.TemporaryDirectory(prefix="autopipe-") as name:
        folder = Path(name)
        watching.start(folder, ranks)
        stop = threading.Event()
        given = (folder, ranks, timeout_s, _deadline, stop, progress)
        watch = threading.Thread(target=watching.watch, args=given, daemon=True)
        watch.start()
        failure: BaseException
        try:
            with _quiet_elastic(), _own_signals(), _main_hidden(function, args):
                config, here = _config(ranks, device), Here.of_this_process()
                results = elastic_launch(config, _entry)(function, args, folder, threads, device, here)
            return [results[rank] for rank in range(ranks)]
        except ChildFailedError as error:
            failure = first_error(folder, ranks, error)
        except SignalException:
            failure = KeyboardInterrupt()
        finally:
            with _undisturbed():
                stop.set()
                watch.join()
                watching.kill_all(folder, ranks)
                gc.collect()  # the launcher's semaphores, else Python warns of them at its end
        raise failure


def apart(
    function: Callable[..., T],
    args: tuple[Any, ...],
    *,
    timeout_s: float,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> T:
    """Run ``function(*args)`` in one process of its own, so that a model which ends or crashes its process is told.

    Under torchrun, which watches its processes, it runs in this one. Raises the AutopipeError that the function
    raised, or ModelError.
    """
    if dist.is_torchelastic_launched():
        return function(*args)
    try:
        (result,) = launch(function, args, ranks=1, timeout_s=timeout_s, threads=threads, progress=progress)
    except RankFailed as error:
        failure = ModelError(str(error).replace("rank 0", "the model's process", 1))
        failure.__notes__ = getattr(error, "__notes__", [])
        raise failure from None
    return result


def _quiet_tracker() -> None:
    """Start Python's tracker of semaphores so that it says nothing of what ranks leave behind that had to be killed.

    It removes them all the same, and does not start again where it runs already.
    """
    known = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (known, "ignore:resource_tracker")))
    try:
        resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS") if known is None else os.environ.update(PYTHONWARNINGS=known)


def _config(ranks: int, device: str) -> LaunchConfig:
    """Ranks are forked from a process that has imported what they need, but where a driver or a system bars that."""
    forked = device == "cpu" and platform.system() == "Linux"
    if forked:
        multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver" if forked else "spawn",
        shutdown_timeout=3,
    )


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the launcher's own log lines away: errors are told once, in our words."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [logging.getLogger(name) for name in (*names, "torch.multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the signal handlers that the launcher replaces and forgets."""
    known = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in known.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not break off what the first one began: it takes less than a second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _main_hidden(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Keep the children from running the main script again, unless they need something that it defines.

    A script that was read from standard input has no file that they could import.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if _needs_main(function, args) and (path is None or os.path.exists(path)):
        yield
        return
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def _needs_main(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether what the children are given is of a class or function of the main script."""
    try:
        return b"__main__" in pickle.dumps((function, args))
    except Exception:  # it will be told where the children are started
        return True


class Here(NamedTuple):
    """What a rank takes over from the process that launched it: a forked one has it from its forkserver's start."""

    environment: dict[str, str]
    messages: Connection

    @classmethod
    def of_this_process(cls) -> Here:
        """Its environment and where its messages go. A Connection is what can be handed over of an open file."""
        return cls(dict(os.environ), Connection(os.dup(2), readable=False))

    def take_over(self) -> None:
        """Have the same in this process."""
        os.environ.update(self.environment)
        os.dup2(self.messages.fileno(), 2)


def _entry(function: Callable[..., T], args: tuple[Any, ...], folder: Path, threads: int, device: str, here: Here) -> T:
    """What each process runs: set up, run, and on any error write it down before the process dies of it."""
    global beat
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends all ranks
    here.take_over()
    os.dup2(2, 1)  # what a model prints must not mix with results on stdout
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    beat = watching.Beat(folder, rank, ranks)
    beat("starting")
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)  # prints tables on an error
    try:
        with told_exits(folder, rank), process_group(threads, device):
            return function(*args)
    except BaseException as error:
        note_error(folder, rank, error)
        if is_echo(error):
            time.sleep(LATER_S)
        raise


@contextlib.contextmanager
def process_group(threads: int, device: str) -> Iterator[None]:
    """The default process group for this rank's device, gone again afterwards."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    where = None
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    if _single_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo resolves the host's name, which may fail
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=where)
    hurry_messages()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _single_host() -> bool:
    return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] and sys.platform == "linux"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    leave(1)


def _joined(function: Callable[..., T], args: tuple[Any, ...], ranks: int, threads: int, device: str) -> list[T]:
    """The same under torchrun: its processes are the ranks, and each gets every result."""
    found = int(os.environ["WORLD_SIZE"])
    if found != ranks:
        raise RankFailed(f"torchrun started {found} processes, {ranks} are needed: use --nproc-per-node {ranks}")
    with process_group(threads, device):
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, function(*args))
        return results
