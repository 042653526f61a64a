"""Why not something else: what the baselines, the other schedules, depths and micro-batch sizes would give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopipe.core.plan import SAME_CUTS, Rejected
from autopipe.core.units import format_bytes, format_percent
from autopipe.planning.best import Answer, glance, search
from autopipe.planning.keys import Key
from autopipe.planning.nearest import least_memory, little_memory
from autopipe.planning.outcome import Outcome, outcome
from autopipe.planning.remaking import Choice
from autopipe.planning.space import Space

_MOST = 8
"""So many other depths are all listed; of more only some."""

_EXACT = 2_000_000
"""Which split comes closest to fitting is found exactly where all cases together have no more layers in ranges."""

_DEEPEST = 3

_SAME = 5e-4
"""Steps closer than this print as equal."""


class _Way(NamedTuple):
    """A row, and the plan behind it where there is one."""

    row: Rejected
    made: Outcome | None = None


def rejected(space: Space, chosen: Outcome, listed: Answer) -> tuple[Rejected, ...]:
    """Each other way, its best step, and why it is not the plan; ways that come to the same plan are one.

    What the request leaves no room for is no way. ``listed`` is the best in the cluster's own order.
    """
    parts = ((what, part) for what, part in _parts(space, chosen) if any(part.shapes()))
    ways = [*_baselines(chosen), *(_best(what, part, chosen) for what, part in parts)]
    if chosen.case.seats.order and listed.best is not None:
        ways.append(_row("devices in their own order", _outcome(listed.best), chosen))
    return tuple(_as_one(ways))


def _parts(space: Space, chosen: Outcome) -> Iterator[tuple[str, Space]]:
    """The parts of the space that the plan is not in, and those without a pipeline."""
    case = chosen.case
    piped = replace(space, depths=tuple(depth for depth in space.depths if depth > 1))
    others = (kind for kind in space.kinds if case.depth == 1 or kind.name != case.schedule.name)
    yield from ((kind.name, piped.only(kind=kind)) for kind in others)
    several = "ranks" if case.stages > case.depth else "stages"
    yield from ((f"{depth} {several}", space.only(depth=depth)) for depth in _others(space.depths, case.depth))
    yield from ((f"{count} replicas", space.only(replicas=count)) for count in _others(space.replicas, case.replicas))
    sizes = (size for size in space.micro_batches if size != case.micro_batch)
    yield from ((f"micro-batch {size}", space.only(micro_batch=size)) for size in sizes)
    copies = tuple(count for count in space.replicas if count > 1)
    if case.depth > 1 and copies:
        yield "data parallelism, no pipeline", replace(space, depths=(1,), replicas=copies)
    if case.devices > 1:
        yield "one device, no pipeline", space.only(depth=1, replicas=1)


def _as_one(ways: Iterable[_Way]) -> Iterator[Rejected]:
    """The rows, those of one plan joined."""
    groups: dict[object, list[Rejected]] = {}
    for number, (row, made) in enumerate(ways):
        groups.setdefault(number if made is None else made.identity, []).append(row)
    for first, *same in groups.values():
        yield replace(first, also=tuple(row.what for row in same))


def closest(space: Space) -> Outcome | None:
    """The split that exceeds the memory limits least, of all cases; None when the pins leave no split.

    Of many large cases it is one of the deepest ones, with little on every rank.
    """
    keys = list(space.all())
    if sum(key.depth * space.ranges(key.micro_batch).pieces ** 3 for key in keys) > _EXACT:
        return _nearly_closest(space, keys)
    cases = [space.case(key) for key in keys]
    splits = [(split.value, number) for number, case in enumerate(cases) if (split := least_memory(case))]
    if not splits:
        return None
    case = cases[min(splits)[1]]
    split = least_memory(case)
    return outcome(case, split.positions) if split else None


def _nearly_closest(space: Space, keys: Sequence[Key]) -> Outcome | None:
    """One of the deepest cases, with the smallest micro-batch and the most replicas."""
    deepest = sorted(keys, key=lambda key: (-key.depth, key.micro_batch, -key.replicas, key.name))[:_DEEPEST]
    cases = [space.case(key) for key in deepest]
    splits = [(case, positions) for case in cases if (positions := little_memory(case))]
    return min((outcome(*split) for split in splits), key=Outcome.most_over, default=None)


def _baselines(chosen: Outcome) -> Iterator[_Way]:
    """What simple rules would do at the plan's depth, with its schedule and micro-batch."""
    if chosen.case.depth == 1:
        return
    for name, cuts in chosen.case.setting.rules(chosen.case.parts).items():
        if cuts is not None:
            other = outcome(chosen.case, chosen.case.ranges.places(cuts))
            yield _row(f"{name}, {chosen.case.schedule.name}", other, chosen)


def _best(what: str, space: Space, chosen: Outcome) -> _Way:
    """The best of a part of the space, or what comes closest to fitting."""
    best = glance(space) if chosen.case.large else search(space).best
    other = _outcome(best) if best else closest(space)
    if other is None:
        why = space.refusal() or "pins or layers that must not split their backward forbid it"
        return _Way(Rejected(what, f"cannot run: {why}"))
    return _row(what, other, chosen)


def _outcome(choice: Choice) -> Outcome:
    return outcome(choice.case, choice.found.positions)


def _others(numbers: Sequence[int], own: int) -> list[int]:
    """Other depths or replicas than 1: all where they are few, else the nearest ones, half, twice, and the most."""
    others = [number for number in numbers if number not in (1, own)]
    if len(others) <= _MOST:
        return others
    at = [number for number in others if number < own][-1:] + [number for number in others if number > own][:1]
    return [n for n in others if n in at or n in (own // 2, 2 * own) or n == others[-1]]


def _row(what: str, other: Outcome, chosen: Outcome) -> _Way:
    row = Rejected(what, _reason(other, chosen), other.expected_s, other.idle, other.peak_bytes)
    return _Way(row, other)


def _reason(other: Outcome, chosen: Outcome) -> str:
    rank = other.over_limit()
    if rank is not None:
        return f"over the {format_bytes(other.case.seats.limits[rank])} limit on rank {other.case.seats.ranks[rank]}"
    slower = other.expected_s / chosen.expected_s - 1
    if abs(slower) >= _SAME:
        return format_percent(slower, sign=True) + ("" if slower > 0 else ", but not asked for")
    if other.case is chosen.case and other.bounds == chosen.bounds:
        return SAME_CUTS
    if other.case.devices > chosen.case.devices:
        return "as fast, on more devices"
    return "as fast, with more memory" if other.peak_bytes > chosen.peak_bytes else "as fast"
