"""A profile as the pieces between its legal cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.core.profile import Profile

_PARTS = 2.0**38


def ends(profile: Profile) -> tuple[int, ...]:
    """Layer 0, the legal cuts, and the number of layers: between which the pieces lie."""
    return (0, *profile.legal_cuts(), len(profile.layers))


def of_pieces(profile: Profile, layers: Sequence[float]) -> NDArray[np.float64]:
    """A number of each layer, summed over each piece, in whole parts of the model's sum.

    So the unit that a profile was measured in does not decide between equal splits.
    """
    numbers = np.array(layers, dtype=np.float64)
    return np.add.reduceat(np.rint(numbers / (numbers.sum() or 1.0) * _PARTS), ends(profile)[:-1])


def cuts(profile: Profile, positions: Sequence[int]) -> tuple[int, ...]:
    """The first layer of every stage but the first, from the positions of a split, both ends included."""
    return tuple(ends(profile)[position] for position in positions[1:-1])
