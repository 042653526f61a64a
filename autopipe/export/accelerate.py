"""Accelerate's ``prepare_pippy``: the first module of every stage but the first, one stage a rank, inference only."""

from __future__ import annotations

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_pipeline, check_single_use
from autopipe.export.text import comment, quoted
from autopipe.export.trainer import Files, Heading, exporter


@exporter("accelerate", target="accelerate 1.15", split_only=True)
def accelerate(plan: Plan, heading: Heading) -> Files:
    """``split_points.py``: ``split_points`` and ``num_chunks``. Raises CannotExport unless stage s is on rank s."""
    check_pipeline(plan, "accelerate")
    check_single_use(plan, "accelerate")
    if plan.schedule.placement != tuple(range(plan.depth)):
        raise CannotExport(
            f"accelerate runs stage s on rank s; the plan has {len(plan.stages)} stages on {plan.depth} ranks: "
            f"plan with one stage a rank"
        )
    points = ", ".join(quoted(stage.layers[0]) for stage in plan.stages[1:])
    return {"split_points.py": f"{comment(heading)}split_points = [{points}]\nnum_chunks = {plan.micro_batches}\n"}
