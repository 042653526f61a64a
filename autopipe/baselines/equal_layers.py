"""As many layers on every stage: what most hand-made pipelines do."""

from __future__ import annotations

from bisect import bisect_left

from autopipe.core.profile import Profile


def equal_layers(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """Cuts at k · layers / depth, each moved to the nearest legal cut, the earlier one where two are as near."""
    legal = profile.legal_cuts()
    if depth - 1 > len(legal):
        return None
    chosen: list[int] = []
    first = 0  # of the cuts that are left, the last ones kept for the stages behind
    for stage in range(1, depth):
        ideal, last = stage * len(profile.layers) / depth, len(legal) - (depth - 1 - stage)
        behind = bisect_left(legal, ideal, first, last)
        near = range(max(behind - 1, first), min(behind + 1, last))
        nearest = min(near, key=lambda number: abs(legal[number] - ideal))
        chosen.append(legal[nearest])
        first = nearest + 1
    return tuple(chosen)
