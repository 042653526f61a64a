"""Parameters that several ranks hold: tied ones, and all of a two-way pipeline's. Their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.schedule import Schedule
from autopipe.runtime.capture import Captured


@dataclass(frozen=True)
class SharedGradients:
    """Parameters that the same ranks hold, and the group of those ranks."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    def sum(self) -> None:
        """Sum the gradients over the ranks, in one message for each type; one that is not there counts as zeros."""
        for dtype in dict.fromkeys(p.dtype for p in self.parameters):
            mine = [p for p in self.parameters if p.dtype is dtype]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in mine])
            dist.all_reduce(flat, group=self.group)
            for parameter, part in zip(mine, flat.split([p.numel() for p in mine]), strict=True):
                parameter.grad = part.view_as(parameter).clone()


def shared_gradients(captured: Captured, schedule: Schedule, cuts: Sequence[int]) -> list[SharedGradients]:
    """What this rank shares with others. Every rank makes every group, in one order: torch requires it."""
    by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in captured.model.named_parameters():
        ranks = holders(captured, schedule, cuts, name)
        if len(ranks) > 1 and parameter.requires_grad:
            by_ranks.setdefault(ranks, []).append(parameter)
    made = [(ranks, dist.new_group(list(ranks))) for ranks in by_ranks]
    return [SharedGradients(tuple(by_ranks[ranks]), group) for ranks, group in made if dist.get_rank() in ranks]


def holders(captured: Captured, schedule: Schedule, cuts: Sequence[int], name: str) -> tuple[int, ...]:
    """The ranks that hold a parameter, ascending."""
    bounds = [0, *cuts, len(captured.layers)]
    parts = {
        part
        for part, (start, stop) in enumerate(pairwise(bounds))
        if any(name in captured.owned[layer] for layer in range(start, stop))
    }
    placed = zip(schedule.placement, schedule.part_of, strict=True)
    return tuple(sorted({rank for rank, part in placed if part in parts}))
