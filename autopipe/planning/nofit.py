"""When no plan fits: how much is missing, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.core.cluster import Cluster, Link, Tier
from autopipe.core.errors import AutopipeError, NoPlanFits, UsageError
from autopipe.core.schedule import Shape, kind, stages_on
from autopipe.core.units import format_bytes, format_percent
from autopipe.planning.cases import Case
from autopipe.planning.outcome import Outcome
from autopipe.planning.request import possible_depths, wanted_kinds
from autopipe.planning.space import Space
from autopipe.planning.whynot import closest

_FURTHER = 4
"""More devices are tried up to so many times those on offer."""


def no_plan_fits(space: Space, *, free_depth: bool, headroom: float) -> AutopipeError:
    """The error: the plan that comes closest, what it needs and has, and what would make one fit.

    ``free_depth`` says that the depth was not fixed, so that more devices would be used; ``headroom`` is the part of
    the memory that the limits leave free.
    """
    nearest = closest(space)
    if nearest is None and (why := space.refusal()):
        return UsageError(f"{_either([kind.name for kind in space.kinds])} cannot run: {why}")
    if nearest is None:
        return UsageError("the pins and the layers that must not split their backward leave no plan: change a pin")
    rank = nearest.over_limit()
    assert rank is not None
    peak, limit = nearest.peaks[rank], nearest.case.seats.limits[rank]
    own = stages_on(nearest.case.outline.placement, rank)
    static = sum(nearest.costs[stage].static_bytes for stage in own)
    what = f"weights, gradients and optimizer {format_bytes(static)}, activations {format_bytes(peak - static)}"
    help_ = list(_help(space, nearest, free_depth))
    return NoPlanFits(
        f"no plan fits: the smallest needs {format_bytes(peak)} on rank {rank}, the limit is {format_bytes(limit)}"
        f"{_of_memory(limit, headroom)} ({what}). "
        + (f"Try {_either(help_)}." if help_ else "No other setting fits either: it takes devices with more memory.")
    )


def _of_memory(limit: int, headroom: float) -> str:
    """What the limit was taken from, where a headroom is kept free."""
    if not headroom:
        return ""
    return f", {format_bytes(limit / (1 - headroom))} less a headroom of {format_percent(headroom)}"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _help(space: Space, nearest: Outcome, free_depth: bool) -> Iterator[str]:
    """Arguments that were not tried, and with which a plan fits."""
    if size := _micro_batch(space, nearest):
        yield f"--micro-batch {size}"
    if space.recompute == "none" and space.under(space.setting, recompute="auto").fits():
        yield "--recompute auto"
    others = [kind for kind in wanted_kinds(None) if kind not in space.kinds]
    if name := next((kind.name for kind in others if replace(space, kinds=(kind,)).fits()), None):
        yield f"--schedule {name}"
    if free_depth and (count := _devices(space)):
        yield f"--devices {count}"
    if not free_depth and (depth := _depth(space)):
        yield f"--depth {depth}"
    whole = not space.setting.sharded and max(space.replicas) > 1
    if whole and space.under(replace(space.setting, sharded=True)).fits():
        yield "--shard-optimizer"


def _depth(space: Space) -> int | None:
    """The smallest depth that was not tried and with which a plan fits."""
    setting = space.setting
    possible = possible_depths(setting.profile, setting.cluster, setting.pins)
    return next((d for d in possible if d not in space.depths and space.only(depth=d).fits()), None)


def _micro_batch(space: Space, nearest: Outcome) -> int | None:
    """A size that was measured but not tried; or 1, if what scales with the micro-batch then leaves enough."""
    measured = [b for b in space.setting.profile.micro_batches if space.global_batch % b == 0]
    for size in sorted(set(measured) - set(space.micro_batches), reverse=True):
        if space.only(micro_batch=size).fits():
            return size
    return None if 1 in measured or not _fits_with_one(space, nearest) else 1


def _fits_with_one(space: Space, nearest: Outcome) -> bool:
    """All that is not static is as much of the batch as is in flight."""
    case = nearest.case
    for rank, peak in enumerate(nearest.peaks):
        own = stages_on(case.outline.placement, rank)
        costs = [(nearest.costs[stage], case.outline.copies[stage]) for stage in own]
        stays = sum(cost.always_bytes((0, 0), copies) + cost.gradient_bytes for cost, copies in costs)
        left = max(_left_with_one(case, stage) for stage in own)
        if stays + (peak - stays) * left > case.seats.limits[rank]:
            return False
    return True


def _left_with_one(case: Case, stage: int) -> float:
    """The part of the samples that a stage has in flight now that it would have with micro-batches of one.

    A stage that has all micro-batches in flight has as many more of smaller ones, unless its schedule says otherwise.
    """
    outline, size = case.outline, case.micro_batch
    forwards = max(moment.forwards for moment in outline.moments[stage])
    ahead = kind(outline.name).ahead if outline.ahead else None
    if ahead is None:
        return 1 / size if forwards < outline.micro_batches else 1.0
    return ahead(Shape(outline.ranks, outline.micro_batches * size, outline.placement))[stage] / (forwards * size)


def _devices(space: Space) -> int | None:
    """The fewest devices, more than those on offer, with which a plan fits; the further ones are like the last."""
    setting = space.setting
    offered, pieces = len(setting.cluster), len(setting.profile.legal_cuts()) + 1
    for count in range(offered + 1, min(pieces, _FURTHER * offered) + 1):
        limits = setting.limits + setting.limits[-1:] * (count - offered)
        wider = replace(setting, cluster=_grown(setting.cluster, count), limits=limits)
        if replace(space.under(wider), depths=(count,)).fits():
            return count
    return None


def _grown(cluster: Cluster, count: int) -> Cluster:
    """The cluster with more devices like the last. How they are linked does not matter for what fits."""
    *first, last = cluster.devices
    tiers = cluster.tiers or (Tier("all", count, Link(0.0, 1.0)),)
    widest = replace(tiers[-1], ranks=max(count, tiers[-1].ranks))
    more = replace(last, count=last.count + count - len(cluster))
    return replace(cluster, devices=(*first, more), tiers=(*tiers[:-1], widest))
