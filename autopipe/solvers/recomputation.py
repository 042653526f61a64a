"""Which layers recompute: the least seconds that free enough bytes, exactly, for every range of layers at once.

Of all sets of a range's layers only those count that no other set beats in both seconds and bytes. Their front grows by
one layer at a time: as it was, and with the layer added. Layers that free equally many bytes keep it short: there are
then as many sets as numbers of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.solvers.chain_dp import Floats

_MOST = 20_000


def least_seconds(extra_s: Floats, freed_bytes: Floats, missing_bytes: Floats) -> Floats:
    """The least seconds with which each range frees what is missing; infinite where it cannot.

    ``extra_s`` and ``freed_bytes`` have a number for each of n layers, ``missing_bytes`` has shape (…, n + 1, n + 1):
    for places that differ in memory or in what they hold. Empty ranges are infinite. Raises UsageError where layers are
    so different that a front has too many sets.
    """
    result = np.full(missing_bytes.shape, np.inf)
    for start in range(len(extra_s)):
        for stop, (seconds, freed) in enumerate(_fronts(extra_s[start:], freed_bytes[start:]), start + 1):
            index = np.searchsorted(freed, missing_bytes[..., start, stop])
            result[..., start, stop] = np.append(seconds, np.inf)[index]
    return result


def _fronts(extra_s: Floats, freed_bytes: Floats) -> Iterator[tuple[Floats, Floats]]:
    """After each layer the seconds and bytes of the sets that count, both ascending."""
    seconds, freed = np.zeros(1), np.zeros(1)
    for extra, more in zip(extra_s, freed_bytes, strict=True):
        if more > 0:
            seconds, freed = _front(np.append(seconds, seconds + extra), np.append(freed, freed + more))
        if len(freed) > _MOST:
            raise UsageError(f"more than {_MOST} sets of layers to recompute count: too many different layers")
        yield seconds, freed


def _front(seconds: Floats, freed: Floats) -> tuple[Floats, Floats]:
    """What no other set beats in both: by bytes descending, only what is cheaper than all before."""
    order = np.lexsort((seconds, -freed))
    seconds, freed = seconds[order], freed[order]
    cheaper = np.append(np.inf, np.minimum.accumulate(seconds)[:-1]) > seconds
    return seconds[cheaper][::-1], freed[cheaper][::-1]
