"""A plan at its full number of ranks on whatever machine is there: real runtime, real messages, waiting for computing.

Each rank is a process that sleeps for as long as its stage would compute, so sixteen ranks run on two cores. A message
carries the moment it was sent; who receives it waits until the plan's link would have delivered it. What the machine
itself adds, the runtime's work for an action and the real way of a message, is measured first on another pipeline of
as many ranks (even stages under 1F1B) and is put into the prediction that the rehearsal is held against.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

import autopipe.schedules  # noqa: F401  (registers 1F1B)
from autopipe.core.cluster import Link
from autopipe.core.errors import UsageError
from autopipe.core.in_flight import kept
from autopipe.core.plan import Plan
from autopipe.core.result import Rehearsal
from autopipe.core.schedule import Action, Op, Schedule, kind, stages_on
from autopipe.core.spread import spread
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Span, Timeline
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import machine_bytes
from autopipe.runtime.ranks.host import sleep_until, wake_exactly
from autopipe.runtime.running.replicas import require_equal
from autopipe.runtime.tables.emulated import NUMBER_BYTES, EmulatedStage
from autopipe.runtime.tables.torch_ir import TorchRuntime
from autopipe.simulate import simulate

SHORTEST_S = 0.01
"""The median forward is stretched to this, and everything with it: shorter waits are not kept exactly enough."""
STEPS, WARM_STEPS = 5, 1
CALIBRATION_STEPS = 3
EVEN = (0.01, 0.02)
"""Forward and backward seconds of the pipeline that the machine's own costs are read off."""


class Costs(NamedTuple):
    """What the machine adds: seconds an action, seconds on the way of an empty message and of the largest one."""

    overhead_s: float
    empty_s: float
    largest_s: float

    def way_s(self, part: float) -> float:
        """The way of a message of a part of the largest one's size."""
        return self.empty_s + (self.largest_s - self.empty_s) * part


class Done(NamedTuple):
    """A span in this machine's clock, and when its value would have arrived at the earliest."""

    span: Span
    sent_s: float
    wanted_s: float


@dataclass
class Waiting:
    """A stage's actions in their order, each a wait; see emulated.Work. ``ways_s`` are forward's and backward's links.

    ``seconds`` is what each operation takes.
    """

    rank: int
    actions: tuple[Action, ...]
    seconds: dict[Op, float]
    ways_s: tuple[float, float]
    done: list[Done] = field(default_factory=list)
    _backward: Action | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin another step."""
        self.done = []
        self._forwards = iter([a for a in self.actions if a.op is Op.F])
        self._backwards = iter([a for a in self.actions if a.op in (Op.B, Op.I)])

    def forward(self, received: float) -> float:
        """Wait for the value's arrival, then for the forward's time; the moment of the end."""
        return self._wait(next(self._forwards), received, self.ways_s[0])

    def backward(self, received: float) -> float:
        """The same for a backward, or its first half."""
        self._backward = next(self._backwards)
        return self._wait(self._backward, received, self.ways_s[1])

    def weight_backward(self) -> Callable[[], None]:
        """The second half of the last backward, where that is split."""
        action = self._backward
        if action is None or action.op is not Op.I:
            return lambda: None
        return lambda: self._run(action._replace(op=Op.W))

    def optimizer(self, stage: int) -> None:
        """The step's end."""
        self._run(Action(stage, Op.O, 0))

    def _run(self, action: Action) -> None:
        self._wait(action, 0.0, 0.0)

    def _wait(self, action: Action, sent_s: float, way_s: float) -> float:
        launch.beat(str(action))
        sleep_until(sent_s + way_s if sent_s else 0.0)
        start = time.perf_counter()
        sleep_until(start + self.seconds[action.op])
        end = time.perf_counter()
        self.done.append(Done(Span(self.rank, action, start, end), sent_s, self.seconds[action.op]))
        launch.beat(f"a wait after {action}", waiting=True)
        return time.perf_counter()


class Job(NamedTuple):
    """A pipeline to be run: its table, and for each stage seconds by operation, links' seconds, and message sizes.

    ``sends`` are the numbers in the message to the next stage.
    """

    schedule: Schedule
    seconds: tuple[dict[Op, float], ...]
    ways_s: tuple[float, ...]
    sends: tuple[int, ...]


