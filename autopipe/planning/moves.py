"""Splits near a split: its cuts moved a little, one at a time or several together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.intp]

_NEAR = 4
"""Two cuts are moved independently when they are at most so many stages apart."""

_RUN = 24
"""Runs of up to so many neighbouring cuts are moved together, besides those of all cuts to one end."""


def single_moves(positions: Sequence[int]) -> Positions:
    """Every cut moved by one or two pieces, shape (moves, stages + 1)."""
    return _shifted(positions, _singles(len(positions)))


def joint_moves(positions: Sequence[int]) -> Positions:
    """Every run of neighbouring cuts moved by one piece, and every two near ones by one piece each."""
    return _shifted(positions, _joints(len(positions)))


def _shifted(positions: Sequence[int], shifts: Positions) -> Positions:
    moved = np.array(positions, dtype=np.intp) + shifts
    return moved[(np.diff(moved) > 0).all(axis=1)]


@cache
def _singles(width: int) -> Positions:
    return _rows(width, [{cut: by} for cut in range(1, width - 1) for by in (-2, -1, 1, 2)])


@cache
def _joints(width: int) -> Positions:
    pairs, every = list(combinations(range(1, width - 1), 2)), np.arange(width)
    runs = [(a, b) for a, b in pairs if b - a < _RUN or a == 1 or b == width - 2]
    first, last = np.array(runs, np.intp).reshape(-1, 2, 1).transpose(1, 0, 2)
    inside = ((first <= every) & (every <= last)).astype(np.intp)
    near = [{a: x, b: y} for a, b in pairs if b - a <= _NEAR for x in (-1, 1) for y in (-1, 1)]
    return np.concatenate([np.stack([-inside, inside], axis=1).reshape(-1, width), _rows(width, near)])


def _rows(width: int, shifts: Sequence[dict[int, int]]) -> Positions:
    rows = np.zeros((len(shifts), width), dtype=np.intp)
    for row, shift in zip(rows, shifts, strict=True):
        row[[*shift]] = [*shift.values()]
    return rows
