"""What no split can beat.

``quick_bound_s`` looks at layers only. ``least_ends`` runs dynamic programs over a case's tables: a stage cannot
start before the first micro-batch has come through the stages before it (head), must then run its whole row, and after
its last gradient the stages before it still have their backward to do (tail), then the optimizer. It also waits:
where its row lets only some micro-batches be in flight, a later one starts when an earlier one is back, and each such
round trip takes all later stages' forward and backward; and what its row runs after its first gradient comes after
the first trip, what it runs before its last forward before the last one. Where the last stage runs all its forwards
first, all forwards of a stage, the way of the last one to the end and back, and all its backwards follow one another.
Head, trip and tail are each the least over all splits; so the largest term of a split is a bound for it, and the split
whose largest term is smallest bounds them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopipe.planning.ladder import Floats
from autopipe.planning.needs import Place
from autopipe.planning.outline import Outline, Row
from autopipe.planning.ranges import Ranges
from autopipe.planning.seats import Seats
from autopipe.planning.tables import Tables
from autopipe.solvers.chain_dp import prefix_sums, suffix_sums, suffix_ways


def has_lasting_room(ranges: Ranges, seats: Seats, ways: int = 1) -> bool:
    """Whether the memory of all ranks holds what is there throughout: in a pipeline of two ``ways`` the model twice."""
    return ways * ranges.whole.static <= seats.room


def quick_bound_s(
    ranges: Ranges, seats: Seats, micro_batches: int, *, stages_per_rank: int = 1, splits: bool = True, ways: int = 1
) -> float:
    """Seconds that no schedule and no split into the stages of a pipeline can beat, without any tables.

    That of ``unlimited_bound_s``; infinite where there is no lasting room.
    """
    if not has_lasting_room(ranges, seats, ways):
        return float("inf")
    return unlimited_bound_s(ranges, seats, micro_batches, stages_per_rank=stages_per_rank, splits=splits, ways=ways)


def unlimited_bound_s(
    ranges: Ranges, seats: Seats, micro_batches: int, *, stages_per_rank: int = 1, splits: bool = True, ways: int = 1
) -> float:
    """Seconds that no schedule and no split can beat, whatever the memory.

    One micro-batch passes all layers. Some stage works as long as the best split's longest. And with w the work of a
    micro-batch on a device of the best speed, of which at least a part q is F, or F and B where no backward
    ``splits``, a stage that comes after work P of earlier ones takes q·P + m·w + c ≤ T in a step of T, c for the
    reduction of its gradients and its optimizer; so with x = 1 − q/m, for all the work W of p stages to fit, and all
    their C, T ≥ q·(W + x^(p−1)·C/m) / (1 − x^p). A slower device takes on less, in proportion to its speed.

    With several stages on a rank, not all of its work comes after that of earlier ranks, nor in one range: what is left
    is the work of all ranks, shared out. Of a pipeline with two ``ways`` each holds the model, and steps.
    """
    whole, m = ranges.whole, micro_batches
    after = ways * whole.optimizer + seats.least_reduce_s(whole.gradient) / ranges.tick_s * seats.fastest
    if stages_per_rank > 1:
        ticks = max(whole.way, (m * whole.work + after) * seats.fastest / seats.total_speed)
    else:
        part = ranges.forced_part(splits=splits)
        left = seats.product(part / m)
        slowest = (1 - part / m) ** (seats.depth - 1)
        everything = part * (whole.work + slowest * after / m) / (1 - left)
        ticks = max(whole.way, everything, m * ranges.longest_work[seats.depth - 1])
    return ticks / seats.fastest * ranges.tick_s


def quick_period_s(ranges: Ranges, seats: Seats, micro_batches: int) -> float:
    """Seconds between two updates of ``micro_batches`` that no asynchronous pipeline can beat, without any tables.

    Every stage runs each of them between two of its optimizer steps: the longest one, and all of them together.
    Infinite where there is no lasting room.
    """
    whole = ranges.whole
    if not has_lasting_room(ranges, seats):
        return float("inf")
    longest = micro_batches * ranges.longest_work[seats.depth - 1] / seats.fastest
    shared = (micro_batches * whole.work + whole.optimizer) / seats.total_speed
    return max(longest, shared) * ranges.tick_s


def has_room(ranges: Ranges, where: Sequence[Place], *, may_recompute: bool) -> bool:
    """Whether the layers might fit in stages at these places; a quick test that is sure only when it says no."""
    *_, whole = rooms(ranges, where, may_recompute=may_recompute)
    return whole


def rooms(ranges: Ranges, where: Sequence[Place], *, may_recompute: bool) -> Iterator[bool]:
    """The same of the last 1, 2, … of the places, as pipelines of their own.

    From the last stage on each takes as many layers as it has room for, if all of them recomputed; the first one of a
    pipeline receives nothing.
    """
    held, end = ranges.least_held if may_recompute else ranges.held, ranges.pieces
    for place in reversed(where):
        most = max(moment.forwards for moment in place.moments if moment.gradients)
        need = ranges.static[: end + 1, end] + most * held[: end + 1, end] + place.kept.behind * ranges.least_crossing
        yield bool(need[0] <= place.limit_bytes)
        fits = need <= place.limit_bytes - place.kept.before * ranges.least_crossing
        end = int(fits.argmax()) if fits.any() else end


def least_ends(tables: Tables, rows: Sequence[Row]) -> Floats:
    """Ticks at which a step can end at the earliest when stage s takes a range, a band like the tables.

    ``rows`` are those of the stages. It holds for any choice of layers to recompute; infinite where none fits.
    """
    head, tail = _heads_and_tails(tables, back_ticks(tables, rows))
    return _possible(tables, head + ends_behind(tables, rows, tail))


def ends_behind(tables: Tables, rows: Sequence[Row], tail: Floats) -> Floats:
    """Ticks from a stage's first forward to the end of the step, by its range, with ``tail`` behind its last gradient.

    The rest is as in least_ends.
    """
    forward, _, _, weight_grad = tables.least
    back = back_ticks(tables, rows)
    trips = _trips(tables, back)
    trailing = np.array([row.trailing for row in rows])[:, None, None]
    rounds = np.array([row.rounds for row in rows])[:, None, None]
    work, later, earlier = (
        _times(tables, counts)
        for counts in ([row.counts for row in rows], [row.later for row in rows], [row.earlier for row in rows])
    )
    whole = np.maximum(work, later + trips)  # until the row's end
    to_last = np.maximum(whole - trailing * weight_grad if trailing.any() else whole, earlier + trips)
    if not sum(rows[-1].earlier[1:3]):
        both_ways = _times(tables, [(*row.counts[:3], 0) for row in rows]) + trips - forward - back
        whole, to_last = np.maximum(whole, both_ways), np.maximum(to_last, both_ways)
    return np.asarray(np.maximum(whole + tables.optimizer, np.maximum(to_last, rounds * trips) + tail))


def least_ends_of_any_order(tables: Tables, micro_batches: int) -> Floats:
    """As least_ends, for any order of one stage a rank, backwards whole or split.

    A stage runs all of its work; its first backward begins when the first micro-batch has been to the end and back; and
    behind its last gradient that has the way to the first stage to go. Its last backward, weight gradients too, comes
    when a later stage has run all forwards and gradients, from when the first micro-batch came there, and the last
    gradient has come from there. Of tables without limits of memory, since orders differ in what they hold.
    """
    forward, backward, input_grad, weight_grad = tables.least
    back = np.minimum(backward, input_grad)
    one = np.minimum(backward, input_grad + weight_grad)
    heads, tails = _heads_and_tails(tables, back)
    first = np.maximum(micro_batches * forward, _trips(tables, back) - back) + micro_batches * one
    last = forward + _behind(tables.activations + tables.gradients) + _later(tables, back, micro_batches) + one
    ends = np.maximum(np.maximum(first, last) + tables.optimizer, micro_batches * (forward + back) + tails)
    return _possible(tables, heads + ends)


def _later(tables: Tables, back: Floats, micro_batches: int) -> Floats:
    """From a micro-batch's coming to the stage behind to the last gradient's leaving it; shape (stages, n + 1, 1).

    Of the way there, all of one stage's forwards and gradients, and the way back, the longest.
    """
    both = tables.least[0] + back
    through = both + _behind(tables.activations + tables.gradients)
    alone = np.maximum(micro_batches * both, through)
    return suffix_ways(_possible(tables, alone), _possible(tables, through))[:, :, None]


def least_periods(tables: Tables, outline: Outline) -> Floats:
    """Ticks from one update to the next at the least when stage s takes a range, a band like the tables.

    Of an asynchronous schedule, whose rows count the operations of one update: the stage runs them all, and steps. And
    each of the micro-batches that it lets be in flight is away for a round trip.
    """
    flights = [max(moment.forwards for moment in moments) for moments in outline.moments]
    often = outline.micro_batches / np.array(flights)[:, None, None]
    busy = _times(tables, [row.counts for row in outline.rows]) + tables.optimizer
    return _possible(tables, np.maximum(busy, often * _trips(tables, back_ticks(tables, outline.rows))))


def _heads_and_tails(tables: Tables, back: Floats) -> tuple[Floats, Floats]:
    """The least ticks before a stage's first forward, and after its last gradient, by its range, a band each."""
    heads = prefix_sums(_possible(tables, tables.least[0] + _behind(tables.activations)))
    tails = prefix_sums(_possible(tables, back + _behind(tables.gradients)))
    first = np.arange(1, tables.reach + 1)
    tails += tables.optimizer[0, first, tables.reach - first].min()
    starts = np.maximum(np.arange(heads.shape[1])[:, None] - tables.reach + np.arange(tables.reach), 0)
    return heads[:, starts], tails[:, starts]


