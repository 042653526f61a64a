"""As many parameters on every stage: the largest stage as small as can be, as DeepSpeed's ``parameters`` method."""

from __future__ import annotations

from autopipe.baselines.pieces import cuts, of_pieces
from autopipe.core.profile import Profile
from autopipe.solvers.balance import smallest_longest


def equal_parameters(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """The legal cuts that make the most parameters of a stage fewest; the last stages are filled first."""
    sizes = of_pieces(profile, [layer.parameters for layer in profile.layers])
    found = smallest_longest([*map(float, sizes)], depth)
    return cuts(profile, found.positions) if found else None
