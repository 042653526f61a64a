"""What a trainer runs of a plan, what is lost, and the step time that is predicted for what remains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopipe.core.cluster import Link
from autopipe.core.errors import AutopipeError, CannotExport
from autopipe.core.optimizer import Optimizer
from autopipe.core.plan import Plan, Stage
from autopipe.core.profile import Profile
from autopipe.core.reduction import MEAN
from autopipe.core.schedule import Schedule, kind
from autopipe.core.stage import StageCost, stage_cost
from autopipe.export.names import is_block, recomputes_blocks
from autopipe.export.trainer import Trainer
from autopipe.graph import Graph, costs_of
from autopipe.jitter import jitter_s
from autopipe.simulate import simulate


@dataclass(frozen=True)
class Remaining:
    """What a trainer runs.

    ``recompute`` has a stage's recomputed layers by name, ``update`` is its optimizer, ``losses`` what it does
    otherwise.
    """

    schedule: Schedule
    recompute: tuple[tuple[str, ...], ...]
    update: Optimizer
    losses: tuple[str, ...] = ()


def remaining(plan: Plan, trainer: Trainer) -> Remaining:
    """What the trainer runs of the plan. Raises CannotExport when it has no schedule for the plan's shape."""
    planned, recompute = plan.schedule.parsed(), tuple(stage.recompute for stage in plan.stages)
    if trainer.split_only:
        return Remaining(planned, recompute, plan.update)
    schedule, losses = planned, list[str]()
    if trainer.stock:
        schedule = _stock(plan, trainer.name, trainer.stock(plan))
        losses += _schedule_losses(planned, schedule, trainer.name)
    if trainer.averages and plan.reduction != MEAN:
        losses.append(f"the loss, {plan.reduction}: {trainer.name} averages the losses of micro-batches")
    blocks = tuple(tuple(filter(is_block, stage.layers)) for stage in plan.stages)
    again, every = _flat(recompute), _flat(blocks)
    if not trainer.recomputes_each and again and not every <= again:
        rest = recomputes_blocks(plan)
        losses.append(
            f"recomputation of {len(again)} of {plan.stages[-1].stop} layers: {trainer.name} recomputes "
            f"all blocks or none, here {'all' if rest else 'none'}"
        )
        recompute = blocks if rest else tuple(() for _ in blocks)
    update = _kept(plan.update, trainer)
    losses += _update_losses(plan, update, trainer.name)
    return Remaining(schedule, recompute, update, tuple(losses))


def _kept(update: Optimizer, trainer: Trainer) -> Optimizer:
    """The plan's optimizer as the trainer has it."""
    return replace(
        update,
        master_weights=update.master_weights and trainer.masters,
        shards=update.shards if trainer.shares else 1,
    )


def _update_losses(plan: Plan, kept: Optimizer, trainer: str) -> list[str]:
    losses = []
    if kept.master_weights != plan.update.master_weights:
        losses.append(f"master weights: {trainer} updates weights in {plan.dtype}")
    if kept.shards != plan.update.shards:
        whole = f"{trainer} keeps it whole on each"
        losses.append(f"the optimizer's state shared out to {plan.replicas} replicas: {whole}")
    return losses


def _flat(names: tuple[tuple[str, ...], ...]) -> set[str]:
    return {name for stage in names for name in stage}


def _stock(plan: Plan, trainer: str, name: str) -> Schedule:
    """The trainer's own schedule in the plan's shape."""
    per_rank, rest = divmod(len(plan.stages), plan.depth)
    if rest:
        raise CannotExport(f"{trainer} needs equally many stages on each rank: {len(plan.stages)} on {plan.depth}")
    try:
        return kind(name).schedule(plan.depth, plan.micro_batches, stages_per_rank=per_rank)
    except AutopipeError as error:
        raise CannotExport(
            f"{trainer} runs {name}, which the plan's shape does not allow: {error}. Plan with --schedule {name}"
        ) from None


