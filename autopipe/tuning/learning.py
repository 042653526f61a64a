"""What trials teach: the profile's times corrected by those that were measured, and how much better that predicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopipe.core.plan import Plan
from autopipe.core.profile import CostTable, LayerCost, Profile
from autopipe.core.result import MeasuredStage
from autopipe.core.stage import StageCost, stage_cost
from autopipe.simulate import simulate

_FURTHEST = 5.0
"""A stage that is measured further off than so many times is taken to be so many times off."""


@dataclass(frozen=True)
class Seen:
    """A plan that was run, and what its stages took, the runtime's overhead in it."""

    plan: Plan
    stages: tuple[MeasuredStage, ...]


def learned(profile: Profile, seen: Sequence[Seen]) -> Profile:
    """The profile with every layer's times multiplied by how far the stages that held it were off, by their median.

    A micro-batch size learns from its own trials, one that was never tried from all. The backward's halves go with it.
    """
    if not seen:
        return profile
    tables = []
    for table in profile.costs:
        own = [each for each in seen if each.plan.micro_batch == table.micro_batch] or seen
        ratios = [_layer_ratio(number, own) for number in range(len(profile.layers))]
        tables.append(CostTable(table.micro_batch, tuple(map(_scaled, table.layers, ratios))))
    return replace(profile, costs=tuple(tables))


def _layer_ratio(layer: int, seen: Iterable[Seen]) -> tuple[float, float]:
    """How far forward and backward were off."""
    pairs = [
        _stage_ratio(each, stage.index)
        for each in seen
        for stage in each.plan.stages
        if stage.start <= layer < stage.stop
    ]
    forward, backward = zip(*pairs, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _stage_ratio(each: Seen, index: int) -> tuple[float, float]:
    costs, found, overhead_s = each.plan.stages[index].costs, each.stages[index], each.plan.overhead_s
    return (
        _ratio(found.forward_s - overhead_s, costs.forward_s),
        _ratio(found.backward_s - overhead_s, costs.backward_s),
    )


def _ratio(found_s: float, expected_s: float) -> float:
    return min(_FURTHEST, max(1 / _FURTHEST, found_s / expected_s)) if expected_s > 0 else 1.0


def _scaled(cost: LayerCost, ratio: tuple[float, float]) -> LayerCost:
    forward, backward = ratio
    return replace(
        cost,
        forward_s=cost.forward_s * forward,
        backward_s=cost.backward_s * backward,
        input_grad_s=cost.input_grad_s * backward,
        weight_grad_s=cost.weight_grad_s * backward,
    )


def predicted_s(plan: Plan, before: Profile, after: Profile) -> float:
    """The step of a plan that was made from one profile, by another one of the same model: stages as the layers go."""
    stages = [
        _corrected(stage.costs, *(stage_cost(p, stage.start, stage.stop, plan.micro_batch) for p in (before, after)))
        for stage in plan.stages
    ]
    timeline = simulate(plan.schedule.parsed(), stages, plan.hops, overhead_s=plan.overhead_s)
    return timeline.step_s + plan.predicted.jitter_s


def _corrected(costs: StageCost, before: StageCost, after: StageCost) -> StageCost:
    names = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s")
    return replace(
        costs, **{name: getattr(costs, name) * _grown(getattr(before, name), getattr(after, name)) for name in names}
    )


def _grown(before_s: float, after_s: float) -> float:
    return after_s / before_s if before_s > 0 else 1.0
