"""Ranks that end well, raise, die, hang or are interrupted: the first error is told, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autopipe.core.errors import ModelError, RankFailed
from autopipe.runtime.ranks import launch, watching
from autopipe.runtime.ranks.failures import LATER_S, is_echo


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return float(value)


def _misbehave(how: str, pids: str) -> None:
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        launch.beat("1F3")
        if how == "raise":
            raise ValueError("boom")
        if how == "model error":
            raise ModelError("the model said no")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    launch.beat("a wait", waiting=True)
    dist.barrier()


def _alive(pids: Path) -> list[int]:
    found = []
    for file in pids.iterdir():
        pid = int(file.read_text())
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def test_every_rank_returns_its_result() -> None:
    assert launch.launch(_sum_of_ranks, (1,), ranks=2, timeout_s=60) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", RankFailed, "rank 1 failed: ValueError: boom"),
        ("model error", ModelError, "the model said no"),
        ("exit", RankFailed, r"rank 1 ended with os\._exit\(7\)"),
        ("kill", RankFailed, "rank 1 was killed by SIGKILL"),
        ("stop", RankFailed, "rank 1 hung in 1F3: nothing moved for 2 s"),
        ("sleep", RankFailed, "rank 1 hung in 1F3: nothing moved for 2 s"),
    ],
)
def test_the_first_failing_rank_ends_all(how: str, kind: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=text):
        launch.launch(_misbehave, (how, str(tmp_path)), ranks=2, timeout_s=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert _alive(tmp_path) == []


def _echoes(folder: str) -> None:
    lost = Path(folder, "lost")
    if dist.get_rank() == 0:
        lost.touch()
        raise RuntimeError("a stage stopped") from ConnectionError("Connection closed by peer [127.0.0.1]:1234")
    while not lost.exists():
        time.sleep(0.01)
    time.sleep(LATER_S / 4)
    raise ValueError("boom")


def test_a_rank_that_only_echoes_is_not_the_one_that_is_told(tmp_path: Path) -> None:
    """It is the first to notice and to write it down; the cause comes later, while it waits for that."""
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: boom"):
        launch.launch(_echoes, (str(tmp_path),), ranks=2, timeout_s=60)


def test_an_echo_is_what_a_lost_peer_makes_others_say() -> None:
    echo = RuntimeError("a stage stopped")
    echo.__cause__ = ConnectionError("Connection reset by peer")
    assert is_echo(echo)
    assert not is_echo(RuntimeError("a stage stopped"))


def _builds_slowly() -> str:
    launch.beat.phase(watching.BUILDING)
    time.sleep(2.5)
    launch.beat.phase(watching.CAPTURING)
    return "built"


def test_a_rank_that_gets_ready_slowly_is_not_hung() -> None:
    assert launch.launch(_builds_slowly, (), ranks=1, timeout_s=1) == ["built"]


_BARE = """
import sys
from autopipe.runtime.ranks.launch import launch
from tests.runtime.test_launch import _sum_of_ranks
class Own: pass
given = (1,) if sys.argv[1] == "plain" else (Own(),)
print(launch(_sum_of_ranks, given, ranks=1, timeout_s=60))
"""


@pytest.mark.parametrize("given", ["plain", "own"])
def test_a_script_needs_a_guard_only_for_what_it_defines(given: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_BARE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py"), given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if given == "plain":
        assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr
    else:
        assert done.stderr.splitlines()[-1].endswith(
            'hands over its own model does so under if __name__ == "__main__":'
        )


def _leaves_a_lock() -> None:
    multiprocessing.get_context("spawn").RLock()
    os.kill(os.getpid(), signal.SIGKILL)


_KILLED = """
from autopipe.runtime.ranks.launch import launch
from tests.runtime.test_launch import _leaves_a_lock
try:
    launch(_leaves_a_lock, (), ranks=1, timeout_s=60)
except Exception as error:
    raise SystemExit(str(error))
"""


def test_a_killed_rank_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("rank 0 was killed by SIGKILL while starting")
    assert done.stderr.count("\n") == 1


_SCRIPT = """
import sys
from autopipe.runtime.ranks.launch import launch
from tests.runtime.test_launch import _misbehave
if __name__ == "__main__":
    try:
        launch(_misbehave, ("sleep", sys.argv[1]), ranks=2, timeout_s=100)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_or_killed_parent_leaves_no_rank(number: int, code: int, tmp_path: Path) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(_SCRIPT)
    pids.mkdir()
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script), str(pids)], env=os.environ | {"PYTHONPATH": root}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(15) == code
        deadline = time.monotonic() + 10
        while _alive(pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _alive(pids) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def _tells() -> str:
    print(os.environ["TOLD"], file=sys.stderr)
    return os.environ["TOLD"]


@pytest.mark.parametrize("told", ["first", "second"])
def test_ranks_have_the_environment_and_the_stderr_of_now(told: str, monkeypatch, capfd) -> None:
    """Though they are forked from a process that was started for the first launch."""
    monkeypatch.setenv("TOLD", told)
    assert launch.launch(_tells, (), ranks=1, timeout_s=60) == [told]
    assert told in capfd.readouterr().err.splitlines()


def _beat_and_sleep(folder: Path) -> None:
    watching.Beat(folder, 0, 2)("computing")
    time.sleep(1000)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_is_left_is_killed_however_it_was_started(method: str, tmp_path: Path) -> None:
    """A rank is a child, or forked from one; our own parent, whose number a row may have by now, is let alone."""
    watching.start(tmp_path, 2)
    rank = multiprocessing.get_context(method).Process(target=_beat_and_sleep, args=(tmp_path,))
    try:
        rank.start()
        deadline = time.monotonic() + 60
        while not watching.rows_of(tmp_path, 2)[0].pid and time.monotonic() < deadline:
            time.sleep(0.05)
        with mock.patch("os.getpid", return_value=os.getppid()):
            watching.Beat(tmp_path, 1, 2)("our parent: not ours")
        watching.kill_all(tmp_path, 2)
        rank.join(10)
        assert rank.exitcode == -signal.SIGKILL
    finally:
        rank.kill()
