"""Which ranks hold a parameter: several hold a tied one, and two each parameter of a two-way pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopipe.core.schedule import Schedule
from autopipe.runtime.capture import Captured


def holders(captured: Captured, schedule: Schedule, cuts: Sequence[int], name: str) -> tuple[int, ...]:
    """The ranks that hold a parameter, ascending."""
    bounds = [0, *cuts, len(captured.layers)]
    parts = {
        part
        for part, (start, stop) in enumerate(pairwise(bounds))
        if any(name in captured.owned[layer] for layer in range(start, stop))
    }
    placed = zip(schedule.placement, schedule.part_of, strict=True)
    return tuple(sorted({rank for rank, part in placed if part in parts}))
