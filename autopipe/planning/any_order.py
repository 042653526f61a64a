"""What no order of the actions can beat, whatever the split: the bound of schedules that make their order themselves.

For any number of stages on a rank what ranks must share (shares.py); for one stage on a rank also the dynamic program
of bounds.py, without any order's rows.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.planning.bounds import least_ends_of_any_order
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.setting import Setting
from autopipe.planning.shares import shared_bound_s
from autopipe.planning.tables import tables
from autopipe.solvers.chain_dp import smallest_maximum

_ENDLESS = 2**62
"""Bytes of a rank: what an order holds is its own affair."""


def any_order_bound_s(
    setting: Setting,
    ranges: Ranges,
    placement: tuple[int, ...],
    micro_batches: int,
    replicas: int = 1,
    *,
    may_recompute: bool = False,
) -> float:
    """Seconds that no split into stages with that placement, and no order, can beat; backwards whole or split."""
    depth = max(placement) + 1
    seats = setting.seats(depth, replicas)
    shared_s = shared_bound_s(ranges, seats, placement, micro_batches, may_recompute=may_recompute)
    if placement != tuple(range(depth)):
        return shared_s
    return max(shared_s, _one_stage_a_rank_s(setting, ranges, depth, micro_batches, replicas))


def _one_stage_a_rank_s(setting: Setting, ranges: Ranges, depth: int, micro_batches: int, replicas: int) -> float:
    free = replace(setting, limits=(_ENDLESS,) * len(setting.limits))
    outline = Outline.in_turn("any", micro_batches, (micro_batches,) * depth)
    costs = tables(free, ranges, outline, free.seats(depth, replicas), reach=ranges.pieces, may_recompute=False)
    found = smallest_maximum(least_ends_of_any_order(costs, micro_batches))
    return found.value * ranges.tick_s if found else float("inf")
