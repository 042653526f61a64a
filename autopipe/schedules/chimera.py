"""Chimera (Li and Hoefler, SC 2021, arXiv 2107.06925): two replicas of the model in opposite directions, p even.

Rank r holds part r of the replica on its way down and part p−1−r of the one on its way up. In a unit of p micro-batches
half go each way, and the forwards and backwards of both interlock. Two micro-batches down (0 and 1), two up (2 and 3;
stages 4 to 7 are the second replica's), drawn for F = B:

    rank 0   0F0     0F1 7F2 7B2 7F3 7B3 0B0     0B1
    rank 1       1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1
    rank 2       5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3
    rank 3   4F2     4F3 3F0 3B0 3F1 3B1 4B2     4B3

At m = p the idle part is (p−2)/(2m + p−2) where F = B, and (p−2)/(1.5m + p−2) where B = 2F; a rank holds p/2 + 1 to p
micro-batches. More micro-batches are further units behind the first; there whose turn it is depends on the times.

``Chimera-Doubled`` is the paper's forward doubling: two forwards in the place of one, so that places of equal length
interlock where B = 2F; a rank holds up to 2p micro-batches. The paper's backward halving, a forward of one micro-batch
and backwards of its halves, is the same table at half the micro-batch size, in the memory of the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.core.schedule import TWO_WAY, Action, Op, Order, Shape, StageTimes, schedule
from autopipe.ordering.two_way import listed


def refuses(shape: Shape) -> str | None:
    """A rank holds a part of each replica, and they must be different ones; each replica needs a micro-batch."""
    if shape.ranks % 2:
        return "it takes an even number of ranks"
    return "it takes two micro-batches or more, one each way" if shape.micro_batches < 2 else None


@schedule("Chimera", placement=TWO_WAY, refuses=refuses, looks_at_times=True)
def chimera(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Units of p micro-batches, half of them each way."""
    return _best(shape, times, together=1)


@schedule(
    "Chimera-Doubled",
    placement=TWO_WAY,
    refuses=refuses,
    looks_at_times=True,
    aliases=("Chimera-ForwardDoubling", "Chimera-BackwardHalving"),
)
def chimera_doubled(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Units of 2p micro-batches, half of them each way, two forwards in one place."""
    return _best(shape, times, together=2)


def _best(shape: Shape, times: Sequence[StageTimes], together: int) -> Order:
    """Of two rules for whose turn it is the one with the least makespan; units as drawn where memory stops both."""
    ways = _ways(shape, together)
    half = max(1, shape.ranks // 2) * together

    def by_place(part: int, op: Op, number: int) -> float:
        unit, within = divmod(number, half)
        return 2 * shape.ranks * together * unit + _place(shape.ranks, part, op, within, together)

    def forward_first(part: int, op: Op, number: int) -> float:
        return number + (0 if op is Op.F else shape.micro_batches)

    made = [listed(shape, times, ways, shape.ranks * together, together, rule) for rule in (by_place, forward_first)]
    best = min((one for one in made if one), key=lambda one: one.makespan_s, default=None)
    return best.order if best else _as_drawn(shape, ways, together)


def _ways(shape: Shape, together: int) -> list[list[int]]:
    """The micro-batches of each replica: the first half of every unit goes down, the rest up."""
    ways: list[list[int]] = [[], []]
    size = shape.ranks * together
    for first in range(0, shape.micro_batches, size):
        last = min(first + size, shape.micro_batches)
        middle = first + (last - first + 1) // 2
        ways[0] += range(first, middle)
        ways[1] += range(middle, last)
    return ways


def _place(ranks: int, part: int, op: Op, number: int, together: int) -> int:
    """1F1B's places with a free one behind each: F of the n-th at part + 2n, B at 2p − 1 − part + 2n."""
    if op is Op.F:
        return part + 2 * (number - number % together)
    return 2 * ranks - 1 - part + 2 * number


def _as_drawn(shape: Shape, ways: Sequence[Sequence[int]], together: int) -> Order:
    """Every unit's actions by their places."""
    return tuple(
        tuple(action for _, action in sorted(_row(shape, rank, ways, together))) for rank in range(shape.ranks)
    )


def _row(shape: Shape, rank: int, ways: Sequence[Sequence[int]], together: int) -> Iterator[tuple[int, Action]]:
    half = max(1, shape.ranks // 2) * together
    for stage in shape.stages_of(rank):
        for number, batch in enumerate(ways[stage // shape.ranks]):
            unit, within = divmod(number, half)
            for op in (Op.F, Op.B):
                place = _place(shape.ranks, stage % shape.ranks, op, within, together)
                yield 2 * shape.ranks * together * unit + place, Action(stage, op, batch)
