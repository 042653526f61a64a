"""Plans with any split and table, for tests of what other trainers take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.cluster import Link
from autopipe.core.plan import FileRef, ModelRef, Plan, Prediction, ScheduleTable, Stage, TiedParameter
from autopipe.core.profile import Profile
from autopipe.core.schedule import Schedule, kind
from autopipe.core.stage import stage_cost
from autopipe.simulate import simulate
from tests.synthetic import chain

LINK = Link(14e-6, 12e9)


def llama(blocks: int) -> Profile:
    """An embedding, some blocks, a norm and a head under transformers' names for Llama."""
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(blocks)), "model.norm", "lm_head"]
    times = [0.2e-3, *[1.5e-3] * blocks, 0.1e-3, 1.1e-3]
    return chain(times, names=names, held_bytes=1 << 20, output_elements=1 << 16, micro_batches=(1, 2))


def plan_of(
    profile: Profile,
    cuts: Sequence[int],
    schedule: Schedule,
    *,
    micro_batch: int = 2,
    recompute: Collection[str] = (),
    model: ModelRef | None = None,
) -> Plan:
    """The plan with these cuts (the first layer of each stage but the first) and this table."""
    bounds = [*pairwise([0, *cuts, len(profile.layers)])]
    names = [layer.name for layer in profile.layers]
    stages = tuple(
        Stage(
            index=index,
            rank=schedule.placement[index],
            start=start,
            stop=stop,
            layers=tuple(names[start:stop]),
            modules=tuple(m for layer in profile.layers[start:stop] for m in layer.modules),
            costs=stage_cost(
                profile, start, stop, micro_batch, recompute=[i for i, n in enumerate(names) if n in recompute]
            ),
            receives=profile.crossing(start) if start else (),
            sends=profile.crossing(stop) if stop < len(names) else (),
            recompute=tuple(name for name in names[start:stop] if name in recompute),
        )
        for index, (start, stop) in enumerate(bounds)
    )
    hops = tuple(LINK if a != b else None for a, b in pairwise(schedule.placement))
    line = simulate(schedule, [stage.costs for stage in stages], hops, overhead_s=profile.overhead_s)
    global_batch = micro_batch * schedule.micro_batches
    holders = [
        (tie, [s for s, (a, b) in enumerate(bounds) if any(a <= n < b for n in tie.layers)]) for tie in profile.ties
    ]
    return Plan(
        model=model or ModelRef(profile.model),
        profile=FileRef(profile.digest),
        cluster=FileRef("cd" * 32),
        device="cpu",
        dtype="float32",
        threads=1,
        optimizer="adamw",
        global_batch=global_batch,
        micro_batch=micro_batch,
        micro_batches=schedule.micro_batches,
        depth=schedule.ranks,
        replicas=1,
        stages_per_rank=len(bounds) // schedule.ranks,
        schedule=ScheduleTable.of(schedule),
        stages=stages,
        hops=hops,
        ties=tuple(TiedParameter(tie.name, tuple(where), tie.bytes) for tie, where in holders if len(where) > 1),
        overhead_s=profile.overhead_s,
        memory_limit_bytes=(1 << 40,) * schedule.ranks,
        predicted=Prediction(line.step_s, global_batch / line.step_s, line.idle, line.peak_bytes),
        lower_bound_s=line.step_s,
        gap=0.0,
        limited_by="stage 0",
        provenance={"autopipe": "0.1.0"},
    )


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """1F1B as the registry makes it."""
    return kind("1F1B").schedule(ranks, micro_batches)


def interleaved(ranks: int, per_rank: int, micro_batches: int) -> Schedule:
    """Interleaved 1F1B as the registry makes it."""
    return kind("Interleaved1F1B").schedule(ranks, micro_batches, stages_per_rank=per_rank)
