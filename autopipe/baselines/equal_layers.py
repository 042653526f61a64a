"""As many layers on every stage: what most hand-made pipelines do."""

from __future__ import annotations

from autopipe.core.profile import Profile


def equal_layers(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """Cuts at k · layers / depth, each moved to the nearest legal cut, the earlier one where two are as near."""
    legal = profile.legal_cuts()
    if depth - 1 > len(legal):
        return None
    chosen: list[int] = []
    for stage in range(1, depth):
        ideal = stage * len(profile.layers) / depth
        first = legal.index(chosen[-1]) + 1 if chosen else 0
        left = legal[first : len(legal) - (depth - 1 - stage)]
        chosen.append(min(left, key=lambda cut: (abs(cut - ideal), cut)))
    return tuple(chosen)
