"""A plan explained with numbers: what bounds it, and what other devices, links, memory or batches would change.

Every number is the search's own answer to a changed question, under the limits and with the schedules of the plan.
Options that a plan does not record (pins, a fixed depth) are not repeated; where that matters the text says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopipe.core.cluster import Cluster, Device, Link
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.plan import SAME_CUTS, Plan
from autopipe.core.profile import Profile
from autopipe.core.schedule import kinds
from autopipe.core.units import format_bytes, format_duration, format_percent
from autopipe.search import plan as search

_SAME = 1e-3
"""Steps closer than this print as equal."""


@dataclass(frozen=True)
class Variation:
    """What one change would give: the plan then, or None where none fits or none can be made."""

    what: str
    plan: Plan | None


def explanation(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """One paragraph: what bounds the step, what each change would give, and what the noise leaves open."""
    free, *changes = variations(plan, profile, cluster)
    freed = free.plan if free.plan and _much_faster(free.plan, plan) else None
    sentences = [_bounds(plan), *_freely(freed)]
    sentences += [_sentence(freed or plan, change) for change in changes]
    return " ".join([*sentences, _noise(plan, profile)])


def variations(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[Variation, ...]:
    """The search's answers: to the plan's own question first, then to each changed one."""
    used = _as_planned(plan, cluster)
    batch, limit = plan.global_batch, format_bytes(2 * max(plan.memory_limit_bytes))
    asked = {"nothing else asked for": (used, batch)}
    if used.tiers:  # of a single device nothing says what a link would cost
        asked[f"one more device ({len(used) + 1})"] = (_one_more(plan, used, cluster), batch)
    asked |= {
        "twice the bandwidth": (_faster(used), batch),
        f"twice the memory ({limit} usable)": (_roomier(used), batch),
        f"a global batch of {2 * batch}": (used, 2 * batch),
    }
    if batch % 2 == 0:
        asked[f"a global batch of {batch // 2}"] = (used, batch // 2)
    return tuple(Variation(what, _searched(plan, profile, *question)) for what, question in asked.items())


def _searched(plan: Plan, profile: Profile, cluster: Cluster, global_batch: int) -> Plan | None:
    try:
        names = _schedules(plan)
        options: dict[str, Any] = {"schedules": names, "allow_stale": names is not None, "headroom": 0.0}
        options |= {"unequal_replicas": plan.unequal}
        options |= {"master_weights": plan.master_weights, "shard_optimizer": plan.sharded_optimizer}
        return search(profile, cluster, global_batch=global_batch, optimizer=plan.optimizer, **options)
    except (NoPlanFits, UsageError):  # UsageError: no micro-batch that was measured divides this batch
        return None


def _schedules(plan: Plan) -> tuple[str, ...] | None:
    """The schedules that were tried: the plan's and those among the rejected; None, the default, with one rank."""
    known = {kind.name for kind in kinds()}
    tried = [plan.schedule.name, *(name for other in plan.rejected for name in other.names)]
    names = tuple(dict.fromkeys(name for name in tried if name in known))
    return names if plan.depth > 1 and names else None


def _as_planned(plan: Plan, cluster: Cluster) -> Cluster:
    """The devices that the plan uses, with the memory that it was allowed."""
    used = cluster.only(plan.devices or range(plan.processes))
    own = zip(plan.memory_limit_bytes, plan.stages, strict=False)
    limits = (
        [limit for limit, stage in own for _ in range(stage.replicas)]
        if plan.unequal
        else plan.memory_limit_bytes[: plan.depth] * plan.replicas
    )
    devices = [replace(device, memory_bytes=limit) for device, limit in zip(used.ranks(), limits, strict=True)]
    return replace(used, devices=tuple(devices))


def _one_more(plan: Plan, used: Cluster, whole: Cluster) -> Cluster:
    """One device more: the cluster's next one where it has one, else another like the last."""
    last = list(used.ranks())[-1]
    taken = plan.devices or range(len(used))
    others = (device for number, device in enumerate(whole.ranks()) if number not in taken)
    added = replace(next(others, last), memory_bytes=last.memory_bytes)
    *inner, outer = used.tiers
    tiers = (*inner, replace(outer, ranks=max(outer.ranks, len(used) + 1)))
    return replace(used, devices=(*used.devices, added), tiers=tiers)


