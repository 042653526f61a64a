"""Orders made again for the stages at hand: a split, the order for its stages, the best split for that order, in turn.

A schedule that looks at times is first made for equal stages, since nobody knows better yet. Once a split is found its
stages are uneven, and their seconds, links and memory give another order. A schedule that takes any order is also made
for other splits: the solvers' and some that leave orders more room (roomy.py), and for those near the best ones, those
first that are good with the order at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Kind, Schedule, Shape, StageMemory, StageTimes, stages_on
from autopipe.core.stage import StageCost
from autopipe.planning.cases import Case, Found
from autopipe.planning.moves import joint_moves, single_moves
from autopipe.planning.nearest import least_memory
from autopipe.planning.outcome import outcome
from autopipe.planning.roomy import ends_of_any_order, roomy

_ROUNDS = 3
"""An order is made again so often at most; most are as good after one round."""

_LESS = 1e-9
"""A step that is shorter by less does not count."""


_NEAR = 4
"""Of so many splits at a time orders are made, while one of them is better than all before."""

_ROOM = 8_000
"""Orders are made for other splits until they have so many actions together, where no backward is split."""


class Choice(NamedTuple):
    """A case and its best split."""

    case: Case
    found: Found


def settled(placed: Iterable[Case], kind: Kind) -> Choice | None:
    """The best split of a case in its placements; where the schedule looks at times, with the order for it.

    None where nothing fits.
    """
    return _best(_settled(case, kind) if kind.looks_at_times else _first(case) for case in placed)


def looked_at(placed: Iterable[Case]) -> Choice | None:
    """The best split of a case in its placements with the orders at hand; None where nothing fits."""
    return _best(map(_first, placed))


def _first(case: Case) -> Choice | None:
    return Choice(case, case.best) if case.best else None


def _best(found: Iterable[Choice | None]) -> Choice | None:
    return min((choice for choice in found if choice), key=lambda choice: choice.found.step_s, default=None)


def placed_as(case: Case, kind: Kind) -> Iterator[Case]:
    """The case, and the same in the other placements that its schedule takes."""
    yield case
    if not kind.also:
        return
    table = case.schedule
    for placement in kind.placements(table.ranks, case.parts // table.ranks)[1:]:
        shape = Shape(table.ranks, table.micro_batches, placement)
        yield case.ordered(kind.table(shape, [case.ranges.times(table.stages)] * table.stages))


def _settled(case: Case, kind: Kind) -> Choice | None:
    """Split and order in turn, while the step gets shorter."""
    best = _first(case)
    positions = case.best.positions if case.best else _closest(case)
    for _ in range(_ROUNDS if positions else 0):
        table = _made(case, kind, positions)
        if table is None or (best and table.order == best.case.schedule.order):
            break
        found = _found(case.ordered(table), positions)
        if found is None or (best and found.found.step_s >= best.found.step_s * (1 - _LESS)):
            break
        best, positions = found, found.found.positions
    return _roomier(case, best, kind) if kind.also and not case.large else best


def _roomier(case: Case, best: Choice | None, kind: Kind) -> Choice | None:
    """The best with an order made for another split, as far as the effort goes: near the best so far, and elsewhere."""
    effort = min(_ROOM // case.actions, 2 * _NEAR)
    solved, known = case.rough.solved(None), [best.found.positions] if best else []
    pool = roomy(case, [*known, *solved])
    apart = [split for split in _apart(solved, pool, effort) if split not in known]
    begun = _best(_ordered_for(case, kind, split) for split in apart)
    tried = {*known, *apart}
    return _best([_climbed(start, kind, pool, tried, effort) for start in (best, begun) if start])


def _climbed(
    best: Choice, kind: Kind, pool: Sequence[tuple[int, ...]], tried: set[tuple[int, ...]], left: int
) -> Choice:
    """The best that orders made for splits near it reach, a few at a time."""
    while left > 0:
        near = [split for split in _promising(best, pool) if split not in tried][: min(_NEAR, left)]
        made = [one for split in near if (one := _ordered_for(best.case, kind, split))]
        better = min([best, *made], key=lambda choice: choice.found.step_s)
        if better is best:
            break
        tried.update(near)
        best, left = better, left - len(near)
    return best


def _apart(solved: Sequence[tuple[int, ...]], pool: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Splits to begin with, whatever the order for equal stages makes of them: the solvers' and some with room."""
    return [*dict.fromkeys([*solved, *pool[:: max(1, len(pool) // max(1, count))]])][:count]


def _promising(best: Choice, pool: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The splits that some order may make better, by their steps with the order at hand."""
    around = [move(best.found.positions) for move in (single_moves, joint_moves)]
    splits = best.case.splits.allowed(
        np.unique(np.concatenate([*around, np.array([best.found.positions, *pool])]), axis=0)
    )
    ends_s = ends_of_any_order(best.case, splits) * best.case.ranges.tick_s
    splits = splits[ends_s < best.found.step_s * (1 - _LESS)]
    found = best.case.measured(map(tuple, splits.tolist()))
    return [one.positions for one in sorted(found, key=lambda one: (one.step_s, one.positions))]


def _ordered_for(case: Case, kind: Kind, positions: tuple[int, ...]) -> Choice | None:
    """A split with the order that is made for it."""
    table = _made(case, kind, positions)
    found = case.ordered(table).measured([positions]) if table else []
    return Choice(case.ordered(table), found[0]) if table and found else None


def _closest(case: Case) -> tuple[int, ...]:
    """The split that comes closest to fitting, () where there is none."""
    split = least_memory(case)
    return split.positions if split else ()


def _found(case: Case, positions: tuple[int, ...]) -> Choice | None:
    """The case's best split, or the one that it was made for."""
    found = [*case.measured([positions]), *([case.best] if case.best else [])]
    return Choice(case, min(found, key=lambda one: one.step_s)) if found else None


def _made(case: Case, kind: Kind, positions: Sequence[int]) -> Schedule | None:
    """The order for the stages of a split; None where the schedule finds none that fits."""
    costs = outcome(case, positions).costs
    overhead_s = case.setting.profile.overhead_s
    times = [StageTimes(*(seconds + overhead_s for seconds in cost.times)) for cost in costs]
    try:
        return kind.table(shape_for(case, costs), times)
    except UsageError:
        return None


def shape_for(case: Case, costs: Sequence[StageCost]) -> Shape:
    """The case's shape with the links and the memory of these stages."""
    table, hops = case.schedule, case.hops
    slower = (max(cost.send_bytes, cost.receive_grad_bytes) for cost in costs)
    held = sum(cost.held_after_forward_bytes for cost in costs)
    return Shape(
        table.ranks,
        table.per_update,
        table.placement,
        tuple(hop.transfer_s(size) if hop else 0.0 for hop, size in zip(hops, slower, strict=False)),
        weight_part=sum(cost.held_after_input_grad_bytes for cost in costs) / max(held, 1),
        memory=memory_for(case, costs),
    )


def memory_for(case: Case, costs: Sequence[StageCost]) -> StageMemory:
    """The bytes that stages hold of a micro-batch, and those that each rank's limit leaves for them.

    A micro-batch holds what crossed the stage's boundaries, too. Besides come two gradients on their way back, an
    activation that is asked for before it is needed, and a gradient that is (core/in_flight.py).
    """
    hops = (None, *case.hops)
    received = [cost.receive_bytes if hop else 0 for cost, hop in zip(costs, hops, strict=True)]
    caps = []
    for rank in range(case.depth):
        own = stages_on(case.outline.placement, rank)
        always = sum(costs[s].static_bytes + 3 * received[s] + costs[s].send_bytes for s in own)
        caps.append(float(case.seats.limits[rank] - always - max(costs[stage].workspace_bytes for stage in own)))
    crossing = [before + cost.send_bytes for before, cost in zip(received, costs, strict=True)]
    return StageMemory(
        tuple(float(cost.held_after_forward_bytes + more) for cost, more in zip(costs, crossing, strict=True)),
        tuple(float(cost.held_after_input_grad_bytes + more) for cost, more in zip(costs, crossing, strict=True)),
        tuple(caps),
    )
