"""Which units of a model are run to know what all cost: of equal ones a few, so that effort grows with distinct ones.

A unit is the layers between two legal cuts. Units with equal operations, shapes and dtypes, and with equal values over
their two boundaries, are of one kind. The units that are run form a chain of their own: after a unit it goes on with
any later one whose predecessor is of the same kind, for the values that it is given are like those that it would get.

    units   E A A A A A A A N H        kinds by letter
    run     E A A         A A N H      the first two A and the last two; the values of the second go to the last but one
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopipe.runtime.capture import Captured

INSTANCES = 4
"""How many units of a kind are run, if there are so many: the first and the last ones."""


@dataclass(frozen=True)
class Sampling:
    """The units and those that are run.

    ``ranges`` are the layers of all units, ``kinds`` what tells them apart, ``run`` the numbers of those that are run,
    ascending, always with the first and the last.
    """

    ranges: tuple[tuple[int, int], ...]
    kinds: tuple[Hashable, ...]
    run: tuple[int, ...]

    @property
    def run_ranges(self) -> list[tuple[int, int]]:
        """The layers of the units that are run."""
        return [self.ranges[unit] for unit in self.run]

    @property
    def merged_ranges(self) -> list[tuple[int, int]]:
        """The same with neighbours put together: as few stages as there can be."""
        starts = [0, *(k for k in range(1, len(self.run)) if self.run[k] != self.run[k - 1] + 1), len(self.run)]
        return [(self.ranges[self.run[a]][0], self.ranges[self.run[b - 1]][1]) for a, b in pairwise(starts)]

    def instances(self, unit: int) -> list[int]:
        """The places in ``run`` of the units of the same kind."""
        return [place for place, other in enumerate(self.run) if self.kinds[other] == self.kinds[unit]]

    @property
    def whole(self) -> bool:
        """Whether all units are run."""
        return len(self.run) == len(self.ranges)


def sample(captured: Captured, cuts: Sequence[int], instances: int | None = INSTANCES) -> Sampling:
    """The units between ``cuts`` to run; None for all of them."""
    bounds = [0, *cuts, len(captured.layers)]
    ranges = tuple(pairwise(bounds))
    kinds = tuple(_kind(captured, start, stop) for start, stop in ranges)
    return Sampling(ranges, kinds, tuple(range(len(ranges))) if instances is None else chosen(kinds, instances))


def _kind(captured: Captured, start: int, stop: int) -> Hashable:
    layers = range(start, stop)
    structures = tuple(captured.layers[n].structure for n in layers)
    again = tuple(n in captured.checkpointed for n in layers)
    arriving, leaving = (
        tuple((edge.shape, edge.dtype, edge.needs_gradient) for edge in captured.crossing(cut)) for cut in (start, stop)
    )
    return start == 0, stop == len(captured.layers), structures, again, arriving, leaving


def chosen(kinds: Sequence[Hashable], instances: int) -> tuple[int, ...]:
    """The units to run: of each kind the first and last ones, and what it takes to go from one to the next."""
    last = len(kinds) - 1
    wanted = {0, last}
    for kind in dict.fromkeys(kinds):
        units = [unit for unit, other in enumerate(kinds) if other == kind]
        first = (instances + 1) // 2
        wanted |= {*units[:first], *units[max(first, len(units) - (instances - first)) :]}
    run, unit = [0], 0
    while unit < last:
        following = next(other for other in range(unit + 1, last + 1) if other in wanted)
        unit = following if kinds[following - 1] == kinds[unit] else unit + 1
        run.append(unit)
    return tuple(run)