def rehearse(plan: Plan, *, timeout_s: float | None = None, progress: Callable[[str], None] | None = None) -> Rehearsal:
    """Run a plan with stages that wait. Raises UsageError for a plan that torch's runtime does not run."""
    require_equal(plan)
    if plan.schedule.executor != "torch":
        raise UsageError(f"{plan.schedule.name} does not run on torch's pipeline runtime: it cannot be rehearsed")
    ranks = plan.depth
    factor = max(1.0, SHORTEST_S / statistics.median(stage.costs.forward_s or SHORTEST_S for stage in plan.stages))
    shrink = message_part(plan)
    largest = max([1, *(_numbers(stage.costs.send_bytes * shrink) for stage in plan.stages)])
    job = planned_job(plan, factor, shrink)
    parts = launch.launch(
        run_rank,
        (job, even_job(ranks, 1), even_job(ranks, largest)),
        ranks=ranks,
        timeout_s=max(30.0, 10 * factor * plan.predicted.step_s) if timeout_s is None else timeout_s,
        progress=progress,
    )
    costs = machine_costs(parts)
    done = list(zip(*(part.steps for part in parts), strict=True))[WARM_STEPS:]
    steps = [Timeline.of_ranks([[d.span for d in part] for part in step], "emulated") for step in done]
    seconds = [line.step_s for line in steps]
    typical = min(steps, key=lambda line: abs(line.step_s - statistics.median(seconds)))
    return Rehearsal(
        plan_digest=plan.digest,
        predicted=expected(plan, job, factor, costs),
        measured=typical,
        step_s=statistics.median(seconds),
        spread=spread(seconds),
        factor=factor,
        overhead_s=costs.overhead_s,
        message_s=costs.empty_s,
        notes=tuple(_notes(plan, factor, shrink)),
    )


def _notes(plan: Plan, factor: float, shrink: float) -> Iterator[str]:
    if factor > 1:
        yield f"all times are stretched {factor:.3g} times: shorter waits would not be exact"
    if shrink < 1:
        yield f"messages have {shrink:.1%} of their size, to fit this machine's memory; their time is the full one"
    if plan.replicas > 1:
        yield f"one of {plan.replicas} replicas is rehearsed"


def message_part(plan: Plan) -> float:
    """The part of its size that a message can have so that all ranks' buffers fit a quarter of this machine."""
    crossings = kept(plan.schedule.parsed())
    total = sum(stage.costs.buffers_bytes(*crossings[stage.index]) for stage in plan.stages)
    return min(1.0, machine_bytes() / 4 / max(total, 1))


def planned_job(plan: Plan, factor: float, shrink: float) -> Job:
    """The plan with every time multiplied."""
    hops = zip(plan.hops, plan.stages, strict=False)
    ways = [factor * hop.transfer_s(stage.costs.send_bytes) if hop else 0.0 for hop, stage in hops]
    seconds = tuple(_seconds(_times(stage.costs, factor)) for stage in plan.stages)
    sends = tuple(_numbers(stage.costs.send_bytes * shrink) for stage in plan.stages)
    return Job(plan.schedule.parsed(), seconds, tuple(ways), sends)


def _times(costs: StageCost, factor: float) -> StageCost:
    names = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s", "optimizer_s")
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})


def _seconds(costs: StageCost) -> dict[Op, float]:
    return dict(zip((Op.F, Op.B, Op.I, Op.W), costs.times, strict=True)) | {Op.O: costs.optimizer_s}


def _numbers(size: float) -> int:
    return max(1, round(size / NUMBER_BYTES))


def even_job(ranks: int, numbers: int) -> Job:
    """The pipeline that the machine's costs are read off: even stages, links that take no time."""
    seconds = {Op.F: EVEN[0], Op.B: EVEN[1], Op.I: 0.0, Op.W: 0.0, Op.O: 0.0}
    schedule = kind("1F1B").schedule(ranks, ranks + 4)
    return Job(schedule, (seconds,) * ranks, (0.0,) * (ranks - 1), (numbers,) * ranks)


@dataclass
class RankPart:
    """What a rank brings back: the steps of the plan, and those of the even pipelines."""

    steps: list[list[Done]]
    small: list[list[Done]]
    large: list[list[Done]]


