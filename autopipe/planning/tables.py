"""What every range of layers costs on every stage of a pipeline: with its device, links, memory, and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Cluster, Link
from autopipe.core.profile import Profile, Tie
from autopipe.core.schedule import Op, Schedule
from autopipe.planning.ranges import Floats, Ranges
from autopipe.planning.recompute import Moment, Place, fit
from autopipe.simulate import peak_loads

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Setting:
    """What a whole search shares: ``limits`` are bytes a rank, ``pins`` stages by layer number."""

    profile: Profile
    cluster: Cluster
    optimizer: str
    limits: tuple[int, ...]
    pins: Mapping[int, int]

    def hops(self, placement: Sequence[int]) -> tuple[Link | None, ...]:
        """The links between neighbouring stages, None inside a rank."""
        return tuple(self.cluster.link(a, b) for a, b in pairwise(placement))

    def speeds(self, placement: Sequence[int]) -> list[float]:
        """The speed of each stage's device."""
        speeds = [device.speed for device in self.cluster.ranks()]
        return [speeds[rank] for rank in placement]

    def sum_s(self, tie: Tie, depth: int) -> float:
        """Seconds to sum a tied parameter's gradient over its ranks: a ring over the slowest link of the pipeline."""
        count = min(len(tie.layers), depth)
        pairs = [(a, b) for a in range(depth) for b in range(a)]
        links = {link for link in (self.cluster.link(a, b) for a, b in pairs) if link}
        rounds = 2 * (count - 1)
        return max((rounds * (link.latency_s + tie.bytes / count / link.bytes_per_s) for link in links), default=0.0)


class Tables(NamedTuple):
    """Ticks and bytes. Range tables have shape (stages, n + 1, n + 1), cut tables (stages − 1, n + 1).

    ``actions`` are F, B, I and W in an array of shape (4, stages, n + 1, n + 1), overhead and recomputation included;
    ``least`` the same with the fewest ticks that recomputation could cost. ``open`` ranges are not empty, respect the
    pins and split only what may; ``allowed`` ones also fit, ``possible`` ones fit by some choice of recomputed layers.
    ``taken`` is how many of recompute_order's layers recompute, ``peak_bytes`` the peak then.
    """

    actions: Floats
    least: Floats
    optimizer: Floats
    activations: Floats
    gradients: Floats
    open: Flags
    allowed: Flags
    possible: Flags
    taken: Counts
    peak_bytes: Floats


def tables(setting: Setting, ranges: Ranges, schedule: Schedule, *, may_recompute: bool) -> Tables:
    """The tables of a schedule.

    Several stages on a rank share its memory. Where layers may recompute each gets an equal part of it; else each is
    held against all of it, and what they need together is for Case.measured to check.
    """
    places = [_place(setting, schedule, stage, shared=False) for stage in range(schedule.stages)]
    shared = [_place(setting, schedule, stage, shared=may_recompute) for stage in range(schedule.stages)]
    fits = [fit(ranges, place, schedule.micro_batches, may_recompute=may_recompute) for place in shared]
    loose = [fit(ranges, place, schedule.micro_batches, may_recompute=may_recompute) for place in places]
    extra, least = np.stack([f.extra for f in fits]), np.stack([f.least_extra for f in loose])
    open_ = _open(setting, ranges, schedule)
    hops, speeds = setting.hops(schedule.placement), setting.speeds(schedule.placement)
    return Tables(
        actions=_actions(setting, ranges, extra, speeds),
        least=_actions(setting, ranges, np.where(np.isfinite(least), least, 0), speeds),
        optimizer=_optimizer(setting, ranges, schedule, speeds),
        activations=ranges.transfers(ranges.activations, hops),
        gradients=ranges.transfers(ranges.gradients, hops),
        open=open_,
        allowed=open_ & np.stack([f.fits for f in fits]),
        possible=open_ & np.isfinite(least),
        taken=np.stack([f.taken for f in fits]),
        peak_bytes=np.stack([f.peak_bytes for f in fits]),
    )


def _place(setting: Setting, schedule: Schedule, stage: int, *, shared: bool) -> Place:
    rank = schedule.placement[stage]
    own = [other for other, where in enumerate(schedule.placement) if where == rank]
    place = own.index(stage)
    moments = (
        Moment(
            load.forwards[place], load.input_grads[place], load.gradients[place], load.first and load.running == place
        )
        for load in peak_loads(schedule, rank)
    )
    limit = setting.limits[rank] // len(own) if shared else setting.limits[rank]
    return Place(limit, tuple(dict.fromkeys(moments)))


def _actions(setting: Setting, ranges: Ranges, extra: Floats, stage_speeds: Sequence[float]) -> Floats:
    """F, B, I and W; what is recomputed is part of B and I."""
    speeds = np.array(stage_speeds)[:, None, None]
    overhead = round(setting.profile.overhead_s / ranges.tick_s)
    whole = (ranges.forward, ranges.backward + extra, ranges.input_grad + extra, ranges.weight_grad)
    return np.stack([np.rint(ticks / speeds) + overhead for ticks in whole])


def _optimizer(setting: Setting, ranges: Ranges, schedule: Schedule, stage_speeds: Sequence[float]) -> Floats:
    """The optimizer, behind the sum of gradients of parameters that another stage holds too."""
    speeds = np.array(stage_speeds)[:, None, None]
    ticks = np.rint(ranges.optimizer / speeds)
    for tie in setting.profile.ties:
        ticks = ticks + np.rint(setting.sum_s(tie, schedule.ranks) / ranges.tick_s) * ranges.part_of(tie)
    return np.asarray(ticks)


def _open(setting: Setting, ranges: Ranges, schedule: Schedule) -> Flags:
    """The ranges that hold a layer, none that is pinned elsewhere, and none that must not split where the row does."""
    allowed = np.repeat(np.triu(np.ones_like(ranges.forward, dtype=bool), 1)[None], schedule.stages, axis=0)
    for layer, pinned in setting.pins.items():
        elsewhere = [stage for stage in range(schedule.stages) if stage != pinned]
        allowed[elsewhere] &= ~ranges.inside(layer)
    splitting = sorted({action.stage for row in schedule.order for action in row if action.op is Op.I})
    for number, each in enumerate(setting.profile.layers):
        if splitting and not each.can_split_backward:
            allowed[splitting] &= ~ranges.inside(number)
    return allowed