def _schedule_losses(planned: Schedule, runs: Schedule, trainer: str) -> list[str]:
    losses = []
    if planned.order != runs.order:
        losses.append(f"schedule {planned.name}: {trainer} runs {runs.name}")
    if planned.placement != runs.placement:
        losses.append(f"placement {_ranks(planned)}: {trainer} has stages on ranks {_ranks(runs)}")
    return losses


def _ranks(schedule: Schedule) -> str:
    return " ".join(map(str, schedule.placement))


@dataclass(frozen=True)
class Expected:
    """What is expected of what remains, and of the whole plan by the same measure; both with jitter, or both without.

    ``peak_bytes`` are of each rank.
    """

    step_s: float
    planned_s: float
    peak_bytes: tuple[int, ...]
    jitter: bool = True


def predict(plan: Plan, rest: Remaining, profile: Profile | None) -> Expected | None:
    """What the rest is expected to do.

    ``profile`` is the one that the plan was made from; without it jitter is left out, and None is returned where other
    layers recompute, or the optimizer keeps its state otherwise. A link between two ranks that do not talk in the plan
    is taken as the plan's slowest.
    """
    other = rest.update != plan.update
    changed = [other or made.recompute != again for made, again in zip(plan.stages, rest.recompute, strict=True)]
    if any(changed) and profile is None:
        return None
    stages = [
        _recosted(plan, stage, again, rest.update, profile) if differs and profile else stage.costs
        for stage, again, differs in zip(plan.stages, rest.recompute, changed, strict=True)
    ]
    graph, hops, planned = Graph.of(rest.schedule), _hops(plan, rest.schedule), plan.predicted
    line = simulate(rest.schedule, stages, hops, overhead_s=plan.overhead_s, graph=graph)
    if profile is None and planned.jitter_s:
        return Expected(line.step_s, planned.step_s - planned.jitter_s, line.peak_bytes, jitter=False)
    costs, extra_s = costs_of(stages, hops, plan.overhead_s), 0.0
    if profile and profile.jitter and planned.jitter_s:
        extra_s = jitter_s(profile.jitter, graph, costs, line, plan.replicas)
    return Expected(line.step_s + extra_s, planned.step_s, line.peak_bytes)


def _recosted(plan: Plan, stage: Stage, again: Sequence[str], update: Optimizer, profile: Profile) -> StageCost:
    """The stage's costs with other recomputation and optimizer, on the device that the plan priced it for."""

    def cost(layers: Sequence[str], optimizer: Optimizer) -> StageCost:
        numbers = [number for number, name in enumerate(stage.layers, stage.start) if name in layers]
        return stage_cost(profile, stage.start, stage.stop, plan.micro_batch, optimizer=optimizer, recompute=numbers)

    before, after, planned = cost(stage.recompute, plan.update), cost(again, update), stage.costs
    speed = before.forward_s / planned.forward_s if planned.forward_s else 1.0
    return replace(
        planned,
        backward_s=planned.backward_s + (after.backward_s - before.backward_s) / speed,
        input_grad_s=planned.input_grad_s + (after.input_grad_s - before.input_grad_s) / speed,
        held_after_forward_bytes=after.held_after_forward_bytes,
        held_after_input_grad_bytes=after.held_after_input_grad_bytes,
        workspace_bytes=after.workspace_bytes,
        optimizer_s=planned.optimizer_s + (after.optimizer_s - before.optimizer_s) / speed,
        optimizer_bytes=after.optimizer_bytes,
        reduce_s=planned.reduce_s * (2 / 3 if update.shards < plan.update.shards else 1),  # nothing is handed round
    )


def _hops(plan: Plan, schedule: Schedule) -> tuple[Link | None, ...]:
    known = {
        frozenset((a.rank, b.rank)): hop
        for a, b, hop in zip(plan.stages, plan.stages[1:], plan.hops, strict=False)
        if hop is not None
    }
    largest = max((stage.costs.send_bytes for stage in plan.stages), default=0)
    slowest = max(known.values(), key=lambda link: link.transfer_s(largest), default=None)
    placed = schedule.placement
    return tuple(None if a == b else known.get(frozenset((a, b)), slowest) for a, b in pairwise(placed))
