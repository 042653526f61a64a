"""Run a plan on local processes, and compare: step time, stage times, peak memory; losses and gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopipe.core import files
from autopipe.core.errors import FileError, ModelError, UsageError
from autopipe.core.paths import seen
from autopipe.core.plan import Plan
from autopipe.core.result import CheckResult, Measured, MeasuredStage, Parity
from autopipe.core.schedule import Op
from autopipe.core.spread import spread
from autopipe.core.timeline import Memory, Span, Timeline
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.checking.parity import TOLERANCE, RankParity, compare, has_dropout, relative, without_dropout
from autopipe.runtime.checking.updates import compare_updates, measured_delays, periods, timed_run
from autopipe.runtime.ranks import launch, watching
from autopipe.runtime.ranks.devices import cores, device_for, own_device
from autopipe.runtime.ranks.memory import LiveBytes, resident_bytes
from autopipe.runtime.running.batches import Part
from autopipe.runtime.running.piecewise import kept_tensors
from autopipe.runtime.running.replicas import Replica, require_equal
from autopipe.runtime.running.runner import Runner, make_optimizer
from autopipe.runtime.workload import InMemory, Inputs, ModelFile, Source, Workload, rows

WARM_STEPS = 2
MIN_STEPS, MAX_STEPS = 5, 30
_DRAWN = "the forward draws random numbers: parity was checked with equal ones in both runs"
MEASURING_S = 10.0
"""About how long warm steps are repeated, between the fewest and the most."""


@dataclass
class RankResult:
    """What one rank brings back."""

    parity: RankParity
    steps: list[list[Span]]
    peak_bytes: int
    resident_bytes: int
    notes: tuple[str, ...]
    staleness: tuple[float, ...] = ()


def check(
    plan: Plan | str | Path,
    *,
    model: str | InMemory | None = None,
    timeout_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> CheckResult:
    """Run a plan and compare it with its prediction and with one process.

    ``model`` replaces the plan's model file; a plan for a model that was never a file needs it. ``timeout_s`` is how
    long no rank may move, by default the larger of 30 s and 10 predicted steps. Raises FileError when the model file
    is not the one that was planned, RankFailed when a rank dies or hangs.
    """
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    plan = require_equal(plan if isinstance(plan, Plan) else files.load(plan))
    source = _source(plan, folder, model)
    limit = max(30.0, 10 * plan.predicted.step_s) if timeout_s is None else timeout_s
    kind = device_for(plan.device)
    ranks = launch.launch(
        check_rank,
        (plan, source, kind),
        ranks=plan.depth * plan.replicas,
        timeout_s=limit,
        threads=plan.threads,
        device=kind,
        progress=progress,
    )
    return combine(plan, ranks, kind)


def _source(plan: Plan, folder: Path, model: str | InMemory | None) -> Source:
    if isinstance(model, InMemory):
        return model
    if model is None and plan.model.path is None:
        raise UsageError(f"the plan of {plan.model.name} names no model file: give one with --model FILE")
    if model is not None:
        return ModelFile.parse(model)
    source = ModelFile(seen(str(plan.model.path), folder), plan.model.builder)
    if plan.model.digest and source.digest != plan.model.digest:
        raise FileError(
            f"{source.path} has changed since it was planned (digest {source.digest[:12]}, "
            f"planned {plan.model.digest[:12]}): plan again, or give --model {source.path} to run it all the same"
        )
    return source


def check_rank(plan: Plan, source: Source, kind: str) -> RankResult:
    """One rank's part: parity first, then warm steps with the clock, then one under the memory counter."""
    device = own_device(kind)
    launch.beat.phase(watching.BUILDING)
    workload = source.open()
    workload.model.to(device)
    batch = workload.batch(plan.global_batch)
    replica = Replica.join(plan.depth, plan.replicas)
    parity, notes = _parity(plan, source, device, replica)
    launch.beat.phase(watching.CAPTURING)
    runner = runner_of(plan, workload, batch, device, replica)
    notes = (*runner.captured.notes, *notes)
    optimizer = make_optimizer(plan.update, runner.parameters, 1e-6, replica.peers)
    if runner.schedule.asynchronous:
        return _check_updates(plan, runner, batch, optimizer, parity, notes)
    steps, peak = _timed(runner, batch, optimizer, steps_to_measure(plan.predicted.step_s))
    return RankResult(parity, steps, peak, resident_bytes(), notes)


