"""ZB-V (Qi et al., 2023, arXiv 2401.10241): zero bubble on two stages a rank in a V, in 1F1B's memory.

On each rank, "down" is its first stage and "up" its second. All ranks go in rounds: one input gradient each, then one
forward each, the stage that is further on its way first where its value is made. At equal times:

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

No rank idles from its start to its end where F = I = W and m ≥ 2p; the flush adds (p − 1)F/2. Peak p micro-batches'
activations of a rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule
from autopipe.ordering.passes import Slots, block_variants
from autopipe.ordering.presets import fit

_NONE = float("inf")


@schedule(
    "ZB-V",
    placement="v",
    stages_per_rank=(2,),
    aliases=("ScheduleZBVZeroBubble", "ZBV", "ZBVZeroBubble"),
    looks_at_times=True,
)
def zb_v(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The best of two ways to fill gaps that are shorter than a weight gradient.

    Very uneven stages can leave rounds without room in memory: then the order of ``slots``, as the values come.
    """
    made = [_Rounds(shape, times, squeeze_forward) for squeeze_forward in (True, False)]
    whole = [rounds for rounds in made if rounds.run()]
    if not whole:
        return fit(shape, times, shape.ranks, block_variants(slots(shape.ranks))).order
    return tuple(map(tuple, min(whole, key=lambda rounds: max(rounds.free) + max(rounds.idle)).rows))


def slots(ranks: int) -> list[Slots]:
    """The order that rounds settle in: each rank's F and I of one stage, then of the other; not aligned over ranks."""
    return [Slots(-6 * (2 * ranks - 1 - r) - 1, 2 - 6 * ranks, 6 * (r - ranks) + 3, 0) for r in range(ranks)]


