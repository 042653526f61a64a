"""The loops of list scheduling: whose turn it is, and when.

A rank runs the most urgent action, or the one whose turn it is, or a weight gradient in a gap. ``given`` and ``state``
are those of listing.py. All of this is compiled where numba is installed, and is one module because numba compiles a
function anew only where that function's own file has changed.
"""

from __future__ import annotations

from typing import Any

NEVER = 1e300
"""When a value comes that nothing has made yet."""


def _back_fits(given: Any, state: Any, rank: int, stage: int) -> bool:
    """Whether I may add what it adds to the rank's memory."""
    after = state.held[rank] + given.after_back[stage] - given.after_forward[stage]
    return bool(after <= given.caps[rank])


def _most_urgent(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """The most urgent action that has come, or comes within the window, or else the next to come; and when."""
    now, batches = state.free[rank], given.batches
    reserve = given.extra[rank]
    for n in range(given.starts[rank], given.starts[rank + 1]):
        if state.forwards[given.owns[n]] <= state.oldest[rank]:
            reserve += given.after_forward[given.owns[n]]
    best, best_at, best_key, soon, soon_at = -1, NEVER, NEVER, -1, NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        for op in range(2):
            b = state.backs[s] if op else state.forwards[s]
            if b >= batches:
                continue
            at = state.arrives_b[s * batches + b] if op else state.arrives_f[s * batches + b]
            if at >= soon_at and at > now + given.windows[b]:
                continue
            if op:
                if not _back_fits(given, state, rank, s):
                    continue
                key = given.back_keys[s] + given.turns[b]
            else:
                need = state.held[rank] + reserve
                if b > state.oldest[rank]:
                    need += given.after_forward[s]
                if need > given.caps[rank] or b - state.backs[s] >= given.most[s]:
                    continue
                key = given.forward_keys[s] + given.turns[b]
            if at <= now + given.windows[b] and key < best_key:
                best, best_at, best_key = 3 * s + op, at, key
            if at < soon_at:
                soon, soon_at = 3 * s + op, at
    if best < 0:
        return soon, soon_at
    return best, best_at


def _in_turn(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """The action whose turn it is; another one that is there, where that one has not come."""
    batches = given.batches
    turn, turn_key = -1, NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        if state.forwards[s] < batches:
            key = given.forward_keys[s] + given.turns[state.forwards[s]]
            if key < turn_key:
                turn, turn_key = 3 * s, key
        if state.backs[s] < batches:
            key = given.back_keys[s] + given.turns[state.backs[s]]
            if key < turn_key:
                turn, turn_key = 3 * s + 1, key
    if turn < 0:
        return -1, NEVER
    s = turn // 3
    at = NEVER
    if turn % 3 == 1:
        if state.backs[s] < state.forwards[s] and _back_fits(given, state, rank, s):
            at = state.arrives_b[s * batches + state.backs[s]]
    elif state.held[rank] + given.after_forward[s] <= given.caps[rank]:
        at = state.arrives_f[s * batches + state.forwards[s]]
    if at <= state.free[rank]:
        return turn, at
    other = _pulled(given, state, rank, at) if given.pull >= 0 else -1
    return (other, state.free[rank]) if other >= 0 else (turn, at)


def _pulled(given: Any, state: Any, rank: int, until: float) -> int:
    """The most urgent action that is there and may come before its turn, in the time ``until`` the one in turn."""
    now, batches = state.free[rank], given.batches
    best, best_key = -1, NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        b = state.backs[s]
        if b < state.forwards[s] and state.arrives_b[s * batches + b] <= now:
            key = given.back_keys[s] + given.turns[b]
            fits = until >= NEVER or now + given.pull * given.back[s] <= until
            if fits and key < best_key and _back_fits(given, state, rank, s):
                best, best_key = 3 * s + 1, key
        b = state.forwards[s]
        if b < batches and state.arrives_f[s * batches + b] <= now:
            key = given.forward_keys[s] + given.turns[b]
            fits = until >= NEVER or now + given.pull * given.forward[s] <= until
            fits = fits and key < best_key and state.held[rank] + given.after_forward[s] <= given.caps[rank]
            if fits and _gets_through(given, state, rank, s, key):
                best, best_key = 3 * s, key
    return best


def _gets_through(given: Any, state: Any, rank: int, early: int, key: float) -> bool:
    """Whether a rank that runs a forward of stage ``early`` now can follow its keys up to that action's turn."""
    level = given.after_forward[early] + given.extra[rank]
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        state.ahead_f[s], state.ahead_b[s] = state.forwards[s], state.backs[s]
        level += (state.forwards[s] - state.backs[s]) * given.after_forward[s]
    while level <= given.caps[rank]:
        least, which = key, -1
        for n in range(given.starts[rank], given.starts[rank + 1]):
            s = given.owns[n]
            forward = given.forward_keys[s] + given.turns[state.ahead_f[s]]
            if state.ahead_f[s] < given.batches and forward < least:
                least, which = forward, 2 * s
            back = given.back_keys[s] + given.turns[state.ahead_b[s]]
            if state.ahead_b[s] < given.batches and back < least:
                least, which = back, 2 * s + 1
        if which < 0:
            return True
        s = which // 2
        if which % 2 == 0:
            state.ahead_f[s] += 1
            level += given.after_forward[s]
        else:
            state.ahead_b[s] += 1
            level -= given.after_forward[s]
    return False


def _weight_fits(given: Any, state: Any, rank: int, begin: float) -> bool:
    """Whether the rank's next weight gradient should fill the gap before ``begin``."""
    gap = begin - state.free[rank]
    if gap <= 0:
        return False
    s = state.waiting[given.starts[rank] * given.batches + state.first[rank]]
    if gap >= given.fill * given.weight[s]:
        return True
    if not given.balance:
        return False
    longest = 0.0
    for k in range(len(state.idle)):
        longest = max(longest, state.idle[k])
    return bool(gap > longest - state.idle[rank])


def _pick(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """What the rank would do next as far as it knows, as 3 · stage + (0 F, 1 I or B, 2 W), and when."""
    code, at = _in_turn(given, state, rank) if given.strict else _most_urgent(given, state, rank)
    begin = max(state.free[rank], at)
    if state.last[rank] > state.first[rank] and _weight_fits(given, state, rank, begin):
        stage = state.waiting[given.starts[rank] * given.batches + state.first[rank]]
        return 3 * stage + 2, state.free[rank]
    return code, begin


def _start(given: Any, state: Any, rank: int, code: int, begin: float) -> int:
    """Run the action; the rank that its value goes to, or its own."""
    s, op = code // 3, code % 3
    batches, other, b = given.batches, rank, 0
    if state.lengths[rank] > 0:
        state.idle[rank] += begin - state.free[rank]
    if op == 0:
        b = state.forwards[s]
        state.forwards[s] += 1
        state.free[rank] = begin + given.forward[s]
        state.held[rank] += given.after_forward[s]
        if s + 1 < len(given.forward):
            state.arrives_f[(s + 1) * batches + b] = state.free[rank] + given.hops[s]
            other = given.placement[s + 1]
        else:
            state.arrives_b[s * batches + b] = state.free[rank]
    elif op == 1:
        b = state.backs[s]
        state.backs[s] += 1
        state.free[rank] = begin + given.back[s]
        state.held[rank] += given.after_back[s] - given.after_forward[s]
        if s > 0:
            state.arrives_b[(s - 1) * batches + b] = state.free[rank] + given.hops[s - 1]
            other = given.placement[s - 1]
        if given.whole[s]:
            state.weights[s] += 1
        else:
            state.waiting[given.starts[rank] * batches + state.last[rank]] = s
            state.last[rank] += 1
    else:
        b = state.weights[s]
        state.weights[s] += 1
        state.free[rank] = begin + given.weight[s]
        state.held[rank] -= given.after_back[s]
        state.first[rank] += 1
    done = batches
    for n in range(given.starts[rank], given.starts[rank + 1]):
        done = min(done, state.weights[given.owns[n]])
    state.oldest[rank] = done
    kind = 4 * s + (3 if op == 1 and given.whole[s] else op)
    state.rows[3 * batches * given.starts[rank] + state.lengths[rank]] = kind * batches + b
    state.lengths[rank] += 1
    return int(other)


def run(given: Any, state: Any) -> float:
    """Start all actions; when the last one ends, or −1 where no rank can go on."""
    ranks, left = len(given.caps), 0
    for s in range(len(given.forward)):
        left += given.batches * (2 if given.whole[s] else 3)
    codes, begins = state.codes, state.begins
    for rank in range(ranks):
        codes[rank], begins[rank] = _pick(given, state, rank)
    while left > 0:
        rank = 0
        for r in range(ranks):
            if begins[r] < begins[rank]:
                rank = r
        if begins[rank] >= NEVER:
            return -1.0
        other = _start(given, state, rank, codes[rank], begins[rank])
        codes[rank], begins[rank] = _pick(given, state, rank)
        if other != rank:
            codes[other], begins[other] = _pick(given, state, other)
        left -= 1
    end = 0.0
    for rank in range(ranks):
        end = max(end, state.free[rank])
    return end


HELPERS: tuple[Any, ...] = (_back_fits, _most_urgent, _gets_through, _pulled, _in_turn, _weight_fits, _pick, _start)
"""What ``run`` calls, each function behind those that it calls itself."""
