"""Tuning for real: a model that lacks memory from micro-batch 4 on and hangs under GPipe is tuned all the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.tuning.log import HUNG, MEMORY, OK, read_trials
from tests.runtime.test_bad_input import left_over

ROOT = Path(__file__).parents[2]
BUDGET_S = 120
MODEL = """
import time
import traceback

import torch
from torch import nn

WIDTH = 1024  # a pipeline is about as fast as copies, whose gradients are large: none is hopeless
waiting = 0


def build_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def example_batch(batch_size):
    seed = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, WIDTH, generator=seed),), torch.randn(batch_size, WIDTH, generator=seed)


def _done(gradient):
    global waiting
    waiting -= 1
    return gradient


def loss_fn(output, target):
    global waiting
    if output.shape[0] >= 4:
        raise MemoryError("no room for four samples")
    if any("pipelining" in frame.filename for frame in traceback.extract_stack()):
        waiting += 1
        while waiting > 1:  # a second forward before the first backward: GPipe
            time.sleep(1)
        output.register_hook(_done)
    return ((output - target) ** 2).mean()
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def start(folder: Path, budget_s: int = BUDGET_S) -> subprocess.Popen[str]:
    command = ["tune", "model.py", "--devices", "2", "--global-batch", "16", "--budget", f"{budget_s}s"]
    return subprocess.Popen(
        [sys.executable, "-m", "autopipe", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "AUTOPIPE_TEST_MARK": str(folder)},
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("a"),
        text=True,
        start_new_session=True,
    )


def none_left(process: subprocess.Popen[str], folder: Path) -> bool:
    """Whether nothing runs any more: in the process group, or outside it with the mark of the test."""
    end = time.monotonic() + 10  # the interpreter's own helper ends a little after it
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return not left_over(folder)
        time.sleep(0.1)
    return False


def test_failures_are_trials_and_a_plan_comes_out_in_time(folder):
    begun = time.monotonic()
    process = start(folder)
    out, _ = process.communicate(timeout=BUDGET_S + 200)
    took_s = time.monotonic() - begun
    assert process.returncode == 0, (folder / "stderr").read_text()
    trials = read_trials(folder / "plan.tune" / "trials.csv")
    assert any(trial.status == MEMORY and "micro-batch 4" in trial.name for trial in trials)
    hung = next(trial for trial in trials if trial.status == HUNG)
    assert hung.name.startswith("GPipe, 2 stages")
    assert hung.reason.startswith("rank 1 hung in the loss: nothing moved")
    best = min((trial for trial in trials if trial.status == OK), key=lambda trial: trial.step_s)
    assert files.load(folder / "plan.json").stages == files.load(folder / "plan.tune" / best.plan).stages
    for said in ("out of memory  micro-batch 4: ", "hung  GPipe, 2 stages"):
        assert said in out
    assert re.search(r"^gain +(\d+\.\d\d times as fast as|the best is) no pipeline$", out, re.MULTILINE)
    assert took_s < BUDGET_S + 15
    assert none_left(process, folder)


def test_an_interrupted_tuning_goes_on_without_repeating_trials(folder):
    process = start(folder, 5 * BUDGET_S)
    path = folder / "plan.tune" / "trials.csv"
    deadline = time.monotonic() + 5 * BUDGET_S
    while sum(trial.status == OK for trial in read_trials(path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert none_left(process, folder)
    first = read_trials(path)
    assert (folder / "plan.json").exists()
    assert start(folder).wait(timeout=BUDGET_S + 200) == 0
    trials = read_trials(path)
    assert trials[: len(first)] == first
    assert len({trial.name for trial in trials}) == len(trials) > len(first)
