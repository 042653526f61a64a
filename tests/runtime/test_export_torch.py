"""The exported script under torchrun: its own --check against one process, for GPT-2 and Llama, on many tables."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopipe.synthesis  # noqa: F401  (registers its schedule)
from autopipe import export
from autopipe.core.plan import ModelRef, Plan
from autopipe.core.profile import CostTable, LayerCost, Profile
from autopipe.core.reduction import Reduction
from autopipe.core.schedule import Schedule, StageTimes, kind
from autopipe.export.shares import share_functions
from autopipe.runtime.capture import capture
from autopipe.runtime.checking.reduction import find_reduction
from autopipe.runtime.measuring.profiling import facts_of
from autopipe.runtime.running.shares import pieces, shares
from autopipe.runtime.workload import ModelFile
from tests.exports import interleaved, one_f_one_b, plan_of
from tests.synthetic import random_schedule

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = {"gpt2": 2, "llama": 1}
"""The number of the first block among the layers."""


def profile_of(name: str) -> Profile:
    """What capture finds in an example, with made-up costs."""
    workload = ModelFile(str(EXAMPLES / f"{name}.py")).open()
    captured = capture(workload.model, workload.batch(2)[0])
    facts = facts_of(workload, captured, "cpu", 1, 2, "adamw")
    table = CostTable(2, tuple(LayerCost(1e-3, 2e-3, 1e-3, 1e-3, 1000, 1000, 100) for _ in facts.layers))
    return Profile(**{**vars(facts), "costs": (table,)})


WEIGHED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Net().double()


def example_batch(size):
    target = torch.randint(5, (size, 6))
    for row in range(size):
        target[row, : row % 6] = -100
    target[4:6] = -100  # nothing counts in the third micro-batch
    return (torch.randn(size, 6, 8, dtype=torch.float64),), target


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="REDUCTION")
"""
"""A model in float64 whose loss is not a mean over rows."""


def weighed(folder: Path, reduction: str, replicas: int = 1) -> Plan:
    """Its plan on two ranks, with the reduction that is found for its loss."""
    file = folder / "model.py"
    file.write_text(WEIGHED.replace("REDUCTION", reduction))
    workload = ModelFile(str(file)).open()
    captured = capture(workload.model, workload.batch(2)[0])
    facts = facts_of(workload, captured, "cpu", 1, 2, "adamw")
    table = CostTable(2, tuple(LayerCost(1e-3, 2e-3, 1e-3, 1e-3, 1000, 1000, 100) for _ in facts.layers))
    profile = Profile(**{**vars(facts), "costs": (table,)})
    model = ModelRef("model.py", "model.py", digest=ModelFile(str(file)).digest)
    found, _ = find_reduction(ModelFile(str(file)).open(), captured.dtype)
    plan = plan_of(profile, (2,), one_f_one_b(2, 4), model=model)
    return replace(plan, reduction=found, replicas=replicas, global_batch=replicas * plan.global_batch)


def zero_bubble_v() -> Schedule:
    """ZB-V on two ranks with four micro-batches."""
    return kind("ZB-V").schedule(2, 4, stages_per_rank=2)


def drawn() -> Schedule:
    """A table of no name: free order and placement, some backwards split."""
    return random_schedule(random.Random(1), ranks=2, stages=4, micro_batches=4)


UNEVEN = [StageTimes(1.0, 2.0, 1.1, 0.9), StageTimes(2.0, 4.0, 2.1, 1.9)] * 2
CASES = {
    "1F1B": ((4,), lambda: one_f_one_b(2, 4)),
    "interleaved": ((1, 3, 5), lambda: interleaved(2, 2, 4)),
    "ZBV": ((1, 2, 5), zero_bubble_v),
    "Synthesized": ((1, 3, 7), lambda: kind("Synthesized").schedule(2, 4, stages_per_rank=2, times=UNEVEN)),
    "CSV": ((2, 3, 6), drawn),
    "recompute": ((2,), lambda: one_f_one_b(2, 4)),
}


def plan_for(name: str, case: str) -> Plan:
    """The plan of a case; its cuts count from the first block."""
    cuts, schedule = CASES[case]
    profile, first = profile_of(name), BLOCKS[name]
    again = [profile.layers[first + n].name for n in (0, 3)] if case == "recompute" else ()
    path = EXAMPLES / f"{name}.py"
    model = ModelRef(path.name, os.fspath(path), digest=ModelFile(str(path)).digest)
    return plan_of(profile, [first + cut for cut in cuts], schedule(), recompute=again, model=model)


