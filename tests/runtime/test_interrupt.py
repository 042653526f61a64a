"""Ctrl-C: all processes end, nothing half-written stays, one word is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_bad_input import GOOD, left_over

SLOW = GOOD.replace("return nn.functional", "__import__('time').sleep(0.05)\n    return nn.functional")


@pytest.mark.parametrize(
    ("whole_group", "times"),
    [
        pytest.param(True, 2, id="terminal, twice"),
        pytest.param(True, 1, id="terminal", marks=pytest.mark.slow),
        pytest.param(False, 1, id="kill", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_layers_are_timed(tmp_path, whole_group, times):
    (tmp_path / "model.py").write_text(SLOW)
    errors = tmp_path / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "autopipe", "profile", "model.py", "--devices", "2", "--budget", "300"],
            cwd=tmp_path,
            env={**os.environ, "AUTOPIPE_TEST_MARK": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "warm-up" in errors.read_text(), process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT) if whole_group else process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    said = errors.read_text()
    assert "autopipe: interrupted" in said.splitlines()
    assert "Traceback" not in said
    assert "Warning" not in said
    wait_for(lambda: not left_over(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"model.py", "stderr"}


def wait_for(condition, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until it holds; at most some minutes, for the machine may be busy, and not after the process has ended."""
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, Path(process.args[0])
        time.sleep(0.1)