def _faster(used: Cluster) -> Cluster:
    def twice(link: Link) -> Link:
        return replace(link, bytes_per_s=2 * link.bytes_per_s)

    tiers = tuple(replace(tier, link=twice(tier.link)) for tier in used.tiers)
    return replace(used, tiers=tiers, pairs=tuple(replace(pair, link=twice(pair.link)) for pair in used.pairs))


def _roomier(used: Cluster) -> Cluster:
    def twice(device: Device) -> Device:
        return replace(device, memory_bytes=2 * device.memory_bytes)

    return replace(used, devices=tuple(map(twice, used.devices)))


# in words


def _bounds(plan: Plan) -> str:
    near = "meets that" if plan.gap < _SAME else f"is within {format_percent(plan.gap)} of that"
    jitter_s = plan.predicted.jitter_s
    jitter = f" ({format_duration(jitter_s)} of it jitter)" if jitter_s else ""
    but = " but for its jitter" if jitter_s else ""
    return (
        f"The step of {format_duration(plan.predicted.step_s)}{jitter} is limited by {plan.limited_by}; nothing that "
        f"was searched can take less than {format_duration(plan.lower_bound_s)}, and the plan {near}{but}."
    )


def _much_faster(one: Plan, other: Plan) -> bool:
    return one.predicted.step_s < other.predicted.step_s * (1 - _SAME)


def _freely(freed: Plan | None) -> Iterator[str]:
    """Of a plan that was made under options that it does not record, what it would be without them."""
    if freed:
        yield (
            f"It was made under options that keep it from {format_duration(freed.predicted.step_s)} a step "
            f"({_shape(freed)}); what follows is without them, and compared with that."
        )


def _sentence(plan: Plan, change: Variation) -> str:
    """What a change gives, compared with a plan."""
    if change.plan is None:
        return f"With {change.what} no plan is possible."
    before, after = plan.predicted, change.plan.predicted
    if change.plan.global_batch != plan.global_batch:
        more = format_percent(after.samples_per_s / before.samples_per_s - 1, sign=True)
        return f"With {change.what} it does {_rate(after.samples_per_s)} samples/s ({more}; {_shape(change.plan)})."
    faster = after.step_s / before.step_s - 1
    if abs(faster) < _SAME:
        return f"With {change.what} nothing would change."
    return (
        f"With {change.what} a step takes {format_duration(after.step_s)} ({format_percent(faster, sign=True)}; "
        f"{_shape(change.plan)})."
    )


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g}" if samples_per_s < 1000 else f"{samples_per_s:.0f}"


def _shape(plan: Plan) -> str:
    size = f"micro-batch {plan.micro_batch}"
    if plan.depth == 1:
        return f"{plan.replicas} copies of the whole model, {size}" if plan.replicas > 1 else f"no pipeline, {size}"
    *others, last = map(str, plan.cuts)
    where = f"layers {', '.join(others)} and {last}" if others else f"layer {last}"
    cuts = f", cut before {where}" if len(plan.cuts) <= 3 else ""
    copies = f"{plan.replicas} replicas of " if plan.replicas > 1 else ""
    return f"{copies}{plan.schedule.name}, {len(plan.parts)} stages, {size}{cuts}"


def _noise(plan: Plan, profile: Profile) -> str:
    """The other ways that the profile's noise cannot tell from the plan."""
    if profile.origin != "measured":
        return f"The costs are {profile.origin}, not measured: by how much they vary is not known."
    within = [
        other.named
        for other in plan.rejected
        if other.step_s is not None
        and other.reason != SAME_CUTS
        and not other.reason.startswith("over")
        and other.step_s <= plan.predicted.step_s * (1 + plan.noise)
    ]
    noise = format_percent(plan.noise)
    if not within:
        return f"None of the rejected plans is within the profile's noise of {noise}."
    return f"Within the profile's noise of {noise}, only measuring tells this plan from: {'; '.join(within)}."