def write(plan: Plan, folder: Path) -> Path:
    """The exported files; the script's path."""
    for file, text in export.trainer("torch").files(plan, ("a heading",)).items():
        (folder / file).write_text(text)
    return folder / "train_pipeline.py"


def torchrun(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    script = str(folder / "train_pipeline.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *where, script]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False)


IN_EVERY_RUN = [("gpt2", "Synthesized"), ("llama", "CSV")]
"""Ties on one rank, a split backward, and a cut where a view crosses; a free order and placement. The rest is slow."""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in IN_EVERY_RUN else pytest.mark.slow)
        for name in ("gpt2", "llama")
        for case in CASES
    ],
)
def test_the_script_trains_as_one_process(tmp_path: Path, name: str, case: str) -> None:
    write(plan_for(name, case), tmp_path)
    done = torchrun(tmp_path, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    gradients, loss = map(float, re.findall(r"(?:gradients|loss) (\S+?),? ", done.stdout))
    assert gradients <= 1e-6
    assert loss <= 1e-6
    assert "state_dict names are the model's" in done.stdout


def replicated(plan: Plan) -> Plan:
    """Two pipelines that share the batch."""
    return replace(plan, replicas=2, global_batch=2 * plan.global_batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_replicas_train_as_one_process(tmp_path: Path, name: str) -> None:
    write(replicated(plan_for(name, "1F1B")), tmp_path)
    done = torchrun(tmp_path, "--check", ranks=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout


@pytest.mark.slow
def test_a_lost_tie_fails_the_check(tmp_path: Path) -> None:
    script = write(plan_for("gpt2", "1F1B"), tmp_path)
    text = script.read_text()
    assert text.count("dist.all_reduce(parameter.grad, group=group)") == 1
    script.write_text(text.replace("dist.all_reduce(parameter.grad, group=group)", "pass"))
    done = torchrun(tmp_path, "--check")
    assert done.returncode == 1
    assert "check FAILED" in done.stdout


@pytest.mark.slow
def test_the_script_trains(tmp_path: Path) -> None:
    write(plan_for("llama", "interleaved"), tmp_path)
    done = torchrun(tmp_path, "--steps", "4")
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_wrong_usage_is_one_line(tmp_path: Path) -> None:
    script = write(plan_for("gpt2", "1F1B"), tmp_path)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("start 2 processes: torchrun --nproc-per-node 2")


@pytest.mark.slow
def test_a_model_file_that_changed_is_refused(tmp_path: Path) -> None:
    plan = plan_for("llama", "1F1B")
    write(replace(plan, model=replace(plan.model, digest="0" * 64)), tmp_path)
    done = torchrun(tmp_path, "--check")
    assert done.returncode == 1
    assert "has changed since it was planned" in done.stderr


@pytest.mark.parametrize(
    ("reduction", "kind_of_loss", "replicas"),
    [
        ("mean", "count", 1),
        pytest.param("sum", "sum", 1, marks=pytest.mark.slow),
        pytest.param("mean", "count", 2, marks=pytest.mark.slow),
    ],
)
def test_a_loss_adds_up_as_in_one_process(tmp_path: Path, reduction: str, kind_of_loss: str, replicas: int) -> None:
    """In float64, to its tolerance; in the counted case a micro-batch has nothing that counts."""
    plan = weighed(tmp_path, reduction, replicas)
    assert plan.reduction.kind == kind_of_loss
    write(plan, tmp_path)
    done = torchrun(tmp_path, "--check", ranks=2 * replicas)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(at most 1e-09)" in done.stdout


@pytest.mark.parametrize(
    ("reduction", "batch"),
    [
        (Reduction("mean"), ({"x": torch.zeros(8, 3)}, None)),
        (Reduction("sum"), ({"x": torch.zeros(8, 3)}, None)),
        (Reduction("count", "target", -100), ((torch.zeros(8, 3),), torch.arange(8)[:, None] * torch.ones(1, 3) - 100)),
        (Reduction("count", "inputs.labels", 0, 1), ({"labels": torch.arange(24).reshape(8, 3) % 5}, None)),
        (Reduction("count", "inputs.1.mask"), ((0, {"mask": torch.arange(24).reshape(8, 3) % 7 > 2}), None)),
    ],
    ids=str,
)
def test_the_script_s_shares_are_those_of_our_runtime(reduction: Reduction, batch: tuple[Any, Any]) -> None:
    names: dict[str, Any] = {"torch": torch, "MICRO_BATCH": 2, "MICRO_BATCHES": 2, "REPLICAS": 2}
    exec(share_functions(reduction), names)
    assert names["shares"](*batch).tolist() == pytest.approx(shares(reduction, *batch, pieces(8, 2)), rel=1e-12)
