"""As many parameters on every stage: the largest stage as small as can be, as DeepSpeed's ``parameters`` method."""

from __future__ import annotations

import numpy as np

from autopipe.core.profile import Profile
from autopipe.solvers.chain_dp import smallest_maximum


def equal_parameters(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """The legal cuts that make the most parameters of a stage fewest; chain_dp's rule decides ties."""
    ends = np.array([0, *profile.legal_cuts(), len(profile.layers)])
    sums = np.concatenate([[0], np.cumsum([layer.parameters for layer in profile.layers])])[ends]
    sizes = np.where(ends[:, None] < ends[None, :], sums[None, :] - sums[:, None], np.inf)
    found = smallest_maximum(np.broadcast_to(sizes, (depth, *sizes.shape)))
    return tuple(int(ends[position]) for position in found.positions[1:-1]) if found else None
