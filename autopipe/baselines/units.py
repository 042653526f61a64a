"""A transformer as trainers count it: what comes before the blocks is one unit, each block one, what follows one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autopipe.core.blocks import block_number
from autopipe.core.profile import Profile


def units(profile: Profile) -> tuple[int, ...] | None:
    """The first layer of each unit; None where the blocks, layers whose names end in a number, are not in one row."""
    blocks = [number for number, layer in enumerate(profile.layers) if block_number(layer.name) is not None]
    if not blocks or blocks != [*range(blocks[0], blocks[-1] + 1)]:
        return None
    before, after = [0] if blocks[0] else [], [blocks[-1] + 1] if blocks[-1] + 1 < len(profile.layers) else []
    return (*before, *blocks, *after)


def cuts(profile: Profile, firsts: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The first layer of every stage but the first, from the units on each; None where a cut there is not legal."""
    found = tuple(firsts[end] for end in accumulate(sizes[:-1]))
    return found if set(found) <= set(profile.legal_cuts()) else None
