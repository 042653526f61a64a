"""Plans run on real ranks: parity with one process, and a measured timeline that is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.core.files import read, write
from autopipe.core.plan import Plan
from autopipe.core.result import CheckResult
from autopipe.runtime.checking.plans import check_rank, combine
from autopipe.runtime.workload import ModelFile
from tests.runtime.planned import plan_of
from tests.runtime.ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def plan_for(name: str, depth: int, schedule: str, micro_batch: int = 2, micro_batches: int = 4) -> Plan:
    """A plan for an example, from made-up costs."""
    return plan_of(EXAMPLES / name, depth, schedule, micro_batch, micro_batches)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("name", ["gpt2.py", "llama.py", "mlp.py"])
def test_a_plan_trains_as_one_process(ranks: Ranks, tmp_path: Path, name: str, schedule: str, depth: int) -> None:
    if depth == 1 and schedule == "GPipe":
        pytest.skip("one rank has one order: its own forwards and backwards")
    plan = plan_for(name, depth, schedule)
    assert plan.depth == depth
    assert plan.schedule.name == schedule or depth == 1
    parts = ranks.run(check_rank, plan, ModelFile(str(EXAMPLES / name)), "cpu", ranks=depth)
    result = combine(plan, parts, "cpu")
    assert result.parity.passed
    assert result.parity.max_gradient_difference <= 1e-5
    assert result.parity.max_loss_difference <= 1e-5
    assert len(result.parity.losses) == len(result.parity.reference_losses) == 2
    _check_timeline(plan, result)
    write(result, tmp_path / "check.json")
    assert read(tmp_path / "check.json", CheckResult) == result


def test_a_pipeline_may_pass_the_ranks_in_another_order(ranks: Ranks) -> None:
    """As it is planned where that suits the devices: stage 0 on rank 1, and stage 1 on rank 0."""
    plan = plan_for("gpt2.py", 2, "1F1B")
    table = replace(plan.schedule, placement=(1, 0), order=plan.schedule.order[::-1])
    stages = tuple(replace(stage, rank=1 - stage.rank) for stage in plan.stages)
    moved = replace(plan, schedule=table, stages=stages)
    parts = ranks.run(check_rank, moved, ModelFile(str(EXAMPLES / "gpt2.py")), "cpu", ranks=2)
    result = combine(moved, parts, "cpu")
    assert result.parity.passed
    assert {span.rank for span in result.timeline.spans if span.action.stage == 0} == {1}
    _check_timeline(moved, result)


def _check_timeline(plan: Plan, result: CheckResult) -> None:
    """Every action of the table ran once, in its rank's order; then the optimizer."""
    for rank, row in enumerate(plan.schedule.order):
        ran = [str(span.action) for span in result.timeline.spans if span.rank == rank]
        assert tuple(ran[:-1]) == row
        assert "O" in ran[-1]
    assert min(span.start_s for span in result.timeline.spans) == 0.0
    assert result.measured.step_s > 0
    assert all(peak > sum(s.costs.parameter_bytes for s in plan.stages if s.rank == rank)
               for rank, peak in enumerate(result.measured.peak_bytes))  # fmt: skip