def _check_updates(
    plan: Plan,
    runner: Runner,
    batch: tuple[Inputs, Any],
    optimizer: torch.optim.Optimizer,
    parity: RankParity,
    notes: tuple[str, ...],
) -> RankResult:
    """The same of an asynchronous plan: one long run with the clock, a short one under the memory counter."""
    updates = steps_to_measure(plan.predicted.step_s)
    launch.beat.phase(f"running {updates} updates without a flush")
    timed_run(runner, batch, optimizer, 0)
    spans, met = timed_run(runner, batch, optimizer, updates)
    launch.beat.phase("counting memory")
    live = LiveBytes([*runner.known_tensors(), *kept_tensors(optimizer)])
    with live:
        timed_run(runner, batch, optimizer, 0)
    staleness = tuple(measured_delays(runner.schedule, met, updates))
    return RankResult(parity, [spans], live.peak, resident_bytes(), notes, staleness)


def _timed(
    runner: Runner, batch: tuple[Inputs, Any], optimizer: torch.optim.Optimizer, count: int
) -> tuple[list[list[Span]], int]:
    """The spans of so many warm steps, and the peak of one more under the memory counter."""
    parts, steps = runner.split(*batch), []
    launch.beat.phase("running warm steps")
    for index in range(WARM_STEPS + count):
        runner.timed_step(parts, optimizer)
        if index >= WARM_STEPS:
            steps.append(runner.recorder.spans())
    launch.beat.phase("counting memory")
    return steps, peak_bytes(runner, parts, optimizer)


def runner_of(
    plan: Plan, workload: Workload, batch: tuple[Inputs, Any], device: torch.device, replica: Replica | None = None
) -> Runner:
    """A rank's part of a plan: the model captured for the plan's micro-batch, its stages built.

    ``replica`` is where this process stands, if it is known already: all processes must ask for it together. Raises
    ModelError when the model's layers are not the plan's.
    """
    replica = replica or Replica.join(plan.depth, plan.replicas)
    return Runner(
        _captured(plan, workload, batch),
        plan.schedule.parsed(),
        plan.cuts,
        micro_batch=plan.micro_batch,
        loss_fn=workload.loss,
        device=device,
        recompute=plan.recompute,
        replica=replica,
        reduction=plan.reduction,
    )


def _captured(plan: Plan, workload: Workload, batch: tuple[Inputs, Any]) -> Captured:
    inputs, target = rows(batch, 0, max(plan.micro_batch, min(2, plan.global_batch)))
    captured = capture(workload.model, inputs, loss=lambda made: workload.loss(made, target))
    names = tuple(layer.name for layer in captured.layers)
    planned = tuple(name for stage in plan.parts for name in stage.layers)
    if names != planned:
        wrong = next((pair for pair in zip(names, planned, strict=False) if pair[0] != pair[1]), None)
        where = f"{wrong[0]} where the plan has {wrong[1]}" if wrong else f"{len(names)} layers, planned {len(planned)}"
        raise ModelError(f"{workload.name} is not the model that was planned: {where}. Plan it again")
    return captured


def _parity(plan: Plan, source: Source, device: torch.device, replica: Replica) -> tuple[RankParity, tuple[str, ...]]:
    """Of a model built for this and one more as its reference: not every model can be copied."""
    workload, reference = source.open(), source.open().model
    notes = ("parity was checked with dropout off, in both runs",) if has_dropout(reference) else ()
    for model in (workload.model, reference):
        without_dropout(model).to(device)
    batch = workload.batch(plan.global_batch)
    runner = runner_of(plan, workload, batch, device, replica)
    if runner.schedule.asynchronous:
        return compare_updates(runner, plan.cuts, reference, workload, batch), notes
    parity = compare(runner, reference, workload, batch)
    return parity, (*notes, _DRAWN) if parity.drawn else notes


def peak_bytes(runner: Runner, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> int:
    """The most bytes of tensors that were alive in a step, inputs left out."""
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runner.device)
        runner.timed_step(parts, optimizer)
        return torch.cuda.max_memory_allocated(runner.device)
    live = LiveBytes([*runner.known_tensors(), *kept_tensors(optimizer)])
    with live:
        runner.timed_step(parts, optimizer)
    return live.peak


def steps_to_measure(predicted_s: float, seconds: float = MEASURING_S) -> int:
    """How many warm steps are timed: equal on all ranks, so it must not depend on a measurement."""
    return max(MIN_STEPS, min(MAX_STEPS, math.ceil(seconds / max(predicted_s, 1e-9))))


