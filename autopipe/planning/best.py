"""The best of a space: its cases in the order of their bounds, until no bound can beat the best step."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from autopipe.planning.keys import Key
from autopipe.planning.remaking import Choice
from autopipe.planning.space import Space

SAME = 1e-9
"""Steps that differ by less are equal: well above rounding, far below any measurement."""

_EFFORT = 500_000
"""When the cases that were simulated have so many actions, the search ends with the best plan of them."""

_FAR = 0.02
"""The cuts of a large case are not moved where a good split of it is slower than the best plan by more than this."""

_GLANCES = 4
"""So many cases are looked at where a good plan is enough."""


class Answer(NamedTuple):
    """The best choice of a space (None where nothing fits), and the seconds that no plan in it can beat."""

    best: Choice | None
    lower_bound_s: float


def search(space: Space, *, below_s: float = float("inf")) -> Answer:
    """The best case and split, cases in the order of their bounds: quick ones first, sharper ones where needed.

    A case whose bound is above the best step is not simulated, so the answer is the same as if all were, unless the
    search ends early, after ``_EFFORT`` actions. Then the bound is that of the cases that are left. Of a large case
    that is far from the best one no cuts are moved, and no orders are made for the stages of one that is far behind.
    Cases whose bound is not below ``below_s`` are of no interest. The space keeps no tables of them.
    """
    queue = _queue(space)
    best, least, effort = None, float("inf"), 0
    while queue:
        bound, known, number, key = queue[0]
        if bound >= below_s or bound == float("inf") or (best is not None and not _may_win(bound, key, best)):
            break
        if known < 3:
            sharper = space.bound_s(key) if known == 2 else space.family_bound_s(key, sharp=known == 1)
            bound = max(bound, sharper)
            heapq.heapreplace(queue, (bound, known + 1, number, key))
            if best is not None and not _may_win(bound, key, best):
                space.let_go(key)
            continue
        least = min(least, bound)
        if best is not None and effort > _EFFORT:
            break
        heapq.heappop(queue)
        effort += space.case(key).actions
        if (choice := _looked_at(space, key, best)) is not None:
            best = _better(best, choice)
        space.let_go(key)
    for *_, key in queue:
        space.let_go(key)
    return Answer(best, least)


def _looked_at(space: Space, key: Key, best: Choice | None) -> Choice | None:
    """The best split of a case, None where nothing fits, or where it is so far from the best one that it cannot win."""
    if best is not None and space.glanced(key) and _far(space.near(key), best):
        return None
    if best is not None and space.behind(key, best):
        return None
    return space.choice(key)


def glance(space: Space, *, below_s: float = float("inf")) -> Choice | None:
    """A good plan of a space: the best of good splits of the first ``_GLANCES`` cases, in the order of their bounds.

    Where only plans that take less than ``below_s`` are of interest, the first of those.
    """
    queue = _queue(space)
    best, left = None, _GLANCES
    while queue and left:
        bound, known, number, key = heapq.heappop(queue)
        if bound >= below_s or bound == float("inf") or (best is not None and not _may_win(bound, key, best)):
            break
        if known < 2:
            heapq.heappush(queue, (max(bound, space.family_bound_s(key, sharp=known == 1)), known + 1, number, key))
        else:
            choice = space.near(key)
            space.let_go(key)
            if choice is not None:
                best, left = _better(best, choice), left - 1
            if best is not None and best.found.step_s < below_s < float("inf"):
                break
    return best


def _queue(space: Space) -> list[tuple[float, int, int, Key]]:
    """The cases by their quick bounds, as a heap."""
    queue = [(space.quick_bound_s(key), 0, number, key) for number, key in enumerate(space.all())]
    heapq.heapify(queue)
    return queue


def _far(choice: Choice | None, best: Choice) -> bool:
    """Whether a split is so much slower that moving its cuts will not make it the best."""
    return choice is None or choice.found.step_s > best.found.step_s * (1 + _FAR)


def _may_win(bound: float, key: Key, best: Choice) -> bool:
    """Whether a case can beat the best one, or equal it on as few devices."""
    fewer = key.depth * key.replicas <= best.case.devices
    return bound <= best.found.step_s * (1 + SAME if fewer else 1 - SAME)


def _better(best: Choice | None, other: Choice) -> Choice:
    """The faster one; among equals fewer devices and ranks, less memory, larger micro-batches, then the name."""
    if best is None or other.found.step_s < best.found.step_s * (1 - SAME):
        return other
    if other.found.step_s > best.found.step_s * (1 + SAME):
        return best
    return min(best, other, key=_preference)


def _preference(choice: Choice) -> tuple[int, int, float, int, str]:
    case, found = choice
    return case.devices, case.depth, found.bytes, -case.micro_batch, case.outline.name
