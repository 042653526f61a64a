"""Plans of two-way and asynchronous schedules, checked on real ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from autopipe.core.errors import UsageError
from autopipe.core.files import from_json, to_json
from autopipe.core.plan import Plan, ScheduleTable
from autopipe.core.result import CheckResult
from autopipe.core.schedule import kind
from autopipe.report.terminal import check_text
from autopipe.runtime.checking.plans import check_rank, combine
from autopipe.runtime.workload import ModelFile
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import plan_for

SMALL = str(Path(__file__).with_name("small_mlp.py"))


@pytest.mark.parametrize(
    ("schedule", "staleness"),
    [("Chimera", ()), ("PipeDream", (1.0, 0.0)), ("PipeDream-2BW", (1.0, 1.0)), ("PipeMare", (1.0, 0.0))],
)
def test_a_plan_trains_as_its_reference(ranks: Ranks, schedule: str, staleness: tuple[float, ...]) -> None:
    count = 1 if schedule in ("PipeDream", "PipeMare") else 4
    plan = plan_for(SMALL, 2, schedule, micro_batches=count)
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, step_s=2.0))  # few steps are timed
    parts = ranks.run(check_rank, plan, ModelFile(SMALL), "cpu", ranks=2)
    result = combine(plan, parts, "cpu")
    assert result.parity.passed
    assert result.staleness == staleness
    assert result.measured.step_s > 0
    assert len(result.timeline.spans) > 0
    assert from_json(to_json(result), CheckResult) == result
    weights = sum(stage.costs.parameter_bytes for stage in plan.stages if stage.rank == 0)
    assert result.measured.peak_bytes[0] > 3 * weights
    assert ("stage 0 staleness" in check_text(result, plan=plan)) == bool(staleness)
    assert min(span.start_s for span in result.timeline.spans) >= 0.0


def test_a_synchronous_plan_has_no_run_without_a_flush(ranks: Ranks) -> None:
    for said in ranks.run(refused, plan_for(SMALL, 2, "1F1B"), ranks=2):
        assert "1F1B flushes after every update" in said


def refused(plan: Plan, rows: int = 8) -> str:
    """On each rank: what training says to a batch of so many rows; caught here, as a failed rank ends the pool."""
    workload = ModelFile(SMALL).open()
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=workload.batch(2)[0])
    with pytest.raises(UsageError) as error:
        pipeline.train([workload.batch(rows)], torch.optim.SGD(pipeline.parameters(), lr=0.1))
    return str(error.value)


def test_an_update_takes_whole_batches(ranks: Ranks) -> None:
    for said in ranks.run(refused, plan_for(SMALL, 2, "PipeDream-2BW"), 6, ranks=2):
        assert said == "the batch has 6 rows, PipeDream-2BW takes whole batches of 8"


def test_replicas_do_not_go_without_a_flush(ranks: Ranks) -> None:
    plan = plan_for(SMALL, 1, "1F1B", micro_batches=1)
    alone = ScheduleTable.of(kind("PipeDream").schedule(1, 1))
    doubled = dataclasses.replace(plan, schedule=alone, replicas=2, global_batch=4)
    for said in ranks.run(refused, doubled, 4, ranks=2):
        assert "PipeDream runs on 1 replica, not 2" in said
