"""One split of a case in full: its stages, what they recompute, and what the simulator says of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopipe.core.profile import Tie
from autopipe.core.schedule import stages_on
from autopipe.core.stage import StageCost, shared_ties
from autopipe.core.timeline import Timeline
from autopipe.graph import costs_of
from autopipe.jitter import jitter_s
from autopipe.planning.cases import Case
from autopipe.planning.totals import Totals, totals
from autopipe.simulate import simulate


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a split does. ``recompute`` lists layer numbers for each stage."""

    case: Case
    bounds: tuple[tuple[int, int], ...]
    recompute: tuple[tuple[int, ...], ...]
    costs: tuple[StageCost, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for outcomes of one setting that are the same plan.

        The step stands for the order of a schedule that is made for the very stages.
        """
        case, outline = self.case, self.case.outline
        shape = (outline.name, outline.placement, case.seats.order, case.replicas, case.micro_batch)
        return (*shape, self.bounds, self.recompute, self.step_s)

    @cached_property
    def timeline(self) -> Timeline:
        """All that happens in a step."""
        case = self.case
        return simulate(
            case.schedule,
            self.costs,
            case.hops,
            overhead_s=case.setting.profile.overhead_s,
            graph=case.graph,
            crossing=case.outline.kept,
        )

    @cached_property
    def totals(self) -> Totals:
        """The Timeline's totals; of a table that flushes without making it."""
        if self.case.outline.asynchronous:
            line = self.timeline
            return Totals(line.step_s, tuple(map(line.work_s, range(line.ranks))))
        costs = costs_of(self.costs, self.case.hops, self.case.setting.profile.overhead_s)
        return totals(self.case.graph, self.costs, costs)

    @cached_property
    def step_s(self) -> float:
        """The seconds of a step, or the period, as in the Timeline."""
        return float(
            self.case.graph.steps(costs_of(self.costs, self.case.hops, self.case.setting.profile.overhead_s))[0]
        )

    @cached_property
    def jitter_s(self) -> float:
        """What a real step takes beyond that; see autopipe/jitter.py."""
        case, profile = self.case, self.case.setting.profile
        if profile.jitter is None:
            return 0.0
        costs = costs_of(self.costs, case.hops, profile.overhead_s)
        return jitter_s(profile.jitter, case.graph, costs, self.timeline, case.seats.replicas)

    @property
    def expected_s(self) -> float:
        """The seconds of a real step."""
        return self.step_s + self.jitter_s

    @property
    def idle(self) -> float:
        """1 − work / (ranks × step), as in the Timeline."""
        overhead_s = self.case.setting.profile.overhead_s
        work_s = sum(
            sum(count * (seconds + overhead_s) for count, seconds in zip(row.counts, cost.times, strict=True))
            + cost.optimizer_s
            for row, cost in zip(self.case.outline.rows, self.costs, strict=True)
        )
        return 1 - work_s / (self.case.depth * self.step_s) if self.step_s else 0.0

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The highest bytes of each rank, as in the Timeline."""
        return tuple(_peak(self.case, rank, self.costs) for rank in range(self.case.depth))

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any rank."""
        return max(self.peaks)

    def over_limit(self) -> int | None:
        """The rank that is furthest over its limit, None when all fit."""
        return self._over.index(self.most_over()) if self.most_over() > 0 else None

    def most_over(self) -> int:
        """By how many bytes that rank is over its limit, or the fullest one below it."""
        return max(self._over)

    @property
    def _over(self) -> list[int]:
        return [peak - limit for peak, limit in zip(self.peaks, self.case.seats.limits, strict=True)]


def outcome(case: Case, positions: Sequence[int]) -> Outcome:
    """Simulate a split of a case; it need not fit."""
    ends = case.ranges.ends
    bounds = tuple((ends[positions[part]], ends[positions[part + 1]]) for part in case.outline.part_of)
    again = list(case.recomputed(positions))
    costs = [_cost(case, stage, bounds, layers) for stage, layers in enumerate(again)]
    if case.recompute == "auto":
        for stage in range(case.stages):
            if _peak(case, rank := case.outline.placement[stage], costs) <= case.seats.limits[rank]:
                _drop(case, stage, bounds, again, costs)
    return Outcome(case, bounds, tuple(again), tuple(costs))


def _cost(case: Case, stage: int, bounds: Sequence[tuple[int, int]], recompute: tuple[int, ...]) -> StageCost:
    """A stage's cost; its optimizer waits until the gradients of parameters tied to other ranks are summed."""
    setting, seats, placement = case.setting, case.seats, case.outline.placement
    rank, shared = placement[stage], shared_ties(setting.profile, bounds, placement, stage)
    cost = setting.stage_cost(bounds[stage], case.micro_batch, case.replicas, seats.speeds[rank], recompute, shared)
    own = [t for t in setting.profile.ties if t.trained and t.read_in(*bounds[stage]) and t not in shared]
    ties = [tie for tie in own if _ranks_of(tie, bounds, placement) > case.outline.ways]
    return replace(
        cost,
        optimizer_s=cost.optimizer_s + sum(seats.tie_s(tie) for tie in ties),
        reduce_s=float(seats.exchanges_s(rank, cost.gradient_bytes, case.outline.ways, sharded=setting.sharded)),
    )


def _ranks_of(tie: Tie, bounds: Sequence[tuple[int, int]], placement: Sequence[int]) -> int:
    """How many ranks hold a tied parameter."""
    return len({rank for layers, rank in zip(bounds, placement, strict=True) if tie.read_in(*layers)})


def _drop(
    case: Case, stage: int, bounds: Sequence[tuple[int, int]], again: list[tuple[int, ...]], costs: list[StageCost]
) -> None:
    """Let those of a stage's layers that need not recompute keep theirs: the dearest ones while the rank still fits."""
    rank = case.outline.placement[stage]

    def fits(cost: StageCost) -> bool:
        return _peak(case, rank, [*costs[:stage], cost, *costs[stage + 1 :]]) <= case.seats.limits[rank]

    for layer in sorted(again[stage], key=lambda i: (-case.ranges.layers.forward[i], i)):
        fewer = tuple(i for i in again[stage] if i != layer)
        least = _with_kept(case, bounds[stage], costs[stage], layer, frozenset(fewer))
        if fits(least) and fits(cost := _cost(case, stage, bounds, fewer)):
            again[stage], costs[stage] = fewer, cost


def _with_kept(case: Case, bounds: tuple[int, int], cost: StageCost, layer: int, again: Container[int]) -> StageCost:
    """A stage that keeps one more layer's activations and lets the ones in ``again`` recompute, by its least peak.

    Its bytes are exact but for a first backward, which is left out; quicker than the whole cost.
    """
    layers = case.setting.profile.at(case.micro_batch)
    needs = (layers[i].workspace_bytes + (i in again) * layers[i].held_after_forward_bytes for i in range(*bounds))
    held = cost.held_after_forward_bytes + int(case.ranges.layers.freed[layer])
    return replace(cost, held_after_forward_bytes=held, workspace_bytes=max(needs), first_backward_bytes=0)


def _peak(case: Case, rank: int, costs: Sequence[StageCost]) -> int:
    """The peak of a rank."""
    own = stages_on(case.outline.placement, rank)
    highest = max(load.bytes([costs[stage] for stage in own]) for load in case.loads(rank))
    return sum(case.outline.always_bytes(stage, costs[stage]) for stage in own) + highest
