"""The loops of annealing: when actions run, what a move would do, and moving on. See annealing.py for the idea.

A place is an index into all ranks' rows, one behind the other. Of each action are kept when it begins and ends, and how
long everything takes from its end on. A move of one action changes times only of what begins no earlier than the place
where its row changed, and times until the end only of what lies before; so both are made again from there. Before that
the changed part of the row alone tells nearly what the move gives (Taillard, 1994): most moves end there.

These functions run as they are, or compiled; what they call must be in the tuples at the end, in a file where nothing
else changes often: numba compiles anew when a function's own file has changed.
"""

from __future__ import annotations

from typing import Any


def _random(state: Any, below: int) -> int:
    """A number from 0 to ``below`` − 1 (Park and Miller's generator)."""
    state.random[0] = state.random[0] * 48271 % 2147483647
    return int(state.random[0] // 64 % below)


def _first(values: Any, rows: Any, low: int, high: int, least: float) -> int:
    """The first place of a part of a row whose value, which never falls, is at least this."""
    while low < high:
        middle = (low + high) // 2
        if values[rows[middle]] < least:
            low = middle + 1
        else:
            high = middle
    return low


def _last(values: Any, rows: Any, low: int, high: int, least: float) -> int:
    """The first place of a part of a row whose value, which never rises, is less than this."""
    while low < high:
        middle = (low + high) // 2
        if values[rows[middle]] < least:
            high = middle
        else:
            low = middle + 1
    return low


def _forward(given: Any, state: Any, rank: int, place: int) -> float:
    """Begin all actions anew from a rank's place on; when the last one ends, or −1 where some wait for each other."""
    rows, starts, at, free = state.rows, given.starts, state.at, state.free
    ranks, left = len(given.caps), 0
    now = state.ends[rows[place - 1]] if place > starts[rank] else 0.0
    for r in range(ranks):
        at[r] = place if r == rank else _first(state.begins, rows, starts[r], starts[r + 1], now)
        for n in range(at[r], starts[r + 1]):
            state.ends[rows[n]] = -1.0
            left += 1
        free[r] = state.ends[rows[at[r] - 1]] if at[r] > starts[r] else 0.0
    moved = True
    while moved:
        moved = False
        for r in range(ranks):
            n, now = at[r], free[r]
            while n < starts[r + 1]:
                code = rows[n]
                need = given.before[code]
                wait = rows[n - 1] if n > starts[r] else -1
                if need >= 0:
                    arrival = state.ends[need]
                    if arrival < 0:
                        break
                    arrival += given.hops[code]
                    if arrival > now:
                        now, wait = arrival, need
                state.begins[code] = now
                now += given.seconds[code]
                state.ends[code], state.waits[code] = now, wait
                n += 1
            if n > at[r]:
                left -= n - at[r]
                at[r], free[r], moved = n, now, True
    if left > 0:
        return -1.0
    end = 0.0
    for r in range(ranks):
        end = max(end, free[r])
    return end


def _backward(given: Any, state: Any, rank: int, place: int) -> None:
    """How long everything takes behind each action's end, anew from a rank's place on, towards the beginning."""
    rows, starts, at, free = state.rows, given.starts, state.at, state.free
    ranks, least = len(given.caps), 0.0
    if place + 1 < starts[rank + 1]:
        least = state.afters[rows[place + 1]] + given.seconds[rows[place + 1]]
    for r in range(ranks):
        at[r] = place + 1 if r == rank else _last(state.afters, rows, starts[r], starts[r + 1], least)
        for n in range(starts[r], at[r]):
            state.afters[rows[n]] = -1.0
        free[r] = state.afters[rows[at[r]]] + given.seconds[rows[at[r]]] if at[r] < starts[r + 1] else 0.0
    moved = True
    while moved:
        moved = False
        for r in range(ranks):
            n, now = at[r], free[r]
            while n > starts[r]:
                code = rows[n - 1]
                need = given.behind[code]
                if need >= 0:
                    after = state.afters[need]
                    if after < 0:
                        break
                    now = max(now, after + given.seconds[need] + given.hops[need])
                state.afters[code] = now
                now += given.seconds[code]
                n -= 1
            if n < at[r]:
                at[r], free[r], moved = n, now, True


def _estimate(given: Any, state: Any, rank: int, low: int, high: int) -> float:
    """The longest way through a changed part of a row, as if the rest of the ranks began and ended as before."""
    rows, starts = state.rows, given.starts
    now = state.ends[rows[low - 1]] if low > starts[rank] else 0.0
    for n in range(low, high + 1):
        code = rows[n]
        need = given.before[code]
        if need >= 0 and given.homes[need] != rank:
            now = max(now, state.ends[need] + given.hops[code])
        state.heads[n] = now
        now += given.seconds[code]
    after, longest = 0.0, 0.0
    if high + 1 < starts[rank + 1]:
        after = state.afters[rows[high + 1]] + given.seconds[rows[high + 1]]
    for n in range(high, low - 1, -1):
        code = rows[n]
        need = given.behind[code]
        if need >= 0 and given.homes[need] != rank:
            after = max(after, state.afters[need] + given.seconds[need] + given.hops[need])
        after += given.seconds[code]
        longest = max(longest, state.heads[n] + after)
    return float(longest)


def _trace(given: Any, state: Any) -> int:
    """A critical path as places in the rows, and its length."""
    code, last = -1, -1.0
    for r in range(len(given.caps)):
        if given.starts[r + 1] > given.starts[r] and state.free[r] > last:
            code, last = state.rows[given.starts[r + 1] - 1], state.free[r]
    count = 0
    while code >= 0:
        state.critical[count] = state.places[code]
        count += 1
        code = state.waits[code]
    return count


def _legal(given: Any, state: Any, source: int, target: int) -> bool:
    """Whether the action at ``source`` may pass all others up to ``target``.

    Of its stage only other operations of other micro-batches, and never what it waits for or what waits for it.
    """
    code = state.rows[source]
    step = 1 if target > source else -1
    place = source
    while place != target:
        place += step
        other = state.rows[place]
        if given.lines[other] == given.lines[code] or given.jobs[other] == given.jobs[code]:
            return False
        if other == given.before[code] or other == given.behind[code]:
            return False
    return True


def _shift(state: Any, source: int, target: int) -> None:
    """Move one action to another place of its row."""
    code, step = state.rows[source], 1 if target > source else -1
    place = source
    while place != target:
        state.rows[place] = state.rows[place + step]
        place += step
    state.rows[target] = code


def _fits(given: Any, state: Any, rank: int, low: int, high: int) -> bool:
    """Whether a part of a rank's row fits in its memory, behind what the places before it hold."""
    held = state.held[low - 1] if low > given.starts[rank] else 0.0
    for place in range(low, high + 1):
        held += given.adds[state.rows[place]]
        if held > given.caps[rank]:
            return False
    return True


def _settle(given: Any, state: Any, rank: int, low: int, high: int) -> None:
    """Note where the actions of a part of a rank's row are now, and what the rank holds behind each."""
    held = state.held[low - 1] if low > given.starts[rank] else 0.0
    for place in range(low, high + 1):
        held += given.adds[state.rows[place]]
        state.held[place] = held
        state.places[state.rows[place]] = place


def _room(given: Any, state: Any, rank: int, target: int) -> int:
    """Bring the next weight gradient behind a place to that place; where it came from, −1 where none may."""
    for place in range(target + 1, given.starts[rank + 1]):
        if given.lines[state.rows[place]] % 3 == 2:
            if not _legal(given, state, place, target):
                return -1
            _shift(state, place, target)
            return place
    return -1


def _back(state: Any, source: int, target: int, came: int) -> None:
    """Undo a move."""
    if came >= 0:
        _shift(state, target, came)
    _shift(state, target, source)


def measure(given: Any, state: Any) -> float:
    """When the last action of the rows ends; −1 where they do not fit in memory, or wait for each other."""
    for rank in range(len(given.caps)):
        if not _fits(given, state, rank, given.starts[rank], given.starts[rank + 1] - 1):
            return -1.0
        _settle(given, state, rank, given.starts[rank], given.starts[rank + 1] - 1)
    return float(_forward(given, state, 0, given.starts[0]))


def anneal(given: Any, state: Any, first: int, last: int, tries: int, far: int, warm: float) -> None:
    """The moves from ``first`` to ``last`` of so many ``tries``, from rows that have been measured."""
    ranks = len(given.caps)
    _backward(given, state, ranks - 1, given.starts[ranks] - 1)
    for r in range(ranks):
        state.free[r] = state.ends[state.rows[given.starts[r + 1] - 1]] if given.starts[r + 1] > given.starts[r] else 0
    count = _trace(given, state)
    current, best = state.spans[0], state.spans[1]
    for n in range(first, last):
        source = state.critical[_random(state, count)]
        rank = state.ranks[source]
        by = 1 + _random(state, far) * _random(state, far) // far
        target = source + by if _random(state, 2) == 1 else source - by
        if target < given.starts[rank] or target >= given.starts[rank + 1]:
            continue
        if not _legal(given, state, source, target):
            continue
        low, high, came = min(source, target), max(source, target), -1
        _shift(state, source, target)
        if not _fits(given, state, rank, low, high):
            came = _room(given, state, rank, target)
            high = max(high, came)
            if came < 0 or not _fits(given, state, rank, low, high):
                _back(state, source, target, came)
                continue
        limit = current + warm * best * (1.0 - n / tries) ** 2 * _random(state, 1000) / 1000
        if _estimate(given, state, rank, low, high) > limit:
            _back(state, source, target, came)
            continue
        makespan = _forward(given, state, rank, low)
        if makespan < 0 or makespan > limit:
            _back(state, source, target, came)
            _forward(given, state, rank, low)
            continue
        current = makespan
        _settle(given, state, rank, low, high)
        count = _trace(given, state)
        _backward(given, state, rank, high)
        if current < best * (1 - 1e-12):
            best = current
            for place in range(len(state.rows)):
                state.best[place] = state.rows[place]
    state.spans[0], state.spans[1] = current, best


MEASURING: tuple[Any, ...] = (_first, _forward, _fits, _settle)
"""What ``measure`` calls, each function behind those that it calls itself."""

HELPERS: tuple[Any, ...] = (_random, _last, _backward, _estimate, _trace, _legal, _shift, _room, _back, *MEASURING)
"""Likewise ``anneal``."""