def run_rank(job: Job, small: Job, large: Job) -> RankPart:
    """One rank's part: the even pipelines first, then the plan."""
    wake_exactly()
    launch.beat.phase("measuring the runtime")
    found = [run_job(each, 1 + CALIBRATION_STEPS)[1:] for each in (small, large)]
    launch.beat.phase("rehearsing the plan")
    return RankPart(run_job(job, WARM_STEPS + STEPS), *found)


def run_job(job: Job, steps: int) -> list[list[Done]]:
    """Run a pipeline; what this rank did in each step, in its order."""
    rank, schedule = dist.get_rank(), job.schedule
    own = stages_on(schedule.placement, rank)
    works = [_work(job, stage) for stage in own]
    modules = [_stage(job, stage, work) for stage, work in zip(own, works, strict=True)]
    device = torch.device("cpu")
    runtime = TorchRuntime(schedule, modules, 1, device, lambda output, target: output[0].sum())
    batches = schedule.micro_batches
    found = []
    for _ in range(steps):
        for work in works:
            work.restart()
        dist.barrier()
        runtime.step([{}] * batches, [None] * batches)
        for stage, work in zip(own, works, strict=True):
            work.optimizer(stage)
        found.append(sorted((done for work in works for done in work.done), key=lambda done: done.span.start_s))
    return found


def _work(job: Job, stage: int) -> Waiting:
    rank = job.schedule.placement[stage]
    actions = tuple(action for action in job.schedule.order[rank] if action.stage == stage)
    before, behind = (job.ways_s[i] if 0 <= i < len(job.ways_s) else 0.0 for i in (stage - 1, stage))
    return Waiting(rank, actions, job.seconds[stage], (before, behind))


def _stage(job: Job, stage: int, work: Waiting) -> EmulatedStage:
    last = stage == job.schedule.stages - 1
    return EmulatedStage(
        stage,
        work,
        receives=job.sends[stage - 1] if stage else 1,
        sends=1 if last else job.sends[stage],
        deferred=job.schedule.splits_backward,
    )


def machine_costs(parts: Sequence[RankPart]) -> Costs:
    """The machine's costs from the even pipelines of all ranks.

    An action that had nothing to wait for shows what the runtime takes before it and how far it overruns its wait; one
    that had been waited for shows the way of its message.
    """
    gap_s = statistics.median(_gaps([step for part in parts for step in part.small]))
    over_s = statistics.fmean(_overruns([step for part in parts for step in part.small]))
    ways = [
        max(0.0, statistics.median([*_ways(steps), gap_s]) - gap_s) if len(parts) > 1 else 0.0
        for steps in ([s for p in parts for s in p.small], [s for p in parts for s in p.large])
    ]
    return Costs(gap_s + over_s, ways[0], max(ways))


def _gaps(steps: list[list[Done]]) -> list[float]:
    """Between two actions of which the second's value was there long before: sent when the first had not begun."""
    return [
        after.span.start_s - before.span.end_s
        for step in steps
        for before, after in pairwise(step)
        if after.span.action.op is not Op.O and after.sent_s < before.span.start_s
    ]


def _overruns(steps: list[list[Done]]) -> list[float]:
    return [d.span.end_s - d.span.start_s - d.wanted_s for step in steps for d in step if d.span.action.op is not Op.O]


def _ways(steps: list[list[Done]]) -> list[float]:
    """From the moment a message is sent to the action that had been waiting for it."""
    return [
        after.span.start_s - after.sent_s
        for step in steps
        for before, after in pairwise(step)
        if after.sent_s > before.span.end_s
    ]


def expected(plan: Plan, job: Job, factor: float, costs: Costs) -> Timeline:
    """What the rehearsal should take: the plan's times stretched, and the machine's costs on top."""
    stages = [_times(stage.costs, factor) for stage in plan.stages]
    largest = max(job.sends)
    hops: list[Link | None] = []
    for hop, way_s, numbers in zip(plan.hops, job.ways_s, job.sends, strict=False):
        seconds = max(way_s, costs.way_s(numbers / largest))
        hops.append(Link(seconds, 1e30) if hop else None)
    return simulate(job.schedule, stages, hops, overhead_s=costs.overhead_s)
