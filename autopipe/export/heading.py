"""The lines that every artefact carries: which plan, which versions, what is lost and what is predicted."""

from __future__ import annotations

from autopipe import __version__
from autopipe.core.plan import Plan
from autopipe.core.units import format_bytes, format_duration, format_percent, many
from autopipe.export.remaining import Expected, Remaining
from autopipe.export.text import plain
from autopipe.export.trainer import Heading, Trainer


def heading(plan: Plan, trainer: Trainer, rest: Remaining, predicted: Expected | None) -> Heading:
    """The lines for a plan; ``predicted`` is what is expected of what remains, None where it cannot be told."""
    planned = format_duration(plan.predicted.step_s)
    lines = [
        f"{plan.model.name} for {trainer.target}, by autopipe {__version__}",
        f"plan {plan.digest}",
        f"{many(len(plan.stages), 'stage')} on {many(plan.depth, 'rank')}{_replicas(plan)}, {plan.schedule.name}, "
        f"{many(plan.micro_batches, 'micro-batch')} of {plan.micro_batch}, global batch {plan.global_batch}",
    ]
    if trainer.split_only:
        lines.append("the split only: schedule, micro-batches, recomputation and replicas are not in this file")
    elif not rest.losses:
        lines.append(f"predicted: {planned} a step")
    else:
        lines += [f"not expressed: {loss}" for loss in rest.losses]
        lines += _remains(plan, predicted, planned)
    return tuple(map(plain, lines))


def _replicas(plan: Plan) -> str:
    if plan.replicas == 1:
        return ""
    return f" × {many(plan.replicas, 'replica')} = {many(plan.depth * plan.replicas, 'process')}"


def _remains(plan: Plan, predicted: Expected | None, planned: str) -> list[str]:
    if predicted is None:
        return [f"predicted for what remains: unknown without the plan's profile; the plan: {planned} a step"]
    slower = format_percent(predicted.step_s / predicted.planned_s - 1, sign=True)
    whole = f"the plan: {format_duration(predicted.planned_s)}" + ("" if predicted.jitter else ", both without jitter")
    lines = [f"predicted for what remains: {format_duration(predicted.step_s)} a step ({slower}); {whole}"]
    over = [
        f"rank {rank} needs {format_bytes(peak)} of {format_bytes(limit)}"
        for rank, (peak, limit) in enumerate(zip(predicted.peak_bytes, plan.memory_limit_bytes, strict=False))
        if peak > limit
    ]
    return lines + [f"what remains does not fit: {line}" for line in over]
