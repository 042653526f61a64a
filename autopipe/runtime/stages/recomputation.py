"""Layers that keep only their inputs: their forward runs again before their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import checkpoint

from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.opaque import calls_in
from autopipe.runtime.capture.program import NORMS_WITH_STATISTICS, Program, state_storages, storages, written

Function = Callable[..., tuple[torch.Tensor, ...]]


def is_repeatable(program: Program, layout: Layout, layer: int) -> bool:
    """Whether a layer's forward may run twice.

    It must not read a buffer that it changes, running statistics apart, nor leave anything behind in a module that is
    kept whole, nor share memory that is changed in place with another layer.
    """
    operations = [node for node, number in layout.layer.items() if number == layer]
    if any(call.known.left_behind() for node in operations for call in calls_in(node)):
        return False
    kept = state_storages(program)
    inside = set(operations)
    given = {arg for node in operations for arg in node.all_input_nodes} - inside
    if any(storages(arg) & (layout.changed - kept) for arg in given):
        return False
    own = {key for node in operations for arg in written(node) for key in storages(arg)} & kept
    touching = [n for n in operations if any(storages(arg) & own for arg in n.all_input_nodes)]
    return all(n.target in NORMS_WITH_STATISTICS or not inside.intersection(n.users) for n in touching)


def recomputed(function: Function, changed: Sequence[int], random: bool) -> Function:
    """A function that keeps only its arguments for the backward.

    ``changed`` are the arguments, buffers of the model, that the first run may change and the second may not.
    """

    def run_kept(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not torch.is_grad_enabled():
            return function(*given)
        runs = 0

        def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal runs
            runs += 1
            # not arguments of the checkpoint, which would refuse to see them changed
            buffers = [given[n] if runs == 1 else given[n].clone() for n in changed]
            return function(*_merged(values, changed, buffers))

        values = [value for n, value in enumerate(given) if n not in changed]
        made: tuple[torch.Tensor, ...] = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=random)
        return made

    return run_kept


def _merged(
    values: Sequence[torch.Tensor], places: Sequence[int], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The values, with the others put in at their places; places ascend."""
    merged = list(values)
    for place, other in zip(places, others, strict=True):
        merged.insert(place, other)
    return merged
