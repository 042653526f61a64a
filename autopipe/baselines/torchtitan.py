"""torchtitan's rule: embeddings and head weigh as much as a block each, the rest is shared out evenly."""

from __future__ import annotations

from autopipe.baselines.units import cuts, units
from autopipe.core.profile import Profile


def torchtitan(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """As many units on every stage, one more on the first ones where they do not divide."""
    firsts = units(profile)
    if firsts is None or len(firsts) < depth:
        return None
    each, more = divmod(len(firsts), depth)
    return cuts(profile, firsts, [each + (stage < more) for stage in range(depth)])
