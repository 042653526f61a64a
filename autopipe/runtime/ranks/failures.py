"""How a rank that failed is told: what it writes down before it dies, and which rank's error the launcher raises.

The first rank to fail is the one that is told, as the error that it raised; one that died without a word by how it
went, and what it was doing then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from autopipe.core.errors import AutopipeError, RankFailed
from autopipe.runtime.ranks import watching

leave = os._exit
"""Ends this process at once; ``os._exit`` itself is another inside ``told_exits``."""


@contextlib.contextmanager
def told_exits(folder: Path, rank: int) -> Iterator[None]:
    """Let a model's os._exit be told with its line: it is silent, and with code 0 the launcher would wait for ever."""
    process = os.getpid()

    def told(status: int) -> NoReturn:
        if os.getpid() == process:  # else a child that the model forked, which ends like this
            caller = traceback.extract_stack()[-2]
            where = f"{caller.filename}, line {caller.lineno}, in {caller.name}"
            note_error(folder, rank, RankFailed(f"rank {rank} ended with os._exit({status}): {where}"))
            leave(status or 1)
        leave(status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = leave


def note_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write the error with its time; the file appears whole."""
    try:
        content = pickle.dumps(error if isinstance(error, AutopipeError) else None)
    except Exception:
        content = pickle.dumps(None)
    text = "".join(traceback.format_exception(error))
    target = folder / f"error-{rank}"
    target.with_suffix(".new").write_bytes(pickle.dumps((time.monotonic(), content, _told(error), text)))
    target.with_suffix(".new").rename(target)


def _told(error: BaseException) -> str:
    """The error in one line, with the innermost cause: torch wraps what a stage raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def first_error(folder: Path, ranks: int, failure: ChildFailedError) -> AutopipeError:
    """The error of the rank that failed first; what others say of a lost peer is only its echo."""
    noted = []
    for path in folder.glob("error-*"):
        if path.suffix != ".new":
            noted.append((*pickle.loads(path.read_bytes()), int(path.name.removeprefix("error-"))))
    dead = {rank: f for rank, f in failure.failures.items() if not (folder / f"error-{rank}").exists()}
    hung = folder / "hung"
    if hung.exists():
        return RankFailed(hung.read_text())
    own = sorted(entry for entry in noted if not _is_echo(entry[2]))
    if own:
        _, content, told, text, rank = own[0]
        known = pickle.loads(content)
        error: AutopipeError = known or RankFailed(f"rank {rank} failed: {told}")
        error.__notes__ = [text]  # shown by --debug only
        return error
    rank, process = min(dead.items(), default=(failure.get_first_failure()))
    others = "; all other ranks were ended" if ranks > 1 else ""
    return RankFailed(f"rank {rank} {_death(process.exitcode, watching.rows_of(folder, ranks)[rank])}{others}")


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    return _is_echo(_told(error))


def _is_echo(told: str) -> bool:
    return any(text in told for text in _ECHO)


def _death(code: int, last: watching.Row) -> str:
    """How a rank went that told no error, what it was doing, and what may help."""
    doing = ", at ".join(dict.fromkeys(filter(None, (last.phase, last.doing))))
    if code == 1 and not last.doing:
        return 'could not start: a script that hands over its own model does so under if __name__ == "__main__":'
    if code >= 0:
        how, help_ = f"ended with exit code {code}", "does a library that the model uses end the process?"
    else:
        number = signal.Signals(-code)
        how, help_ = f"was killed by {number.name}", _SIGNAL_HELP.get(number, _CRASH_HELP)
    return f"{how} while {doing or 'starting'} ({help_})"


_ECHO = ("Connection closed by peer", "Connection reset", "Broken pipe", "connection was reset")
LATER_S = 1.0
"""A rank that only lost another ends so much later: of those that have ended when it looks, the launcher tells one."""

_CRASH_HELP = "native code crashed: set PYTHONFAULTHANDLER=1 to see where"
_SIGNAL_HELP = {
    signal.SIGKILL: "someone ended it, or the system did because memory ran out: --memory sets a lower limit",
    signal.SIGTERM: "someone ended it",
    signal.SIGINT: "someone ended it",
    signal.SIGHUP: "someone ended it",
}
