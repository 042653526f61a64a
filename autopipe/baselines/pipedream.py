"""PipeDream's rule (SOSP 2019) without replicas: the longest forward and backward of a stage as short as can be.

Its program leaves transfers out unless it is told a compression ratio, and knows no fill, drain or micro-batches.
"""

from __future__ import annotations

from autopipe.baselines.pieces import cuts, of_pieces
from autopipe.core.profile import Profile
from autopipe.solvers.balance import smallest_longest


def pipedream(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """The legal cuts that make the longest stage shortest, at the largest micro-batch that was measured."""
    costs = profile.at(profile.micro_batches[-1])
    work = of_pieces(profile, [cost.forward_s + cost.backward_s for cost in costs])
    found = smallest_longest([*map(float, work)], depth)
    return cuts(profile, found.positions) if found else None
