"""Cuts that leave any order room: those whose stages no order could run much longer than the best cuts' ones.

A split that is good for the order at hand may be bad for all others. What no order of given stages can beat on a rank,
is the most, over when its actions can begin at the earliest and how long the rest of the pipeline takes behind them at
the least, of that beginning, all its work that begins no earlier and has no less behind it, and what is behind (the
one-machine bound of a job shop; Carlier, 1982). Here without memory, for many splits at once, to compare cuts with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autopipe.core.schedule import stages_on
from autopipe.planning.cases import Case
from autopipe.planning.ladder import Floats
from autopipe.planning.moves import Positions, joint_moves, single_moves
from autopipe.planning.needs import fitting_forwards
from autopipe.planning.tied import in_splits, twice

_KEPT = 4
"""So many splits are moved at once."""

_FOUND = 100
"""So many of all that were rated are of interest."""

_ROUNDS = 15
"""They are moved so often at most."""


def roomy(case: Case, starts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The best splits by that bound that moving cuts reaches from ``starts``, best first."""
    known = dict(_rated(case, np.array([*starts], np.intp).reshape(-1, case.parts + 1)))
    moved: set[tuple[int, ...]] = set()
    for _ in range(_ROUNDS):
        front = [
            split for split in sorted(known, key=lambda split: (known[split], split))[:_KEPT] if split not in moved
        ]
        if not front:
            break
        moved.update(front)
        near = np.concatenate([move(split) for split in front for move in (single_moves, joint_moves)])
        known.update(_rated(case, np.unique(near, axis=0)))
    return sorted(known, key=lambda split: (known[split], split))[:_FOUND]


def _rated(case: Case, splits: Positions) -> Iterable[tuple[tuple[int, ...], float]]:
    splits = case.splits.allowed(splits)
    return zip(map(tuple, splits.tolist()), ends_of_any_order(case, splits).tolist(), strict=True)


def ends_of_any_order(case: Case, splits: Positions) -> Floats:
    """Ticks that no order of splits' stages can beat, shape (splits,)."""
    if not len(splits):
        return np.zeros(0)
    stages = case.stages
    costs = case.splits.costs(splits)
    forward, backward, input_grad, weight_grad = costs.actions_s.reshape(stages, 4, -1).transpose(1, 0, 2)
    there, back = costs.transfers_s.reshape(2, stages, -1)
    whole = np.minimum(backward, input_grad + weight_grad)
    gradient = np.minimum(backward, input_grad)
    begin_f = np.cumsum(forward + there, axis=0) - forward
    way = np.cumsum((gradient + back)[::-1], axis=0)[::-1]
    begin_i = begin_f[-1] + forward[-1] + way - gradient
    behind = _behind(whole, gradient, back)
    behind_f = begin_i + gradient + behind - begin_f - forward
    begins = np.stack([begin_f, begin_i, begin_i + gradient])
    tails = np.stack([behind_f, behind, np.zeros_like(behind)])
    work = case.outline.micro_batches * np.stack([forward, gradient, whole - gradient])
    ends = [_of_rank(*(of[:, own].reshape(-1, len(splits)) for of in (begins, tails, work))) for own in _own(case)]
    held, away = _Held.of(case, splits), begin_i - begin_f - forward
    kept = np.minimum(
        (away + input_grad) * held.forward + weight_grad * held.input_grad, (away + backward) * held.forward
    )
    for own, room in zip(_own(case), held.room, strict=True):
        early = fitting_forwards(room, held.forward[own], forward[own], case.outline.micro_batches)
        ends.append(begin_i[own].min(axis=0) + work[:, own].sum(axis=(0, 1)) - early)
        ends.append(begin_f[own[0]] + case.outline.micro_batches * kept[own].sum(axis=0) / np.maximum(room, 1.0))
    return np.asarray(np.max(ends, axis=0))


class _Held(NamedTuple):
    """The least bytes that stages hold of a micro-batch after F, and after I; and what ranks have for them at the most.

    Of shapes (stages, splits), and (ranks, splits).
    """

    forward: Floats
    input_grad: Floats
    room: Floats

    @classmethod
    def of(cls, case: Case, splits: Positions) -> _Held:
        """Those of splits; a layer that may recompute counts as if it did."""
        ranges, setting, again = case.ranges, case.setting, case.recompute == "auto"
        begin, end = splits.T[case.splits.part_of], splits.T[case.splits.part_of + 1]
        held = (ranges.least_held if again else ranges.held)[begin, end]
        left = np.zeros_like(held) if again else ranges.held_after_input_grad[begin, end]
        ties = in_splits(setting.profile, ranges, case.outline, begin, end)
        shared = twice(ties, setting.profile, setting.update(case.replicas), begin.shape).lasting
        lasting = (ranges.static - ranges.gradient)[begin, end] - shared
        taken = np.array([lasting[own].sum(axis=0) for own in _own(case)])
        return cls(held, left, np.array(case.seats.limits, np.float64)[:, None] - taken)


def _own(case: Case) -> list[list[int]]:
    return [list(stages_on(case.outline.placement, rank)) for rank in range(case.depth)]


def _behind(whole: Floats, gradient: Floats, back: Floats) -> Floats:
    """Ticks behind each stage's last gradient: its own weight gradients, or those of a stage on the gradient's way."""
    result = whole - gradient
    for stage in range(1, len(result)):
        onward = back[stage - 1] + gradient[stage - 1] + result[stage - 1]
        result[stage] = np.maximum(result[stage], onward)
    return result


def _of_rank(begins: Floats, tails: Floats, work: Floats) -> Floats:
    """The bound of one rank; its actions' rows, one for all micro-batches, shape (actions, splits)."""
    least = np.full(begins.shape[1], -np.inf)
    for begin in begins:
        late = np.where(begins >= begin, work, 0.0)
        for tail in tails:
            inside = np.where(tails >= tail, late, 0.0).sum(axis=0)
            least = np.maximum(least, np.where(inside > 0, begin + inside + tail, 0.0))
    return least
