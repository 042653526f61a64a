"""Attention masks as eager mode makes them, for models of the transformers library.

While exporting, transformers builds an explicit causal mask and so loses ``is_causal`` (and flash attention), since
it may not look at the data. What it looks at is whether several sequences are packed into one row. So one eager
run records those answers, and the export is given the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_PACKED = "find_packed_sequence_indices"
_EXPORTING = "is_torchdynamo_exporting"


def _masking() -> Any:
    """transformers' module, when it is in use and still has what is replaced here."""
    module = sys.modules.get("transformers.masking_utils")
    return module if hasattr(module, _PACKED) and hasattr(module, _EXPORTING) else None


@contextlib.contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    old = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


@contextlib.contextmanager
def recorded(answers: list[bool]) -> Iterator[None]:
    """Append to ``answers``, per call in an eager run, whether sequences were packed."""
    module = _masking()
    if module is None:
        yield
        return
    original = getattr(module, _PACKED)

    def record(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        answers.append(found is not None)
        return found

    with _replaced(module, **{_PACKED: record}):
        yield


@contextlib.contextmanager
def replayed(answers: list[bool]) -> Iterator[None]:
    """Give an export the recorded answers; a call beyond them finds nothing packed."""
    module = _masking()
    if module is None:
        yield
        return
    original, left = getattr(module, _PACKED), iter(answers)

    def replay(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if next(left, False) else None

    with _replaced(module, **{_PACKED: replay, _EXPORTING: lambda: False}):
        yield
