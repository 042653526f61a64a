"""The outputs of micro-batches as the output of their batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Output(NamedTuple):
    """The flat leaves of one micro-batch's output, and its rows."""

    rows: int
    leaves: list[Any]


def join(outputs: Sequence[Output], grows: Sequence[bool]) -> list[Any]:
    """The leaves of the whole batch's output.

    A tensor whose dimension 0 ``grows`` with the batch is put together. Of others, numbers with a fraction (a loss)
    become the mean over rows; all else is that of the first micro-batch.
    """
    total = sum(output.rows for output in outputs)
    weights = [output.rows / total for output in outputs]
    columns = zip(*(output.leaves for output in outputs), strict=True)
    return [_joined(column, weights, grew) for column, grew in zip(columns, grows, strict=True)]


def _joined(values: Sequence[Any], weights: Sequence[float], grows: bool) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return first
    if grows:
        return torch.cat(list(values))
    if first.dim() == 0 and first.is_floating_point():
        return torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum()
    return first
