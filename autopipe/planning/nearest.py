"""Splits that come near to fitting, of cases in which none fits."""

from __future__ import annotations

import numpy as np

from autopipe.planning.cases import Case
from autopipe.planning.recompute import fit
from autopipe.planning.rough import by_part
from autopipe.planning.tables import open_ranges, places, spots
from autopipe.solvers.chain_dp import Split, smallest_maximum


def least_memory(case: Case) -> Split | None:
    """The split that exceeds its limits least, by its ``value`` in bytes; None when the pins leave none."""
    starts, stops, _ = spots(case.ranges.pieces, case.ranges.pieces)
    again = case.recompute == "auto"
    here = places(case.outline, case.seats, shared=again)
    found = fit(case.ranges, starts[None], stops[None], here, may_recompute=again, smallest=True)
    limits = np.array([case.seats.limits[rank] for rank in case.outline.placement])[:, None, None]
    allowed = open_ranges(case.setting, case.ranges, case.outline, case.ranges.pieces)
    return smallest_maximum(by_part(case.outline, np.where(allowed, found.peak_bytes - limits, np.inf)))


def little_memory(case: Case) -> tuple[int, ...] | None:
    """A split with little that is there throughout on any rank; None when the pins leave none."""
    starts, stops, _ = spots(case.ranges.pieces, case.ranges.pieces)
    allowed = open_ranges(case.setting, case.ranges, case.outline, case.ranges.pieces)
    split = smallest_maximum(by_part(case.outline, np.where(allowed, case.ranges.static[starts, stops], np.inf)))
    return split.positions if split else None
