"""Why not something else: what the baselines, the other schedules, depths and micro-batch sizes would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.baselines import BASELINES
from autopipe.core.plan import Rejected
from autopipe.core.units import format_bytes, format_percent
from autopipe.planning.outcome import Outcome, outcome
from autopipe.planning.space import Key, Space, search

_MOST = 8
"""So many other depths are all listed; of more only some."""

_EXACT = 2_000_000
"""Which split comes closest to fitting is found exactly where all cases together have no more layers in ranges."""

_DEEPEST = 3

_SAME = 5e-4
"""Steps closer than this print as equal."""


def rejected(space: Space, chosen: Outcome) -> tuple[Rejected, ...]:
    """Each other way, its best step, and why it is not the plan."""
    case = chosen.case
    rows = [*_baselines(chosen)]
    if case.depth > 1:
        rows += [_best(k.name, space.only(kind=k), chosen) for k in space.kinds if k.name != case.schedule.name]
    several = "ranks" if case.stages > case.depth else "stages"
    rows += [_best(f"{d} {several}", space.only(depth=d), chosen) for d in _others(space.depths, case.depth)]
    rows += [
        _best(f"{r} {'replicas' if r > 1 else 'replica'}", space.only(replicas=r), chosen)
        for r in _others((0, *space.replicas), case.replicas)
        if r
    ]
    rows += [
        _best(f"micro-batch {b}", space.only(micro_batch=b), chosen)
        for b in space.micro_batches
        if b != case.micro_batch
    ]
    if case.depth > 1 and max(space.replicas) > 1:
        rows.append(_best("data parallelism, no pipeline", space.only(depth=1), chosen))
    if case.devices > 1:
        rows.append(_best("one device, no pipeline", space.only(depth=1, replicas=1), chosen))
    return tuple(rows)


def closest(space: Space) -> Outcome | None:
    """The split that exceeds the memory limits least, of all cases; None when the pins leave no split.

    Of many large cases it is one of the deepest ones, with little on every rank.
    """
    keys = list(space.all())
    if sum(key.depth * space.ranges(key.micro_batch).pieces ** 3 for key in keys) > _EXACT:
        return _nearly_closest(space, keys)
    cases = [space.case(key) for key in keys]
    splits = [(split.value, number) for number, case in enumerate(cases) if (split := case.least_memory())]
    if not splits:
        return None
    case = cases[min(splits)[1]]
    split = case.least_memory()
    return outcome(case, split.positions) if split else None


def _nearly_closest(space: Space, keys: Sequence[Key]) -> Outcome | None:
    """One of the deepest cases, with the smallest micro-batch and the most replicas."""
    deepest = sorted(keys, key=lambda key: (-key.depth, key.micro_batch, -key.replicas, key.name))[:_DEEPEST]
    cases = [space.case(key) for key in deepest]
    splits = [(case, positions) for case in cases if (positions := case.little_memory())]
    return min((outcome(*split) for split in splits), key=Outcome.most_over, default=None)


def _baselines(chosen: Outcome) -> Iterator[Rejected]:
    """What simple rules would do at the plan's depth, with its schedule and micro-batch."""
    if chosen.case.depth == 1:
        return
    for name, rule in BASELINES.items():
        cuts = rule(chosen.case.setting.profile, chosen.case.parts)
        if cuts is not None:
            other = outcome(chosen.case, chosen.case.ranges.places(cuts))
            yield _row(f"{name}, {chosen.case.schedule.name}", other, chosen)


def _best(what: str, space: Space, chosen: Outcome) -> Rejected:
    """The best of a part of the space, or what comes closest to fitting."""
    best = search(space, first=chosen.case.large).best
    other = outcome(best.case, best.found.positions) if best else closest(space)
    if other is None:
        why = space.refusal() or "pins or layers that must not split their backward forbid it"
        return Rejected(what, f"cannot run: {why}")
    return _row(what, other, chosen)


def _others(numbers: Sequence[int], own: int) -> list[int]:
    """Other depths or replicas than 1: all where they are few, else the nearest ones, half, twice, and the most."""
    others = [number for number in numbers if number not in (1, own)]
    if len(others) <= _MOST:
        return others
    at = [number for number in others if number < own][-1:] + [number for number in others if number > own][:1]
    return [n for n in others if n in at or n in (own // 2, 2 * own) or n == others[-1]]


def _row(what: str, other: Outcome, chosen: Outcome) -> Rejected:
    return Rejected(what, _reason(other, chosen), other.expected_s, other.idle, other.peak_bytes)


def _reason(other: Outcome, chosen: Outcome) -> str:
    rank = other.over_limit()
    if rank is not None:
        return f"over the {format_bytes(other.case.seats.limits[rank])} limit on rank {rank}"
    slower = other.expected_s / chosen.expected_s - 1
    if abs(slower) >= _SAME:
        return format_percent(slower, sign=True) + ("" if slower > 0 else ", but not asked for")
    if other.case is chosen.case and other.bounds == chosen.bounds:
        return "the same cuts"
    if other.case.devices > chosen.case.devices:
        return "as fast, on more devices"
    return "as fast, with more memory" if other.peak_bytes > chosen.peak_bytes else "as fast"
