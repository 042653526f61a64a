"""What a plan from analytic costs can be wrong about: the band of its step, and where another plan would be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.core.profile import LayerCost, Profile
from autopipe.core.stage import StageCost
from autopipe.core.units import format_duration, format_percent
from autopipe.graph import costs_of
from autopipe.planning.best import search
from autopipe.planning.outcome import Outcome
from autopipe.planning.space import Space

_WORTH = 0.01
"""A plan that is better by less is no other choice."""
_LAYER_SECONDS = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s", "optimizer_s")


def band_notes(space: Space, chosen: Outcome) -> Iterator[str]:
    """Lines for a plan whose profile has a band; none for a measured one.

    The links are what the cluster says; if all computing is faster or slower by the band, another split, depth,
    micro-batch size or schedule can be best.
    """
    band, step_s = chosen.case.setting.profile.band, chosen.totals.step_s
    if not band:
        return
    low, high = format_duration(step_s * (1 - band)), format_duration(step_s * (1 + band))
    yield f"the costs are analytic, not measured: expect {low} to {high} a step (± {format_percent(band)})"
    flips = [flip for factor in (1 - band, 1 + band) if (flip := _flip(space, chosen, factor))]
    yield from flips or ["the choice stays the same if the device computes that much faster or slower"]


def _flip(space: Space, chosen: Outcome, factor: float) -> str | None:
    """What would be better if everything computed took ``factor`` times as long; None if this plan stays best."""
    setting = chosen.case.setting
    best = search(space.under(replace(setting, profile=scaled(setting.profile, factor)))).best
    if best is None:
        return None
    costs = costs_of([_scaled_stage(cost, factor) for cost in chosen.costs], chosen.case.hops)
    ours_s = float(chosen.case.graph.steps(costs)[0])
    gain = 1 - best.found.step_s / ours_s
    if gain < _WORTH:
        return None
    case = best.case
    how = "faster" if factor < 1 else "slower"
    stages = f"{case.parts} stage{'s' if case.parts > 1 else ''}"
    what = f"{case.schedule.name}, {stages}, micro-batches of {case.micro_batch}"
    return (
        f"the choice flips inside the band: {format_percent(abs(1 - factor))} {how}, {what} would save "
        f"{format_percent(gain)} of the step"
    )


def scaled(profile: Profile, factor: float) -> Profile:
    """The profile with all computing ``factor`` times as long."""
    tables = [
        replace(table, layers=tuple(_scaled_layer(cost, factor) for cost in table.layers)) for table in profile.costs
    ]
    return replace(profile, costs=tuple(tables))


def _scaled_layer(cost: LayerCost, factor: float) -> LayerCost:
    return replace(cost, **{name: getattr(cost, name) * factor for name in _LAYER_SECONDS})


def _scaled_stage(cost: StageCost, factor: float) -> StageCost:
    return replace(cost, **{name: getattr(cost, name) * factor for name in _LAYER_SECONDS})
