"""Megatron's rule with embedding and loss counted as a block each (``account_for_…_in_pipeline_split``)."""

from __future__ import annotations

from autopipe.baselines.units import cuts, units
from autopipe.core.profile import Profile


def megatron(profile: Profile, depth: int) -> tuple[int, ...] | None:
    """As many units on every stage; None where they do not divide, which Megatron refuses."""
    firsts = units(profile)
    if firsts is None or len(firsts) % depth:
        return None
    return cuts(profile, firsts, [len(firsts) // depth] * depth)
