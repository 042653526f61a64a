"""A global batch as the micro-batches that one replica of the pipeline runs, short ones included.

A batch of fewer rows than planned runs as full micro-batches and, where rows are left, one smaller micro-batch: first
the table of as many micro-batches as are full, then once more for the small one. Every loss counts for its share of
the whole batch, so that the gradients are those of these micro-batches in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autopipe.core.errors import UsageError
from autopipe.core.reduction import Reduction
from autopipe.core.units import many
from autopipe.runtime.running.shares import Piece, pieces, shares
from autopipe.runtime.workload import Inputs, rows


class Weighed(NamedTuple):
    """A micro-batch's target, and what its loss counts for."""

    target: Any
    share: float


@dataclass(frozen=True)
class Part:
    """Micro-batches of one size, ``rows``, that go through the table together; ``inputs`` are bound."""

    rows: int
    inputs: list[dict[str, torch.Tensor]]
    targets: list[Weighed]


def check_size(size: int, micro_batch: int, micro_batches: int, replicas: int, *, fixed: bool) -> None:
    """Raises UsageError for a batch that cannot be run, with the sizes that can. ``fixed``: no smaller micro-batch."""
    most = micro_batch * micro_batches * replicas
    each = f"{many(micro_batches, 'micro-batch')} of {micro_batch}" + (
        f" on {replicas} replicas" if replicas > 1 else ""
    )
    if not 0 < size <= most:
        raise UsageError(f"the batch has {size} rows, the plan takes 1 to {most} ({each})")
    if fixed and size % micro_batch:
        raise UsageError(
            f"the batch has {size} rows, this model runs in micro-batches of {micro_batch} only: "
            f"give a multiple of {micro_batch}, up to {most} ({each})"
        )


def share_of(parts: Sequence[Piece], replica: int, replicas: int) -> Sequence[Piece]:
    """The micro-batches of one replica: contiguous, as many as the others' or one more or less."""
    return parts[len(parts) * replica // replicas : len(parts) * (replica + 1) // replicas]


def divide(
    bound: dict[str, torch.Tensor],
    inputs: Inputs,
    target: Any,
    size: int,
    *,
    micro_batch: int,
    reduction: Reduction,
    replica: int = 0,
    replicas: int = 1,
) -> list[Part]:
    """One replica's micro-batches of a batch of ``size`` rows, by their size; none where it has no rows.

    ``bound`` are the ``inputs`` as the stages take them.
    """
    cuts = pieces(size, micro_batch)
    counts = dict(zip(cuts, shares(reduction, inputs, target, cuts), strict=True))
    own = share_of(cuts, replica, replicas)
    return [
        Part(
            length,
            [rows(bound, start, stop) for start, stop in run],
            [Weighed(rows(target, start, stop), counts[start, stop]) for start, stop in run],
        )
        for length, run in ((n, list(group)) for n, group in itertools.groupby(own, key=lambda cut: cut[1] - cut[0]))
    ]
