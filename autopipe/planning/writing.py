"""An outcome in the words of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from autopipe.core.plan import Prediction, Rejected, Stage
from autopipe.core.profile import NOISY
from autopipe.core.schedule import Schedule
from autopipe.core.units import format_duration, format_percent, many
from autopipe.core.versions import delays
from autopipe.planning.band import band_notes
from autopipe.planning.outcome import Outcome
from autopipe.planning.pieces import stage
from autopipe.planning.space import Space

T = TypeVar("T")


def can_split(chosen: Outcome) -> list[bool]:
    """Of each stage, whether all its layers may split their backward."""
    layers = chosen.case.setting.profile.layers
    return [all(layer.can_split_backward for layer in layers[a:b]) for a, b in chosen.bounds]


def table(chosen: Outcome) -> Schedule:
    """The order of actions, rows and placement by the ranks that its devices are."""
    made, ranks = chosen.case.schedule, chosen.case.seats.ranks
    placement = tuple(ranks[rank] for rank in made.placement)
    return replace(made, placement=placement, order=by_rank(chosen, made.order))


def by_rank(chosen: Outcome, values: Sequence[T]) -> tuple[T, ...]:
    """What each rank in the order of its stages has, by the ranks that its devices are."""
    ranks = chosen.case.seats.ranks
    return tuple(values[ranks.index(rank)] for rank in range(len(ranks)))


def stages(chosen: Outcome) -> tuple[Stage, ...]:
    """The stages with their layers, costs and boundaries."""
    ranks, profile = chosen.case.seats.ranks, chosen.case.setting.profile
    return tuple(
        stage(profile, index, ranks[chosen.case.outline.placement[index]], bounds, chosen.costs[index], again)
        for index, (bounds, again) in enumerate(zip(chosen.bounds, chosen.recompute, strict=True))
    )


def prediction(chosen: Outcome, global_batch: int) -> Prediction:
    """What the simulator expects."""
    step_s = chosen.totals.step_s + chosen.jitter_s
    peaks = by_rank(chosen, chosen.peaks)
    return Prediction(step_s, global_batch / step_s, chosen.totals.idle, peaks, chosen.jitter_s)


def notes(space: Space, chosen: Outcome, others: Sequence[Rejected]) -> Iterator[str]:
    """What a reader should know: of the model, a noisy profile, fewer devices used than offered, what recomputes."""
    yield from chosen.case.setting.profile.notes
    yield from _weights_met(chosen)
    noise = chosen.case.setting.profile.noise
    if noise > NOISY:
        yield (
            f"the profile's timings varied by {format_percent(noise)}: the machine was busy, and the prediction is no "
            f"better than that; profile again when it is idle"
        )
    used, offered = chosen.case.devices, space.most_devices
    if used < offered:
        all_of_them = {f"{offered} stages", f"{offered} ranks"}
        wider = next((row for row in others if row.step_s is not None and all_of_them & {*row.names}), None)
        cost = f": {wider.named} would take {format_duration(wider.step_s or 0)} ({wider.reason})" if wider else ""
        yield f"{used} of {offered} devices {'are' if used > 1 else 'is'} used, which is fastest{cost}"
    yield from _devices(chosen)
    yield from band_notes(space, chosen)
    yield from _other_devices(chosen)
    again = sum(map(len, chosen.recompute))
    if again and chosen.case.recompute == "auto":
        part = sum(chosen.case.ranges.layers.forward[i] for stage in chosen.recompute for i in stage)
        total = chosen.case.ranges.layers.forward.sum()
        who = f"{again} layers recompute their" if again > 1 else "1 layer recomputes its"
        yield f"{who} activations to fit, {format_percent(part / total)} of the forward"


def devices_of(chosen: Outcome) -> tuple[int, ...]:
    """The devices of the cluster that the ranks are, () for the first ones."""
    used = chosen.case.seats.used
    return () if used == tuple(range(len(used))) else used


def _devices(chosen: Outcome) -> Iterator[str]:
    """Where the ranks are not the first devices, or stages do not follow their order."""
    used, ranks = devices_of(chosen), chosen.case.seats.ranks
    if used:
        where = many(len(used), "rank")
        yield f"{where} for devices {', '.join(map(str, used))} of the cluster, numbered from 0: start them there"
    if ranks != tuple(range(len(ranks))):
        passed = ", ".join(map(str, ranks))
        yield f"the pipeline passes the ranks in the order {passed}, which suits devices and links best"


def _weights_met(chosen: Outcome) -> Iterator[str]:
    """How old the weights of an asynchronous plan are, and that a two-way one has them twice."""
    if chosen.case.outline.asynchronous:
        ages = " ".join(f"{age:.3g}" for age in delays(chosen.case.schedule))
        yield (
            f"trains without a flush: the weights of stages 0 … {chosen.case.stages - 1} are {ages} updates old when a "
            f"forward meets them, so the losses are not those of one process"
        )
    if chosen.case.outline.ways > 1:
        yield "two replicas of the model run over the same ranks, in opposite directions; their gradients are summed"


def _other_devices(chosen: Outcome) -> Iterator[str]:
    """Figures of one device on another: where neither is the machine that measured, their speeds are not related."""
    profile, cluster = chosen.case.setting.profile, chosen.case.setting.cluster
    names = list(dict.fromkeys(device.name for device in cluster.devices))
    if profile.origin != "measured" and profile.device not in names:
        yield (
            f"the costs are those of {profile.device}, the devices are {', '.join(names)}: their speed in the "
            f"cluster's file is taken as relative to it"
        )
