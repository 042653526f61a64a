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
    again = tuple(
        _needed(case, stage, *bounds[stage], layers) for stage, layers in enumerate(case.recomputed(positions))
    )
    costs = tuple(_cost(case, stage, *bounds[stage], layers) for stage, layers in enumerate(again))
    hops = case.setting.hops(case.depth)
    timeline = simulate(case.schedule, costs, hops, overhead_s=case.setting.profile.overhead_s)
    return Outcome(case, bounds, again, costs, timeline)


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


def _needed(case: Case, stage: int, start: int, stop: int, layers: Sequence[int]) -> tuple[int, ...]:
    """Those of the layers that must recompute: the dearest ones are dropped while the stage still fits."""
    if case.recompute != "auto":
        return tuple(layers)
    kept = list(layers)
    for layer in sorted(layers, key=lambda i: (-case.ranges.layers.forward[i], i)):
        fewer = [i for i in kept if i != layer]
        if _peak(case, stage, _cost(case, stage, start, stop, fewer)) <= case.setting.limits[stage]:
            kept = fewer
    return tuple(kept)


def _peak(case: Case, stage: int, cost: StageCost) -> int:
    highest = max(load.bytes([cost]) for load in peak_loads(case.schedule, case.schedule.placement[stage]))
    return cost.static_bytes + cost.buffers_bytes(case.schedule.micro_batches) + highest
