"""A plan whose stages have unequal numbers of replicas, in the place of the one whose stages have equal ones."""

from __future__ import annotations

from dataclasses import replace

from autopipe.core.errors import UsageError
from autopipe.core.plan import PLANNED_ONLY, Plan, Prediction, Rejected, ScheduleTable
from autopipe.core.units import format_percent
from autopipe.graph import Graph, costs_of
from autopipe.jitter import jitter_s
from autopipe.planning.pieces import stage, ties
from autopipe.planning.space import Space
from autopipe.planning.unequal import MOST_DEVICES, Shared, best_unequal, least_unequal_s


def with_unequal(plan: Plan, space: Space) -> Plan:
    """The plan, or a faster one whose stages have unequal numbers of replicas; its bound holds for these too.

    Raises UsageError where devices differ or are too many.
    """
    count = len(space.setting.limits)
    if not space.setting.equal or count > MOST_DEVICES:
        what = f"there are {count}" if space.setting.equal else "their speed or memory differs"
        raise UsageError(f"unequal replicas need up to {MOST_DEVICES} devices that are alike; {what}: plan without")
    found = best_unequal(space)
    bound_s = min(plan.lower_bound_s, least_unequal_s(space))
    timed_s = plan.predicted.step_s - plan.predicted.jitter_s
    if found is None or found.timeline.step_s >= timed_s:
        return replace(plan, lower_bound_s=bound_s, gap=timed_s / bound_s - 1)
    return _in_place_of(plan, found, bound_s)


def _in_place_of(plan: Plan, found: Shared, bound_s: float) -> Plan:
    predicted = _prediction(found)
    equal = Rejected("equal replicas", "", plan.predicted.step_s, plan.predicted.idle, max(plan.predicted.peak_bytes))
    profile, line = found.space.setting.profile, found.timeline
    work = [line.work_s(rank) for rank in range(line.ranks)]
    return replace(
        plan,
        micro_batch=found.micro_batch,
        micro_batches=found.schedule.micro_batches,
        depth=len(found.bounds),
        replicas=1,
        stages_per_rank=1,
        schedule=ScheduleTable.of(found.schedule),
        stages=tuple(
            replace(stage(profile, index, index, bounds, found.costs[index], found.recompute[index]), replicas=count)
            for index, (bounds, count) in enumerate(zip(found.bounds, found.replicas, strict=True))
        ),
        hops=found.hops,
        ties=ties(profile, found.bounds),
        memory_limit_bytes=found.limits,
        predicted=predicted,
        lower_bound_s=bound_s,
        gap=line.step_s / bound_s - 1,
        limited_by=f"stage {work.index(max(work))}",
        rejected=tuple(_against(row, predicted.step_s) for row in (equal, *plan.rejected)),
        notes=(*profile.notes, PLANNED_ONLY),
        devices=(),
    )


def _prediction(found: Shared) -> Prediction:
    line, profile = found.timeline, found.space.setting.profile
    more_s = 0.0
    if profile.jitter is not None:
        costs = costs_of(found.costs, found.hops, profile.overhead_s)
        more_s = jitter_s(profile.jitter, Graph.of(found.schedule), costs, line, max(found.replicas))
    step_s = line.step_s + more_s
    return Prediction(step_s, found.space.global_batch / step_s, line.idle, line.peak_bytes, more_s)


def _against(row: Rejected, step_s: float) -> Rejected:
    """The row with its step against this one, where it has room."""
    if row.step_s is None or row.reason.startswith("over "):
        return row
    return replace(row, reason=format_percent(row.step_s / step_s - 1, sign=True))
