"""How the gradients of micro-batches add up to their batch's, found by comparing both before anything runs.

A pipeline sums share × loss over its micro-batches (core/reduction.py). For a mean over rows, a sum over rows and a
mean over elements that can be counted in the batch, there are shares that give the batch's gradient. For batch
statistics, a router's auxiliary loss, or anything else that looks at the whole batch, there are none: such a model
trains as with gradient accumulation in one process, not as with the whole batch at once, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autopipe.core.errors import ModelError
from autopipe.core.reduction import MEAN, Reduction
from autopipe.core.units import format_percent
from autopipe.runtime.checking.parity import (
    TOLERANCE,
    dense,
    difference,
    largest,
    largest_magnitude,
    restore_state,
    saved_state,
    without_dropout,
)
from autopipe.runtime.running.shares import candidates, pieces, shares
from autopipe.runtime.workload import Workload, call, rows

ROWS = 2
"""Rows of a micro-batch here; the batch has two of them."""
_CUTS = pieces(2 * ROWS, ROWS)
_EVEN = (0.5, 0.5)
"""The shares of a mean over rows."""
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
Gradients = dict[str, torch.Tensor | None]


def find_reduction(workload: Workload, dtype: str) -> tuple[Reduction, str | None]:
    """How the model's loss adds up, and a line for the user; None where it is a plain mean over rows.

    Where the data leave more than one way to read it, a mean over rows goes before a sum, and a sum before what counts.
    Dropout is off. Differences below ten times the parity's tolerance are rounding. Where there is no memory for a
    batch of two micro-batches, the line says that they were not compared. The model is used up: it is left without
    dropout, and with other buffers.
    """
    model = without_dropout(workload.model)
    inputs, target = batch = workload.batch(2 * ROWS)
    state = saved_state(model)
    try:
        whole = _gradients(model, workload, batch)
    except (*_NO_MEMORY, ModelError) as error:
        if not isinstance(error.__cause__ if isinstance(error, ModelError) else error, _NO_MEMORY):
            raise
        return MEAN, f"a batch of {2 * ROWS} does not fit: whether micro-batches change the gradients was not looked at"
    tolerance = 10 * TOLERANCE.get(getattr(torch, dtype), 2e-2)
    possible, off = [MEAN, Reduction("sum"), *candidates(inputs, target)], 0.0
    for some in (batch, _turned(batch)):
        ways = {reduction: tuple(shares(reduction, some[0], some[1], _CUTS)) for reduction in possible}
        if some is batch or len({*ways.values()}) > 1:
            restore_state(model, state)
            errors = _errors(model, workload, some, whole, {_EVEN, *ways.values()})
            possible = [reduction for reduction in possible if errors[ways[reduction]] <= tolerance]
            off = largest((off, errors[_EVEN]))
    if possible:
        return possible[0], _told(possible[0])
    if not math.isfinite(off):
        return MEAN, "gradients of the batch or of its micro-batches are not finite: whether they add up is not known"
    restore_state(model, state)
    again = _gradients(model, workload, batch, seed=1)
    cause = _cause(model, drawn=_largest(again, whole) > tolerance)
    return MEAN, f"gradients of micro-batches differ from the whole batch's by {format_percent(off)}: {cause}"


def _turned(batch: Any) -> Any:
    """The batch with its rows turned by one: the same gradient, other rows together in a micro-batch.

    A mean over what only one half has is also the sum of both halves, and one over what both have equally many of is
    also the mean over rows; turned, they differ.
    """
    return tree_map(lambda leaf: leaf.roll(-1, 0) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch)


def _errors(
    model: nn.Module, workload: Workload, batch: Any, whole: Gradients, ways: Collection[tuple[float, ...]]
) -> dict[tuple[float, ...], float]:
    """By shares of the two micro-batches: how far the sum of their gradients is from the whole batch's."""
    parts = [_gradients(model, workload, rows(batch, start, stop)) for start, stop in _CUTS]
    return {factors: _largest(_sum(parts, factors), whole) for factors in ways}


def _told(reduction: Reduction) -> str | None:
    if reduction.kind == "mean":
        return None
    if reduction.kind == "sum":
        return f"the loss is {reduction}: the losses of micro-batches are added, not averaged"
    return f"the loss is {reduction}: micro-batches count for as many of them as they hold"


def _cause(model: nn.Module, *, drawn: bool) -> str:
    if drawn:
        return "the forward draws random numbers, other ones for a micro-batch than for the batch"
    named = next((name for name, module in model.named_modules() if isinstance(module, _BATCH_STATISTICS)), None)
    if named is not None:
        return f"batch statistics, as in {named}, are those of a micro-batch"
    return (
        "the loss or the forward looks at the whole batch (a router's auxiliary loss, a contrastive loss, a mean over "
        "something that is not counted in the batch), and sees micro-batches, as with gradient accumulation in one "
        "process"
    )


def _gradients(model: nn.Module, workload: Workload, batch: Any, *, seed: int = 0) -> Gradients:
    """A batch's gradients, by parameter."""
    model.zero_grad()
    torch.manual_seed(seed)
    inputs, target = batch
    workload.loss(call(model, inputs), target).backward()
    return {name: None if p.grad is None else dense(p.grad) for name, p in model.named_parameters()}


def _sum(parts: Sequence[Gradients], factors: Sequence[float]) -> Gradients:
    """The sum of share × gradient; a part without a gradient adds nothing, nor one without a share."""
    total: Gradients = {}
    for name in parts[0]:
        pairs = zip(parts, factors, strict=True)
        scaled = [value * factor for part, factor in pairs if (value := part[name]) is not None and factor]
        total[name] = torch.stack(scaled).sum(0) if scaled else None
    return total


def _largest(found: Gradients, expected: Gradients) -> float:
    scale = largest_magnitude(expected.values())
    return largest(difference(found[name], expected[name], scale) for name in expected)
