"""What a check of an asynchronous plan runs: the same updates in one process, and a timed run without a flush."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.periodic import for_updates, steady
from autopipe.core.schedule import Op, Schedule
from autopipe.core.timeline import Span, Timeline
from autopipe.core.versions import delays
from autopipe.runtime.checking.parity import LEARNING_RATE, RankParity, difference, largest_magnitude
from autopipe.runtime.own.executor import Met
from autopipe.runtime.own.pipemare import PipeMare
from autopipe.runtime.own.recurrence import Recurrence, stage_of
from autopipe.runtime.own.training import Training
from autopipe.runtime.ranks import launch
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.running.shares import pieces, shares
from autopipe.runtime.workload import Inputs, Workload, batch_size, call, rows

MITIGATION = PipeMare(annealing=10)
"""What a check of PipeMare runs with."""


def table_for(schedule: Schedule) -> Schedule:
    """The fewest updates whose last ones are as late as any: filling, and two of the steady part."""
    first, _ = steady(schedule)
    return for_updates(schedule, first + 2)


class _Noting(torch.optim.SGD):
    """SGD that keeps the gradients of each step."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self.noted: list[dict[int, torch.Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        """Keep, and step."""
        values = [p for group in self.param_groups for p in group["params"]]
        self.noted.append({id(p): p.grad.clone() for p in values if p.grad is not None})
        return super().step(closure)


def compare_updates(
    runner: Runner, cuts: Sequence[int], reference: nn.Module, workload: Workload, batch: Any
) -> RankParity:
    """Losses, and every gradient of every update, against the recurrence in one process."""
    table = table_for(runner.schedule)
    launch.beat.phase(f"comparing {table.updates} updates with one process")
    optimizer = _Noting([p for p in runner.parameters if p.requires_grad], LEARNING_RATE)
    mitigation = MITIGATION if table.weights == "latest" else None
    training = Training(runner.schedule, runner.own_executor(), mitigation)
    found = training.run(repeat(runner.whole(*batch)), table.updates, optimizer)
    launch.beat("the updates of one process")
    where = stage_of(runner.captured.owned, table, cuts)
    losses, gradients = Recurrence(reference, table, where, delays(runner.schedule), LEARNING_RATE, MITIGATION).run(
        lambda update, within: _loss(reference, workload, batch, runner, within)
    )
    result = RankParity(found if dist.get_rank() == 0 else [], losses)
    named = {name: p for module in runner.modules for name, p in module.named_parameters() if p.requires_grad}
    for noted, expected in zip(optimizer.noted, gradients, strict=True):
        most = largest_magnitude(expected.values())
        for name, parameter in named.items():
            result.note(name, difference(noted.get(id(parameter)), expected.get(name), most))
    return result


def _loss(
    reference: nn.Module, workload: Workload, batch: tuple[Inputs, Any], runner: Runner, within: int
) -> torch.Tensor:
    cuts = pieces(batch_size(batch[0]), runner.micro_batch)
    inputs, target = rows(batch, *cuts[within])
    return workload.loss(call(reference, inputs), target) * shares(runner.reduction, *batch, cuts)[within]


def timed_run(
    runner: Runner, batch: tuple[Inputs, Any], optimizer: torch.optim.Optimizer, updates: int
) -> tuple[list[Span], list[Met]]:
    """A run of so many updates more than filling and draining take: what ran when, and what weights were met."""
    training = Training(runner.schedule, runner.own_executor())
    feed: Iterator[Any] = repeat(runner.whole(*batch))
    executor = runner.own_executor()
    dist.barrier()
    executor.met.clear()
    runner.recorder.restart()
    training.run(feed, runner.schedule.updates + updates, optimizer)
    return runner.recorder.spans(), list(executor.met)


def periods(schedule: Schedule, run: Timeline, updates: int) -> list[Timeline]:
    """The steady part of a run, update by update as rank 0 made them."""
    first, last = steady(for_updates(schedule, schedule.updates + updates))
    ends = [span.end_s for span in run.spans if span.rank == 0 and span.action.op is Op.O]
    lines = []
    for start, end in pairwise(ends[first : last + 1]):
        line = run.between(start, end)
        lines.append(Timeline(run.ranks, line.spans, run.memory, end - start, "measured"))
    return lines


def measured_delays(schedule: Schedule, met: Sequence[Met], updates: int) -> list[float]:
    """How many updates old the weights were that forwards met in the steady part, for each stage of a rank."""
    table = for_updates(schedule, schedule.updates + updates)
    first, last = (update * table.per_update for update in steady(table))
    stages = sorted({each.stage for each in met})
    return [
        fmean(
            each.micro_batch // table.per_update - each.forward
            for each in met
            if each.stage == stage and first <= each.micro_batch < last
        )
        for stage in stages
    ]
