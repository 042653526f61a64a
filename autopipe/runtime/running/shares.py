"""What each micro-batch's loss counts for in the loss of the whole batch, by the plan's Reduction.

A mean over tokens is not the mean of its micro-batches where they hold unequally many: with the counts of the whole
batch at hand each loss is scaled by its own, and the sum is the batch's loss exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autopipe.core.errors import ModelError
from autopipe.core.reduction import Reduction
from autopipe.runtime.workload import Inputs, rows

Piece = tuple[int, int]
"""The first row of a micro-batch in its batch, and the row after its last."""
_IGNORED = (-100, -1, 0)
"""Labels that losses leave out: torch's default, and what authors write in its place."""


def pieces(size: int, micro_batch: int) -> list[Piece]:
    """The micro-batches of a batch of ``size`` rows, in order; the last one may be smaller."""
    return [(start, min(start + micro_batch, size)) for start in range(0, size, micro_batch)]


def shares(reduction: Reduction, inputs: Inputs, target: Any, parts: Sequence[Piece]) -> list[float]:
    """The share of each micro-batch; they multiply its loss. Raises ModelError when the counted tensor is not there."""
    if reduction.kind == "sum":
        return [1.0] * len(parts)
    if reduction.kind == "mean":
        return [(stop - start) / parts[-1][1] for start, stop in parts]
    counted = _at(reduction.tensor, inputs, target)
    counts = [count(reduction, rows(counted, start, stop)) for start, stop in parts]
    return [number / max(sum(counts), 1e-12) for number in counts]


def count(reduction: Reduction, tensor: torch.Tensor) -> float:
    """How many elements of the tensor count."""
    seen = tensor[:, reduction.skipped :] if reduction.skipped else tensor
    return float(seen.double().sum() if reduction.ignored is None else (seen != reduction.ignored).sum())


def _at(path: str, inputs: Inputs, target: Any) -> torch.Tensor:
    """The tensor at a Reduction's path."""
    first, *keys = path.split(".")
    value: Any = target if first == "target" else inputs
    try:
        for key in keys:
            value = value[key] if isinstance(value, Mapping) else value[int(key)]
    except (KeyError, IndexError, ValueError, TypeError):
        value = None
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"the plan weighs micro-batches by {path}, but the batch has no tensor there: plan it again")
    return value


def candidates(inputs: Inputs, target: Any) -> Iterator[Reduction]:
    """The ways in which a loss may count elements of this batch."""
    for path, tensor in (*_tensors("target", target), *_tensors("inputs", inputs)):
        skips = (0, 1) if tensor.dim() > 1 else (0,)
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        for ignored in _IGNORED if whole else ():
            yield from (Reduction("count", path, ignored, skip) for skip in skips)
        if not tensor.is_complex() and bool(((tensor == 0) | (tensor == 1)).all()):
            yield from (Reduction("count", path, None, skip) for skip in skips)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and value.dim():
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and "." not in key:
                yield from _tensors(f"{path}.{key}", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(f"{path}.{index}", item)
