"""The last word between plans whose steps are nearly the same: the least step with its jitter.

The search compares steps in which every action takes its median. Where the profile knows how uneven actions are, the
best pipeline of each schedule that comes close, the baselines' splits of it and the best ones with a cut moved are
looked at again with what that adds: tables with more, shorter actions and with less slack wait more often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.planning.best import glance, search
from autopipe.planning.moves import single_moves
from autopipe.planning.outcome import Outcome, outcome
from autopipe.planning.space import Space

_CLOSE = 0.1
"""A plan that is slower by more is not made the best by less jitter."""

_MOVED = 8
"""So many of the splits with one cut moved are looked at."""

_LESS = 1e-3
"""So much less a step must take to be taken in the place of the search's own answer: draws are no more exact."""


def least_expected(space: Space, best: Outcome) -> Outcome:
    """Of the best plans of all schedules that come close to the ``best``, the one with the least expected step."""
    if best.case.setting.profile.jitter is None:
        return best
    other = min(_close(space, best), key=lambda one: one.expected_s, default=best)
    return other if other.expected_s < best.expected_s * (1 - _LESS) else best


def _parts(space: Space) -> Iterator[Space]:
    """Pipelines of each schedule, and no pipeline, in which all schedules are alike."""
    piped, alone = (replace(space, depths=tuple(d for d in space.depths if (d > 1) is deep)) for deep in (True, False))
    yield from (piped.only(kind=kind) for kind in space.kinds)
    yield alone


def _close(space: Space, best: Outcome) -> Iterator[Outcome]:
    most_s = best.step_s * (1 + _CLOSE)
    for part in _parts(space):
        found = glance(part, below_s=most_s) if best.case.large else search(part, below_s=most_s).best
        if found is not None:
            rules = found.case.measured(found.case.baselines())
            moved = [] if best.case.large else found.case.measured(map(tuple, single_moves(found.found.positions)))
            moved = sorted(moved, key=lambda one: one.step_s)[:_MOVED]
            splits = (one for one in (found.found, *rules, *moved) if one.step_s < most_s)
            yield from (outcome(found.case, one.positions) for one in splits)