class _Rounds:
    """All ranks' rows, made action by action with the times at which they run.

    A weight gradient fills a gap that it fits in; a shorter one too where the rank would else idle longer than any
    other, before every I and, with ``squeeze_forward``, before every forward.
    """

    def __init__(self, shape: Shape, times: Sequence[StageTimes], squeeze_forward: bool) -> None:
        self.shape, self.times, self.part = shape, times, shape.weight_part
        self.hops = shape.hops_s or (0.0,) * (shape.stages - 1)
        self.squeeze_forward = squeeze_forward
        self.ends: dict[Action, float] = {}
        self.counts: Counter[tuple[Op, int]] = Counter()
        self.free, self.idle, self.held = ([0.0] * shape.ranks for _ in range(3))
        self.waiting: list[deque[int]] = [deque() for _ in range(shape.ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(shape.ranks)]

    def run(self) -> bool:
        """Make the rows; False where the ranks are stuck."""
        self._warm_up()
        before = -1
        while before < (done := self.counts.total()):
            before = done
            self._round()
        for rank in range(self.shape.ranks):
            while self.waiting[rank]:
                self._weight(rank)
        return self.counts.total() == 3 * self.shape.stages * self.shape.micro_batches

    def _up(self, rank: int) -> int:
        return self.shape.stages - 1 - rank

    def _done(self, op: Op, stage: int) -> int:
        return self.counts[op, stage]

    def _left(self, op: Op, stage: int) -> bool:
        return self.counts[op, stage] < self.shape.micro_batches

    def _arrives(self, op: Op, stage: int) -> float:
        """When the value of the stage's next F or I is there; infinity where it is not made yet."""
        batch, last = self.counts[op, stage], self.shape.stages - 1
        if op is Op.F:
            made = self.ends.get(Action(stage - 1, Op.F, batch), _NONE)
            return made + self.hops[stage - 1] if stage else 0.0
        if stage == last:
            return self.ends.get(Action(stage, Op.F, batch), _NONE)
        return self.ends.get(Action(stage + 1, Op.I, batch), _NONE) + self.hops[stage]

    def _put(self, op: Op, stage: int) -> None:
        rank, seconds = self.shape.placement[stage], self.times[stage]
        action = Action(stage, op, self.counts[op, stage])
        begin = self.free[rank] if op is Op.W else max(self.free[rank], self._arrives(op, stage))
        if self.rows[rank]:
            self.idle[rank] += begin - self.free[rank]
        took = {Op.F: seconds.forward_s, Op.I: seconds.input_grad_s, Op.W: seconds.weight_grad_s}[op]
        self.free[rank] = self.ends[action] = begin + took
        self.held[rank] += self._adds(op)
        self.counts[op, stage] += 1
        self.rows[rank].append(action)
        if op is Op.I:
            self.waiting[rank].append(stage)

    def _adds(self, op: Op) -> float:
        """What an action adds to the activations that its rank holds, of two stages that hold one half each."""
        return {Op.F: 0.5, Op.I: 0.5 * (self.part - 1), Op.W: -0.5 * self.part}[op]

    def _weight(self, rank: int) -> None:
        self._put(Op.W, self.waiting[rank].popleft())

    def _fits(self, op: Op, stage: int) -> bool:
        """Whether the action can run once its rank's weight gradients are done."""
        rank = self.shape.placement[stage]
        freed = 0.5 * self.part * len(self.waiting[rank])
        return self.held[rank] - freed + self._adds(op) <= self.shape.ranks + 1e-9

    def _run(self, op: Op, stage: int, squeeze: bool) -> None:
        """An action behind the weight gradients that memory or the gap before it ask for."""
        rank = self.shape.placement[stage]
        at, waiting = self._arrives(op, stage), self.waiting[rank]
        while waiting and self.held[rank] + self._adds(op) > self.shape.ranks + 1e-9:
            self._weight(rank)
        while waiting and at >= self.free[rank] + self.times[waiting[0]].weight_grad_s:
            self._weight(rank)
        if waiting and squeeze and at - self.free[rank] > max(self.idle) - self.idle[rank]:
            self._weight(rank)
        self._put(op, stage)

    def _warm_up(self) -> None:
        """The first micro-batch down and up; meanwhile as many more on their way down as time and memory allow."""
        ranks = range(self.shape.ranks)
        for rank in ranks:
            self._put(Op.F, rank)
        for rank in reversed(ranks):
            until = self._arrives(Op.F, self._up(rank))
            while rank < ranks[-1] and self._has_time(rank, until):
                for above in range(rank + 1):
                    self._put(Op.F, above)
            self._put(Op.F, self._up(rank))
        self._level()

    def _has_time(self, rank: int, until: float) -> bool:
        fits = self.held[rank] + 1 + rank <= self.shape.ranks
        return fits and self._left(Op.F, rank) and self.free[rank] + self.times[rank].forward_s <= until

    def _level(self) -> None:
        """More forwards on later ranks, down and up in turn, until each is as far as the rank before it."""
        turn = 0
        for rank in range(1, self.shape.ranks):
            vain = 0
            while self._behind(rank) and vain < 2:
                before = self.counts.total()
                for later in reversed(range(rank, self.shape.ranks)):
                    stage = self._up(later) if turn else later
                    if self._next(Op.F, stage) and self._fits(Op.F, stage):
                        self._put(Op.F, stage)
                turn, vain = 1 - turn, vain + 1 if self.counts.total() == before else 0

    def _behind(self, rank: int) -> bool:
        down, up = self._done(Op.F, rank), self._done(Op.F, self._up(rank))
        before_down, before_up = self._done(Op.F, rank - 1), self._done(Op.F, self._up(rank - 1))
        return down + up < before_down + before_up or up <= before_up < self.shape.micro_batches

    def _round(self) -> None:
        turns = {rank: self._next_back(rank) for rank in range(self.shape.ranks)}
        ups = [stage for rank, stage in turns.items() if stage != rank]
        downs = [stage for rank, stage in reversed(turns.items()) if stage == rank]
        for stage in (*downs, *ups):
            if self._next(Op.I, stage):
                self._run(Op.I, stage, squeeze=True)
        for rank in range(self.shape.ranks):
            stages = [stage for stage in (self._up(rank), rank) if self._next(Op.F, stage)]
            if stages and self._fits(Op.F, stages[0]):
                self._run(Op.F, stages[0], squeeze=self.squeeze_forward)

    def _next(self, op: Op, stage: int) -> bool:
        """Whether the stage's next F or I has its value."""
        return self._left(op, stage) and self._arrives(op, stage) < _NONE

    def _next_back(self, rank: int) -> int:
        """The stage whose I is next: the down one where its gradient is made, as long as it is behind the up one."""
        up = self._up(rank)
        if self._done(Op.I, rank) >= self._done(Op.I, up):
            return up
        on_its_way = rank == self.shape.ranks - 1 or self._arrives(Op.I, rank) < _NONE
        return rank if on_its_way or not self._left(Op.I, up) else up