def back_ticks(tables: Tables, rows: Sequence[Row]) -> Floats:
    """Ticks until a gradient leaves a stage: its I where that runs apart."""
    _, backward, input_grad, _ = tables.least
    if not any(row.splits for row in rows):
        return np.asarray(backward)
    splits = np.array([row.splits for row in rows])[:, None, None]
    return np.asarray(np.where(splits, np.minimum(backward, input_grad), backward))


def _times(tables: Tables, counts: Sequence[tuple[int, ...]]) -> Floats:
    """Ticks that the stages' operations take when they run so often."""
    ticks = np.zeros_like(tables.optimizer)
    for op, often in enumerate(np.array(counts, np.float64).T):
        if often.any():
            ticks += often[:, None, None] * tables.least[op]
    return ticks


def _possible(tables: Tables, ticks: Floats) -> Floats:
    return np.where(tables.possible, ticks, np.inf)


def _behind(transfers: Floats) -> Floats:
    """The transfer over the cut at a range's end, nothing behind the last stage; shape (stages, n + 1, 1)."""
    return np.vstack([transfers, np.zeros((1, transfers.shape[1]))])[:, :, None]


def _trips(tables: Tables, back: Floats) -> Floats:
    """From a forward's start to its gradient's end: this stage, all later ones at the least, and the links."""
    both = tables.least[0] + back + _behind(tables.activations + tables.gradients)
    later = suffix_sums(_possible(tables, both))
    return np.asarray(both + later[:, :, None])
