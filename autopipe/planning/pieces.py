"""The stages of a plan, and the parameters that they share, from a profile and the layers of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopipe.core.plan import Stage, TiedParameter
from autopipe.core.profile import Profile
from autopipe.core.stage import StageCost


def stage(
    profile: Profile, index: int, rank: int, bounds: tuple[int, int], costs: StageCost, recompute: Collection[int]
) -> Stage:
    """The stage of layers ``bounds`` (the second excluded), of which those in ``recompute`` do."""
    start, stop = bounds
    layers = profile.layers[start:stop]
    return Stage(
        index=index,
        rank=rank,
        start=start,
        stop=stop,
        layers=tuple(layer.name for layer in layers),
        modules=tuple(dict.fromkeys(module for layer in layers for module in layer.modules)),
        costs=costs,
        receives=profile.crossing(start),
        sends=profile.crossing(stop) if stop < len(profile.layers) else (),
        recompute=tuple(profile.layers[layer].name for layer in recompute),
    )


def ties(profile: Profile, bounds: Sequence[tuple[int, int]]) -> tuple[TiedParameter, ...]:
    """The parameters that more than one of the stages holds, whose layers are ``bounds``."""
    found = []
    for tie in profile.ties:
        holders = tuple(s for s, (a, b) in enumerate(bounds) if any(a <= layer < b for layer in tie.layers))
        if len(holders) > 1:
            found.append(TiedParameter(tie.name, holders, tie.bytes))
    return tuple(found)
