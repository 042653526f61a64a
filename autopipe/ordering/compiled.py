"""Compilation of the inner loops by numba where it is installed; plain Python, on lists, where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np


def has_numba(*, loaded: bool = False) -> bool:
    """Whether numba is installed (or ``loaded`` already): it is an extra, ``pip install autopipe[fast]``."""
    return "numba" in sys.modules if loaded else importlib.util.find_spec("numba") is not None


@cache
def compiled(function: FunctionType, *helpers: FunctionType) -> Callable[..., Any]:
    """The function as machine code. It calls no Python functions but the helpers, each those before it.

    It may make no arrays or lists: then numba need not count who uses the many that it is given, at every call, which
    takes four fifths of the time.
    """
    njit = importlib.import_module("numba").njit
    options = _uncounted()
    names = dict(function.__globals__)
    made: Any = None
    for part in (*helpers, function):
        made = njit(cache=True, **options)(FunctionType(part.__code__, names, part.__name__))
        names[part.__name__] = made
    compiled_function: Callable[..., Any] = made
    return compiled_function


def _uncounted() -> dict[str, bool]:
    """Numba's option for that, which has no public name; none where a release has it no more: then loops are slower."""
    try:
        known = importlib.import_module("numba.core.options").DefaultOptions
    except (ImportError, AttributeError):
        return {}
    return {"_nrt": False} if hasattr(known, "_nrt") else {}


def same(value: float, count: int, *, fast: bool, whole: bool = False) -> Any:
    """One value, many times, as ``numbers`` gives it."""
    if fast:
        return np.full(count, value, dtype=np.int64 if whole else np.float64)
    return [int(value) if whole else value] * count


def numbers(values: Sequence[float], *, fast: bool, whole: bool = False) -> Any:
    """The values as what is indexed fastest: an array in machine code, a list in Python."""
    return np.array(values, dtype=np.int64 if whole else np.float64) if fast else list(values)
