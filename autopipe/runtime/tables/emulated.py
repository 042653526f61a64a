"""Stages that keep the device busy, or wait, for a given time instead of computing, under torch's real runtime.

What the runtime and the messages cost beyond the stages' work is read off such a pipeline: how long one action waits
for the runtime to get to it, and how much longer when it asks for a message late (core/lowering.py). A whole plan is
rehearsed with them in rehearsal.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import autopipe.schedules  # noqa: F401  (registers 1F1B)
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import Action, Op, kind
from autopipe.core.timeline import Span
from autopipe.runtime.ranks.devices import synchronize
from autopipe.runtime.ranks.host import hurry_messages
from autopipe.runtime.tables.recorder import Recorder
from autopipe.runtime.tables.torch_ir import TorchRuntime

MESSAGE_NUMBERS, NUMBER_BYTES = 1 << 15, 8
MICRO_BATCHES = 12
STEPS = 4
SECONDS = (0.012, 0.006)
"""Forward seconds of the first and the second stage; backward takes twice as long."""


class Work(Protocol):
    """What a stage does instead of computing.

    ``forward`` and ``backward`` are given the first number of the message that they need, and return the first number
    of the one that they make: the rest of a message is whatever memory holds.
    """

    def forward(self, received: float, /) -> float:
        """A micro-batch's forward."""

    def backward(self, received: float, /) -> float:
        """The next backward, or its first half where it is split."""

    def weight_backward(self) -> Callable[[], None]:
        """The second half of the last backward, to be called later; nothing where it was whole."""


class EmulatedStage(nn.Module):
    """A stage that does its work, and passes on a message of ``sends`` numbers for one of ``receives``."""

    def __init__(self, index: int, work: Work, *, receives: int, sends: int, deferred: bool = False) -> None:
        super().__init__()
        self.index, self.deferred = index, deferred
        self.weight = nn.Parameter(torch.zeros(receives, dtype=torch.float64))
        self._work, self._sends = work, sends

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A message for the received one; the first stage takes its own weight for one."""
        value = received[0] if received else self.weight
        result: torch.Tensor = _Worked.apply(value, self._work, self._sends)  # type: ignore[no-untyped-call]
        return (result,)

    def input_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """What it receives, as a meta tensor; the first stage nothing."""
        return (_meta(len(self.weight)),) if self.index else ()

    def output_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """What it sends, as a meta tensor."""
        return (_meta(self._sends),)

    def weight_backward(self) -> Callable[[], None]:
        """The second half of its last backward."""
        return self._work.weight_backward()


def _meta(numbers: int) -> torch.Tensor:
    return torch.empty(numbers, dtype=torch.float64, device="meta").requires_grad_()


class _Worked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, work: Work, sends: int) -> torch.Tensor:
        ctx.work, ctx.receives = work, len(value)
        return _message(value, sends, work.forward(float(value[0])))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _message(gradients[0], ctx.receives, ctx.work.backward(float(gradients[0][0]))), None, None


def _message(like: torch.Tensor, numbers: int, first: float) -> torch.Tensor:
    message = like.new_empty(numbers)
    message[0] = first
    return message


class Busy:
    """Work that keeps the device computing for a stage's seconds."""

    def __init__(self, forward_s: float, backward_s: float, device: torch.device) -> None:
        self._times, self._device = (forward_s, backward_s), device
        self._factor = torch.ones(128, 128, device=device)

    def forward(self, received: float) -> float:
        """Compute for the forward's seconds."""
        return self._compute(self._times[0])

    def backward(self, received: float) -> float:
        """Compute for the backward's seconds."""
        return self._compute(self._times[1])

    def weight_backward(self) -> Callable[[], None]:
        """Nothing is put off."""
        return lambda: None

    def _compute(self, seconds: float) -> float:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(self._factor, self._factor)
            synchronize(self._device)
        return 0.0


def runtime_costs(
    device: torch.device, group: dist.ProcessGroup | None = None, numbers: int = MESSAGE_NUMBERS
) -> tuple[float, float]:
    """Seconds between two actions when nothing is waited for, and those that a late receive waits beyond that.

    Messages of so many ``numbers`` of 8 bytes take next to no time over the link; what they take is not told apart.
    Ranks 0 and 1 of the group run 1F1B with a slow first stage, whose gradients are there before it asks for them;
    both ranks must call it, and each gets its own part: rank 1 no late receives, hence 0.
    """
    rank = dist.get_rank(group)
    hurry_messages()  # the group's threads too
    schedule = kind("1F1B").schedule(2, MICRO_BATCHES)
    work = Busy(SECONDS[rank], 2 * SECONDS[rank], device)
    stage = EmulatedStage(rank, work, receives=numbers, sends=numbers).to(device)
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