def combine(plan: Plan, ranks: list[RankResult], kind: str) -> CheckResult:
    """The ranks' parts as one result."""
    memory = tuple((Memory(0.0, rank.peak_bytes),) for rank in ranks)
    steps = zip(*(rank.steps for rank in ranks), strict=True)
    timelines = [Timeline.of_ranks(parts, "measured", memory) for parts in steps]
    schedule = plan.schedule.parsed()
    if schedule.asynchronous:
        timelines = periods(schedule, timelines[0], steps_to_measure(plan.predicted.step_s))
    seconds = [timeline.step_s for timeline in timelines]
    step_s = statistics.median(seconds)
    typical = min(timelines, key=lambda timeline: abs(timeline.step_s - step_s))
    peaks = _by_rank(plan, [rank.peak_bytes for rank in ranks])
    notes = [note for rank in ranks for note in rank.notes]
    if kind == "cpu" and len(ranks) * plan.threads > cores():
        notes.append(f"{len(ranks)} ranks of {plan.threads} threads share {cores()} cores: parity counts, times do not")
    return CheckResult(
        plan_digest=plan.digest,
        predicted=plan.predicted,
        measured=Measured(
            step_s,
            spread(seconds),
            plan.global_batch / step_s,
            peaks,
            _by_rank(plan, [rank.resident_bytes for rank in ranks]),
        ),
        error=step_s / plan.predicted.step_s - 1,
        parity=_joined_parity(plan, [rank.parity for rank in ranks]),
        timeline=typical,
        stages=tuple(_stage(timelines, stage.index) for stage in plan.stages),
        notes=tuple(dict.fromkeys(notes)),
        staleness=tuple(age for rank in ranks for age in rank.staleness),
    )


def _by_rank(plan: Plan, sizes: list[int]) -> tuple[int, ...]:
    """The largest of each rank's replicas, for as many processes as the plan has a prediction for."""
    count = len(plan.predicted.peak_bytes)
    return tuple(max(sizes[rank::count]) for rank in range(min(count, len(sizes))))


def _stage(timelines: list[Timeline], stage: int) -> MeasuredStage:
    """Medians of a stage's forwards and backwards over all steps; I and W of a micro-batch count as one backward."""
    sums: dict[Op, list[float]] = {op: [] for op in Op}
    for timeline in timelines:
        for span in timeline.spans:
            if span.action.stage == stage:
                sums[span.action.op].append(span.end_s - span.start_s)
    median = {op: statistics.median(values) if values else 0.0 for op, values in sums.items()}
    whole = sums[Op.B] or [median[Op.I] + median[Op.W]]
    return MeasuredStage(median[Op.F], statistics.median(whole))


def _joined_parity(plan: Plan, parts: list[RankParity]) -> Parity:
    losses = [sum(each) for each in zip(*(part.losses for part in parts if part.losses), strict=True)]
    references = parts[0].reference_losses
    worst = max(parts, key=lambda part: (math.isnan(part.max_gradient_difference), part.max_gradient_difference))
    tolerance = TOLERANCE[getattr(torch, plan.dtype)]
    loss_difference = relative(losses, references)
    passed = loss_difference <= tolerance and worst.max_gradient_difference <= tolerance
    return Parity(
        passed=passed,
        max_loss_difference=loss_difference,
        max_gradient_difference=worst.max_gradient_difference,
        losses=tuple(losses),
        reference_losses=tuple(references),
        tolerance=tolerance,
        worst=worst.worst,
    )


@dataclass(frozen=True)
class Tried:
    """What a trial showed: medians over its steps, and each rank's peak."""

    step_s: float
    spread: float
    stages: tuple[MeasuredStage, ...]
    peak_bytes: tuple[int, ...]


def try_plan(
    plan: Plan, model: str, *, timeout_s: float, seconds: float, progress: Callable[[str], None] | None = None
) -> Tried:
    """Time a plan on local processes for about some ``seconds``; losses and gradients are not compared.

    Raises the error of the first rank that fails, RankFailed where one dies or hangs.
    """
    kind = device_for(plan.device)
    parts = launch.launch(
        trial_rank,
        (plan, ModelFile.parse(model), kind, seconds),
        ranks=plan.depth * plan.replicas,
        timeout_s=timeout_s,
        threads=plan.threads,
        device=kind,
        progress=progress,
    )
    timelines = [Timeline.of_ranks(step, "measured") for step in zip(*(steps for steps, _ in parts), strict=True)]
    steps_s = [timeline.step_s for timeline in timelines]
    stages = tuple(_stage(timelines, stage.index) for stage in plan.stages)
    return Tried(statistics.median(steps_s), spread(steps_s), stages, tuple(peak for _, peak in parts))


def trial_rank(plan: Plan, source: Source, kind: str, seconds: float) -> tuple[list[list[Span]], int]:
    """One rank's part of a trial: the spans of its warm steps, and its peak."""
    device = own_device(kind)
    launch.beat.phase(watching.BUILDING)
    workload = source.open()
    workload.model.to(device)
    batch = workload.batch(plan.global_batch)
    launch.beat.phase(watching.CAPTURING)
    runner = runner_of(plan, workload, batch, device)
    optimizer = make_optimizer(plan.update, runner.parameters, 1e-6, runner.replica.peers)
    return _timed(runner, batch, optimizer, steps_to_measure(plan.predicted.step_s, seconds))
