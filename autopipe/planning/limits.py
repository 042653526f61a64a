"""What limits a plan, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.core.schedule import stages_on
from autopipe.core.units import many
from autopipe.graph import costs_of
from autopipe.planning.best import SAME, glance, search
from autopipe.planning.outcome import Outcome
from autopipe.planning.space import Space

_MATTERS = 0.01
"""Memory is named when the step without limits would be shorter by this part."""

_ENDLESS = 2**62


def limited_by(space: Space, chosen: Outcome) -> str:
    """Memory, where more of it would help; else the largest part of the step: work, waiting, or the optimizer."""
    memory = _memory(space, chosen)
    if memory is not None:
        return memory
    if chosen.case.devices == 1 and max(*space.depths, *space.replicas) > 1:
        return "no pipeline is faster"
    parts = _parts(chosen)
    return max(parts, key=lambda name: parts[name])


def _memory(space: Space, chosen: Outcome) -> str | None:
    """The fullest rank, when a plan without memory limits would be faster."""
    if not space.tight():
        return None
    setting, enough_s = space.setting, chosen.step_s * (1 - _MATTERS)
    endless = space.under(replace(setting, limits=tuple(_ENDLESS for _ in setting.limits)))
    free = glance(endless, below_s=enough_s) if chosen.case.large else search(endless, below_s=enough_s).best
    if free is None or free.found.step_s > enough_s:
        return None
    fill = [p / limit for p, limit in zip(chosen.peaks, chosen.case.seats.limits, strict=True)]
    return f"memory on rank {chosen.case.seats.ranks[fill.index(max(fill))]}"


def _parts(chosen: Outcome) -> dict[str, float]:
    """Seconds of the step by what takes them, on the rank that works longest."""
    step_s, work = chosen.totals
    busiest = next(rank for rank, seconds in enumerate(work) if seconds >= max(work) * (1 - SAME))
    own = stages_on(chosen.case.outline.placement, busiest)
    reduction = sum(chosen.costs[stage].reduce_s for stage in own)
    optimizer, waiting = sum(chosen.costs[stage].optimizer_s for stage in own), step_s - work[busiest]
    waiting = max(waiting - reduction, 0.0)
    links = min(waiting, _links_s(chosen))
    case, micro_batches = chosen.case, chosen.case.outline.micro_batches
    filling = f"filling and draining {many(case.parts, 'stage')}, {many(micro_batches, 'micro-batch')}"
    return {
        f"{_named(chosen, own, busiest)}": work[busiest] - optimizer,
        "the optimizer": optimizer,
        "the links": links,
        "waiting for other stages" if case.outline.asynchronous else filling: waiting - links,
        f"averaging gradients over {many(case.replicas * case.outline.ways, 'replica')}": reduction,
    }


def _named(chosen: Outcome, own: Sequence[int], rank: int) -> str:
    """The rank by its stage, or its number where it has several; and its layer where that is alone."""
    if len(own) > 1:
        return f"rank {chosen.case.seats.ranks[rank]}"
    start, stop = chosen.bounds[own[0]]
    alone = f", {chosen.case.setting.profile.layers[start].name} alone" if stop - start == 1 else ""
    return f"stage {own[0]}{alone}"


def _links_s(chosen: Outcome) -> float:
    """How much shorter the step would be if transfers took no time."""
    case = chosen.case
    without = costs_of(chosen.costs, [None] * (case.stages - 1), case.setting.profile.overhead_s)
    return chosen.step_s - float(case.graph.steps(without)[0])
