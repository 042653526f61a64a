"""Every schedule, and any valid table, on real ranks: losses and gradients are those of one process."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import autopipe.synthesis  # noqa: F401  (registers them)
from autopipe.core.schedule import kinds
from autopipe.core.validation import validate
from autopipe.runtime.capture import capture
from autopipe.runtime.checking.parity import compare, relative, without_dropout
from autopipe.runtime.checking.plans import check_rank, combine
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.workload import ModelFile, rows
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import EXAMPLES, plan_for
from tests.synthetic import random_schedule

TOLERANCE = 1e-5
FAST = {("ZB-V", "mlp.py", 2), ("Interleaved1F1B", "mlp.py", 2), ("ZB-H1", "mlp.py", 2)}
MICRO_BATCH = 2


def _cases() -> list[object]:
    every = [(k.name, model, depth) for k in kinds("torch") for model in ("gpt2.py", "mlp.py") for depth in (2, 4)]
    marks = {case: () if case in FAST else (pytest.mark.slow,) for case in every}
    return [pytest.param(*case, marks=marks[case], id="-".join(map(str, case))) for case in every]


@pytest.mark.parametrize(("schedule", "model", "depth"), _cases())
def test_a_schedule_trains_as_one_process(ranks: Ranks, schedule: str, model: str, depth: int) -> None:
    """Stages are uneven: the head costs twice what another layer does, and layers do not divide into equal stages."""
    plan = plan_for(model, depth, schedule, micro_batches=2 * depth)
    assert plan.schedule.name == schedule
    result = combine(plan, ranks.run(check_rank, plan, ModelFile(str(EXAMPLES / model)), "cpu", ranks=depth), "cpu")
    assert result.parity.passed
    assert result.parity.max_gradient_difference <= TOLERANCE
    assert result.parity.max_loss_difference <= TOLERANCE
    for rank, row in enumerate(plan.schedule.order):
        ran = [str(span.action) for span in result.timeline.spans if span.rank == rank]
        assert tuple(action for action in ran if "O" not in action) == row


def run_tables(seeds: range, depth: int) -> list[tuple[int, float, float]]:
    """On each rank: the seeds of random tables with the differences in losses and gradients from one process."""
    workload = ModelFile(str(EXAMPLES / "mlp.py")).open()
    reference = without_dropout(workload.model)
    found = []
    for seed in seeds:
        rng = random.Random(seed)
        batches = rng.randint(1, 5)
        layers = 8
        stages = rng.randint(depth, min(layers, 2 * depth + 1))
        table = random_schedule(rng, ranks=depth, stages=stages, micro_batches=batches)
        validate(table)
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        batch = workload.batch(MICRO_BATCH * batches)
        captured = capture(copy.deepcopy(reference), rows(batch[0], 0, MICRO_BATCH))
        assert len(captured.layers) == layers
        runner = Runner(
            captured, table, cuts, micro_batch=MICRO_BATCH, loss_fn=workload.loss, device=torch.device("cpu")
        )
        parity = compare(runner, copy.deepcopy(reference), workload, batch)
        of_losses = relative(parity.losses, parity.reference_losses) if parity.losses else 0.0
        found.append((seed, of_losses, parity.max_gradient_difference))
    return found


def _check_tables(ranks: Ranks, seeds: range, depth: int) -> None:
    for part in ranks.run(run_tables, seeds, depth, ranks=depth):
        wrong = [row for row in part if not all(off <= TOLERANCE for off in row[1:])]
        assert not wrong
        assert [seed for seed, _, _ in part] == list(seeds)


@pytest.mark.parametrize("depth", [2, 4])
def test_random_tables_train_as_one_process(ranks: Ranks, depth: int) -> None:
    """Free placement, uneven numbers of stages on ranks, each backward whole or split."""
    _check_tables(ranks, range(3), depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("first", range(1000, 1100, 10))
def test_two_hundred_random_tables_train_as_one_process(ranks: Ranks, first: int, depth: int) -> None:
    _check_tables(ranks, range(first, first + 10), depth)
