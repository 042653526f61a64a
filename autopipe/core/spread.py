"""How much values that were measured several times vary, and how well that tells their median."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float]) -> float:
    """(q75 − q25) / median."""
    low, middle, high = (float(q) for q in np.quantile(np.asarray(values), [0.25, 0.5, 0.75]))
    return (high - low) / middle if middle else 0.0


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median, as a part of it: 1.253 σ/√n with σ = (q75 − q25)/1.349."""
    return 1.253 * spread(values) / 1.349 / math.sqrt(len(values))
