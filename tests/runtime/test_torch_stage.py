"""Receive buffers are there only while they are needed, as many as core/in_flight.py counts; gradients stay right."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import autopipe.synthesis  # noqa: F401  (registers all schedules)
from autopipe.core.in_flight import Kept, kept
from autopipe.core.schedule import Schedule, kind
from autopipe.runtime.capture import capture
from autopipe.runtime.checking.parity import compare, without_dropout
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.tables.torch_stage import Stage
from autopipe.runtime.workload import ModelFile, rows
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import EXAMPLES
from tests.synthetic import random_schedule

MICRO_BATCH, LAYERS = 2, 8


class Watched:
    """The most tensors of each side of a stage while its actions run."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.before, self.behind = stage, 0, 0
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._counting(getattr(stage, name)))

    def _counting(self, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.count()
            return result

        return run

    def count(self) -> None:
        stage = self.stage
        here, index = stage.stage_index_to_group_rank, stage.stage_index
        if index and here[index - 1] != here[index]:
            received = sum(real(infos) for infos in stage.args_recv_info.values())
            self.before = max(self.before, received)
        if not stage.is_last:
            gradients = sum(real(infos) for infos in stage.grad_recv_info.values())
            self.behind = max(self.behind, len(stage.fwd_cache) + gradients)


def real(infos: Any) -> int:
    return sum(info.buffer is not None and not info.buffer.is_meta for info in infos)


def watched_steps(table: Schedule) -> tuple[float, list[tuple[int, int, int]], int, int]:
    """On each rank: the largest difference from one process, what each stage kept, what was left, and in evaluation."""
    workload = ModelFile(str(EXAMPLES / "mlp.py")).open()
    reference = without_dropout(workload.model)
    batch = workload.batch(MICRO_BATCH * table.micro_batches)
    captured = capture(workload.model, rows(batch[0], 0, MICRO_BATCH))
    assert len(captured.layers) == LAYERS
    cuts = [round(LAYERS * k / table.stages) for k in range(1, table.stages)]

    def runner(training: bool) -> Runner:
        return Runner(
            captured,
            table,
            cuts,
            micro_batch=MICRO_BATCH,
            loss_fn=workload.loss,
            device=torch.device("cpu"),
            training=training,
        )

    trains = runner(True)
    runtime = trains._runtime(MICRO_BATCH, table.micro_batches, loss=True)
    seen = [Watched(stage) for stage in runtime.stages]  # type: ignore[union-attr]
    parity = compare(trains, copy.deepcopy(reference), workload, batch)
    left = _left(runtime)
    evaluates = runner(False)
    with torch.no_grad():
        evaluates.backward(evaluates.split(*batch))
    after = _left(evaluates._runtime(MICRO_BATCH, table.micro_batches, loss=True))
    return parity.max_gradient_difference, [(w.stage.stage_index, w.before, w.behind) for w in seen], left, after


def _left(runtime: Any) -> int:
    """Buffers that are still there, and what is still thought to be on its way."""
    infos = [i for s in runtime.stages for found in (s.args_recv_info, s.grad_recv_info) for i in found.values()]
    return sum(map(real, infos)) + sum(map(len, runtime._sent._kept.values()))


def _check(ranks: Ranks, table: Schedule) -> None:
    expected = kept(table)
    for difference, stages, left, after in ranks.run(watched_steps, table, ranks=table.ranks):
        assert difference <= 1e-5
        assert left == after == 0
        for stage, before, behind in stages:
            counted = expected[stage]
            assert before <= counted.before
            assert behind <= counted.behind
            assert before > 0 or counted.before == 0


@pytest.mark.parametrize(("name", "number"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZB-V", 2)])
def test_buffers_come_and_go(ranks: Ranks, name: str, number: int) -> None:
    _check(ranks, kind(name).schedule(2, 6, stages_per_rank=number))


def test_few_buffers_of_many_micro_batches(ranks: Ranks) -> None:
    """Torch's own stage would have 24 of each; the last stage has two activations, the first one gradient."""
    table = kind("1F1B").schedule(2, 24)
    assert kept(table) == (Kept(0, 3), Kept(4, 0))
    found = {s: (before, behind) for part in ranks.run(watched_steps, table, ranks=2) for s, before, behind in part[1]}
    assert found[1][0] <= 2
    assert found[0][1] <= 3


@pytest.mark.parametrize("seed", range(3))
def test_any_table(ranks: Ranks, seed: int) -> None:
    rng = random.Random(seed)
    _check(ranks, random_schedule(rng, ranks=2, stages=rng.randint(2, 5), micro_batches=rng.randint(2, 5)))
