"""Whether a batch's gradient is the mean of its micro-batches' gradients, which is what any pipeline computes.

It is for models whose loss is a mean over rows. It is not for batch statistics, for a loss that is a sum, for a mean
over unequal numbers of tokens, for a router's auxiliary loss. Such a model trains all the same, as it would with
gradient accumulation in one process, but not as with the whole batch at once; so it is said before anything runs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from autopipe.core.units import format_percent
from autopipe.runtime.parity import TOLERANCE, difference, without_dropout
from autopipe.runtime.workload import Workload, call, rows

ROWS = 2
"""Rows of a micro-batch here; the batch has two of them."""
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
Gradients = dict[str, torch.Tensor | None]


def micro_batch_note(workload: Workload, dtype: str) -> str | None:
    """One line on how micro-batched gradients differ from the whole batch's and why; None where they do not.

    Dropout is off. Differences below ten times the parity's tolerance are rounding.
    """
    model = without_dropout(copy.deepcopy(workload.model))
    batch = workload.batch(2 * ROWS)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    whole = _gradients(model, workload, [batch])
    for name, buffer in model.named_buffers():
        buffer.copy_(state[name])
    parts = _gradients(model, workload, [rows(batch, 0, ROWS), rows(batch, ROWS, 2 * ROWS)])
    tolerance = 10 * TOLERANCE.get(getattr(torch, dtype), 2e-2)
    mean = _largest({name: _times(value, 0.5) for name, value in parts.items()}, whole)
    if mean <= tolerance:
        return None
    if _largest(parts, whole) <= tolerance:
        return (
            "the loss is a sum over rows: a pipeline averages its micro-batches, so gradients come out divided by "
            "their number; return a mean, or multiply the learning rate"
        )
    return f"gradients of micro-batches differ from the whole batch's by {format_percent(mean)}: {_cause(model)}"


def _cause(model: nn.Module) -> str:
    named = next((name for name, module in model.named_modules() if isinstance(module, _BATCH_STATISTICS)), None)
    if named is not None:
        return f"batch statistics, as in {named}, are those of a micro-batch"
    return (
        "the loss is no mean over rows (a mean over unequal numbers of tokens, or a router's auxiliary loss, is not), "
        "as with gradient accumulation in one process"
    )


def _gradients(model: nn.Module, workload: Workload, batches: list[Any]) -> Gradients:
    """The sum of the batches' gradients, by parameter."""
    model.zero_grad()
    for inputs, target in batches:
        workload.loss(call(model, inputs), target).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _times(value: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    return None if value is None else value * factor


def _largest(found: Gradients, expected: Gradients) -> float:
    values = [value for value in expected.values() if value is not None]
    largest = max((float(value.abs().max()) for value in values if value.numel()), default=0.0)
    return max((difference(found[name], expected[name], largest) for name in expected), default=0.0)
