"""GPipe's rule (NeurIPS 2019): the variance of the stages' estimated costs as small as can be.

The stages' mean is given, so their variance is least where the sum of squares is. A cost is estimated by the forward.
"""

from __future__ import annotations

import numpy as np

from autopipe.baselines.pieces import cuts, of_pieces
from autopipe.core.profile import Profile
from autopipe.solvers.chain_dp import smallest_sum


def gpipe(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """The legal cuts with the least sum of squares of forwards, at the largest micro-batch that was measured."""
    forward = of_pieces(profile, [cost.forward_s for cost in profile.at(profile.micro_batches[-1])])
    sums = np.concatenate([[0.0], np.cumsum(forward)])
    stage = sums[None, :] - sums[:, None]
    squares = np.where(np.triu(np.ones_like(stage), 1) > 0, stage**2, np.inf)
    found = smallest_sum(np.broadcast_to(squares, (depth, *squares.shape)))
    return cuts(profile, found.positions) if found else None
