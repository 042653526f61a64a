"""One split of a case in full: its stages, what they recompute, and the simulated Timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopipe.core.stage import StageCost, stage_cost
from autopipe.core.timeline import Timeline
from autopipe.planning.cases import Case
from autopipe.simulate import peak_loads, simulate


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a split does. ``recompute`` lists layer numbers for each stage."""

    case: Case
    bounds: tuple[tuple[int, int], ...]
    recompute: tuple[tuple[int, ...], ...]
    costs: tuple[StageCost, ...]
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any rank."""
        return max(self.timeline.peak_bytes)

    def over_limit(self) -> int | None:
        """The rank that is furthest over its limit, None when all fit."""
        over = [peak - limit for peak, limit in zip(self.timeline.peak_bytes, self.case.setting.limits, strict=False)]
        return over.index(max(over)) if max(over) > 0 else None


def outcome(case: Case, positions: Sequence[int]) -> Outcome:
    """Simulate a split of a case; it need not fit."""
    ends = case.ranges.ends
    bounds = tuple((ends[a], ends[b]) for a, b in pairwise(positions))
    again = list(case.recomputed(positions))
    costs = [_cost(case, stage, *bounds[stage], layers) for stage, layers in enumerate(again)]
    if case.recompute == "auto":
        for stage in range(case.stages):
            _drop(case, stage, bounds[stage], again, costs)
    hops = case.setting.hops(case.schedule.placement)
    timeline = simulate(case.schedule, costs, hops, overhead_s=case.setting.profile.overhead_s)
    return Outcome(case, bounds, tuple(again), tuple(costs), timeline)


def _cost(case: Case, stage: int, start: int, stop: int, recompute: Sequence[int]) -> StageCost:
    """A stage's cost; its optimizer waits until the gradients of parameters tied to other stages are summed."""
    setting = case.setting
    device = list(setting.cluster.ranks())[case.schedule.placement[stage]]
    cost = stage_cost(
        setting.profile,
        start,
        stop,
        case.micro_batch,
        speed=device.speed,
        optimizer=setting.optimizer,
        recompute=recompute,
    )
    ties = [tie for tie in setting.profile.ties if 0 < sum(start <= n < stop for n in tie.layers) < len(tie.layers)]
    return replace(cost, optimizer_s=cost.optimizer_s + sum(setting.sum_s(tie, case.depth) for tie in ties))


def _drop(
    case: Case, stage: int, bounds: tuple[int, int], again: list[tuple[int, ...]], costs: list[StageCost]
) -> None:
    """Let those of a stage's layers that need not recompute keep theirs: the dearest ones while the rank still fits."""
    limit = case.setting.limits[case.schedule.placement[stage]]
    for layer in sorted(again[stage], key=lambda i: (-case.ranges.layers.forward[i], i)):
        fewer = tuple(i for i in again[stage] if i != layer)
        cost = _cost(case, stage, *bounds, fewer)
        if _peak(case, stage, [*costs[:stage], cost, *costs[stage + 1 :]]) <= limit:
            again[stage], costs[stage] = fewer, cost


def _peak(case: Case, stage: int, costs: Sequence[StageCost]) -> int:
    """The peak of the stage's rank."""
    rank = case.schedule.placement[stage]
    own = [cost for cost, where in zip(costs, case.schedule.placement, strict=True) if where == rank]
    highest = max(load.bytes(own) for load in peak_loads(case.schedule, rank))
    return sum(cost.lasting_bytes + cost.buffers_bytes(case.schedule.micro_batches) for cost in own) + highest
