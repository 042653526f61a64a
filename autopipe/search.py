"""The search for a plan: depth × micro-batch × schedule × recomputation, and where to cut.

Every combination is a case with a bound; the cases are solved best bound first until no bound can beat the best step.
``plan`` checks what was asked for, runs the search and writes the answer down; the parts are in autopipe/planning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from autopipe import __version__
from autopipe.core.cluster import Cluster
from autopipe.core.errors import UsageError
from autopipe.core.optimizer import has_masters
from autopipe.core.plan import FileRef, ModelRef, Plan, ScheduleTable
from autopipe.core.profile import OPTIMIZER_STATE, Profile, content_digest
from autopipe.core.validation import validate
from autopipe.planning.best import search
from autopipe.planning.finalists import least_expected
from autopipe.planning.limits import limited_by
from autopipe.planning.nofit import no_plan_fits
from autopipe.planning.order import placed
from autopipe.planning.outcome import outcome
from autopipe.planning.pieces import ties
from autopipe.planning.request import pinned_stages, wanted_depths, wanted_kinds, wanted_micro_batches, wanted_replicas
from autopipe.planning.setting import Setting
from autopipe.planning.shared_plan import with_unequal
from autopipe.planning.space import Space
from autopipe.planning.whynot import rejected
from autopipe.planning.writing import by_rank, can_split, devices_of, notes, prediction, stages, table

RECOMPUTE = ("auto", "none", "all")


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int,
    devices: int | None = None,
    micro_batches: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    memory_bytes: int | None = None,
    headroom: float = 0.05,
    optimizer: str | None = None,
    master_weights: bool = False,
    shard_optimizer: bool = False,
    unequal_replicas: bool = False,
    recompute: str = "auto",
    allow_stale: bool = False,
    pins: Mapping[str, int] | None = None,
    stages_per_rank: int | None = None,
    model: ModelRef | None = None,
    profile_ref: FileRef | None = None,
    cluster_ref: FileRef | None = None,
) -> Plan:
    """The fastest plan that fits, by simulation.

    Searched are the depths asked for (default: 1 to the number of devices), the numbers of ``replicas`` of the pipeline
    (default: all that divide the batch), the profile's micro-batch sizes that divide each replica's part of
    ``global_batch``, and the ``schedules`` by name (default: GPipe and 1F1B; ``all``: every one, with two and four
    stages on a rank where it takes them). ``allow_stale`` also tries asynchronous ones, whose step is the period from
    one update to the next. ``devices`` takes the first so many of the cluster. A rank may use
    min(its memory, ``memory_bytes``) × (1 − headroom). ``master_weights`` are float32 copies that the optimizer
    updates of a model of 16 bits; with ``shard_optimizer`` the replicas share out its state. ``recompute`` is ``none``,
    ``all``, or ``auto``: on the layers where it is cheapest, and only where a stage would not fit (in its part of the
    memory, where a rank has several). With ``unequal_replicas`` stages may also have replicas of their own, of
    unequal number (planning/unequal.py). ``pins`` fixes the stage of layers, by name. ``stages_per_rank`` leaves only
    that number of stages on a rank. One pipeline passes the devices in the order that suits it (planning/order.py).

    ``lower_bound_s`` holds for every split, depth, micro-batch size, schedule and choice of recomputed layers in that
    space, and the orders of devices that were looked at. Equal arguments give equal plans.

    Raises NoPlanFits where every plan needs more memory than there is, and UsageError for arguments that cannot be
    meant.
    """
    offered = cluster.take(devices) if devices is not None else cluster
    setting = replace(
        _setting(profile, offered, memory_bytes, headroom, optimizer, pins),
        master_weights=_masters(profile, master_weights),
        sharded=shard_optimizer,
    )
    space = Space(
        setting,
        global_batch,
        wanted_depths(profile, offered, setting.pins, depths, stages_per_rank),
        wanted_replicas(offered, global_batch, replicas),
        wanted_micro_batches(profile, global_batch, micro_batches),
        wanted_kinds(schedules, allow_stale=allow_stale),
        _one_of(recompute, RECOMPUTE, "recompute"),
        stages_per_rank,
    )
    listed = search(space)
    space, answer = placed(space, listed)
    if answer.best is None:
        raise no_plan_fits(space, free_depth=depths is None, headroom=headroom)
    chosen = least_expected(space, outcome(answer.best.case, answer.best.found.positions))
    if chosen.case.schedule.splits_backward:  # the plan checks all else
        validate(chosen.case.schedule, can_split_backward=can_split(chosen))
    others = rejected(space, chosen, listed)
    bound_s = min(answer.lower_bound_s, chosen.totals.step_s)  # equal but for rounding where the bound is met
    made = Plan(
        model=model or ModelRef(profile.model),
        profile=profile_ref or FileRef(profile.digest),
        cluster=cluster_ref or FileRef(content_digest(asdict(cluster))),
        device=profile.device,
        dtype=profile.dtype,
        threads=profile.threads,
        optimizer=setting.optimizer,
        global_batch=global_batch,
        micro_batch=chosen.case.micro_batch,
        micro_batches=chosen.case.outline.micro_batches,
        depth=chosen.case.depth,
        replicas=chosen.case.replicas,
        stages_per_rank=chosen.case.parts // chosen.case.depth,
        schedule=ScheduleTable.of(table(chosen)),
        stages=stages(chosen),
        hops=chosen.case.hops,
        ties=ties(profile, chosen.bounds),
        overhead_s=profile.overhead_s,
        memory_limit_bytes=by_rank(chosen, chosen.case.seats.limits),
        predicted=prediction(chosen, global_batch),
        lower_bound_s=bound_s,
        gap=chosen.totals.step_s / bound_s - 1,
        limited_by=limited_by(space, chosen),
        noise=profile.noise,
        rejected=others,
        notes=tuple(notes(space, chosen, others)),
        provenance={"autopipe": __version__},
        reduction=profile.reduction,
        master_weights=setting.master_weights,
        sharded_optimizer=setting.sharded,
        devices=devices_of(chosen),
    )
    return with_unequal(made, space) if unequal_replicas else made


def _setting(
    profile: Profile,
    cluster: Cluster,
    memory_bytes: int | None,
    headroom: float,
    optimizer: str | None,
    pins: Mapping[str, int] | None,
) -> Setting:
    if not 0 <= headroom < 1:
        raise UsageError(f"headroom is {headroom}: it is the part of memory kept free, from 0 to below 1")
    if memory_bytes is not None and memory_bytes <= 0:
        raise UsageError(f"memory is {memory_bytes} bytes: it must be positive")
    name = _one_of(optimizer or profile.optimizer, OPTIMIZER_STATE, "optimizer")
    limits = tuple(
        int(min(device.memory_bytes, memory_bytes or device.memory_bytes) * (1 - headroom))
        for device in cluster.ranks()
    )
    return Setting(profile, cluster, name, limits, pinned_stages(profile, pins or {}))


def _masters(profile: Profile, asked: bool) -> bool:
    if asked and not has_masters(profile.dtype):
        raise UsageError(
            f"master weights are float32 copies of weights of 16 bits; {profile.model} is {profile.dtype}: plan without"
        )
    return asked


def _one_of(value: str, known: Iterable[str], what: str) -> str:
    if value not in known:
        raise UsageError(f"{what} {value!r} is not known: use one of {', '.join(known)}")
    return value
