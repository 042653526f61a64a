"""Stages that keep the device busy for a given time instead of computing, under torch's real runtime and messages.

What the runtime and the messages cost beyond the stages' work is read off such a pipeline: how long one action waits
for the runtime to get to it, and how much longer when it asks for a message late (core/lowering.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopipe.schedules  # noqa: F401  (registers 1F1B)
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import Action, Op, kind
from autopipe.core.timeline import Span
from autopipe.runtime.devices import synchronize
from autopipe.runtime.host import hurry_messages
from autopipe.runtime.recorder import Recorder
from autopipe.runtime.torch_ir import TorchRuntime

MESSAGE_ELEMENTS = 1 << 16
MICRO_BATCHES = 12
STEPS = 4
SECONDS = (0.012, 0.006)
"""Forward seconds of the first and the second stage; backward takes twice as long."""


class EmulatedStage(nn.Module):
    """A stage that passes one tensor of ``elements`` on and works for ``forward_s`` and ``backward_s`` meanwhile."""

    def __init__(
        self, index: int, forward_s: float, backward_s: float, work: Callable[[float], None], elements: int
    ) -> None:
        super().__init__()
        self.index, self.deferred = index, False
        self.weight = nn.Parameter(torch.zeros(elements))
        self._times = (forward_s, backward_s)
        self._work = work

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The received tensor, or its own first one, after ``forward_s``."""
        value = received[0] if received else self.weight
        result: torch.Tensor = _Worked.apply(value, self._work, *self._times)  # type: ignore[no-untyped-call]
        return (result,)

    def input_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """What it receives, as a meta tensor; the first stage nothing."""
        return self.output_args(micro_batch) if self.index else ()

    def output_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """What it sends, as a meta tensor."""
        return (torch.empty_like(self.weight, device="meta").requires_grad_(),)

    def weight_backward(self) -> Callable[[], None]:
        """Nothing is put off."""
        return lambda: None


class _Worked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, work: Callable[[float], None], *times: float) -> torch.Tensor:
        ctx.work, ctx.backward_s = work, times[1]
        work(times[0])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.work(ctx.backward_s)
        return gradients[0], None, None, None


def busy(device: torch.device) -> Callable[[float], None]:
    """Work that keeps the device computing for some seconds."""
    factor = torch.ones(128, 128, device=device)

    def work(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(factor, factor)
            synchronize(device)

    return work


def runtime_costs(device: torch.device, group: dist.ProcessGroup | None = None) -> tuple[float, float]:
    """Seconds between two actions when nothing is waited for, and those that a late receive waits beyond that.

    Ranks 0 and 1 of the group run 1F1B with a slow first stage, whose gradients are there before it asks for them;
    both ranks must call it, and each gets its own part: rank 1 no late receives, hence 0.
    """
    rank = dist.get_rank(group)
    hurry_messages()  # the group's threads too
    schedule = kind("1F1B").schedule(2, MICRO_BATCHES)
    stage = EmulatedStage(rank, SECONDS[rank], 2 * SECONDS[rank], busy(device), MESSAGE_ELEMENTS).to(device)
    runtime = TorchRuntime(schedule, [stage], 1, device, lambda output, target: output[0].sum(), group=group)
    recorder = Recorder(rank, device)
    for each in runtime.stages:
        recorder.watch(each)
    spans: list[list[Span]] = []
    for _ in range(STEPS + 1):
        dist.barrier(group)
        recorder.restart()
        runtime.step([{}] * MICRO_BATCHES, [None] * MICRO_BATCHES)
        spans.append(recorder.spans())
    return _gaps(spans[1:], posted_last(schedule), rank)


def _gaps(steps: list[list[Span]], late: frozenset[Action], rank: int) -> tuple[float, float]:
    plain, waited = [], []
    free = Op.F if rank == 0 else Op.B  # needs nothing of the other rank in the middle of the step
    for spans in steps:
        for before, span in list(pairwise(spans))[4:-4]:
            if span.action.op is free and before.action.op is not free:
                plain.append(span.start_s - before.end_s)
            elif span.action in late and rank == 0:
                waited.append(span.start_s - before.end_s)
    gap_s = statistics.median(plain)
    return gap_s, max(0.0, statistics.fmean(waited) - gap_s) if waited else 0.0
