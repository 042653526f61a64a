"""DualPipeV (DeepSeek-AI, 2025): the half of DualPipe that needs one copy of the weights, two stages on a rank in a V.

On each rank, "down" is its first stage and "up" its second; one F of the one and one B of the other in turn:

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

Idle (p − 1)F/2 at equal times, peak p + ½ micro-batches' activations of a rank. Needs m ≥ 2p. The order is that of
torch, whose pairs of F and B run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule


def _refuses(shape: Shape) -> str | None:
    if shape.micro_batches >= shape.stages:
        return None
    return f"it needs at least {shape.stages} micro-batches, two for each rank"


@schedule("DualPipeV", placement="v", stages_per_rank=(2,), refuses=_refuses, aliases=("ScheduleDualPipeV",))
def dualpipe_v(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Each rank's row, in eight parts."""
    return tuple(_row(shape, rank) for rank in range(shape.ranks))


def _row(shape: Shape, rank: int) -> tuple[Action, ...]:
    down, up = shape.stages_of(rank)
    return Row(down, up, rank, shape.ranks, shape.micro_batches).row()


class Row:
    """A rank's row while it grows: every action takes its stage's next micro-batch, from ``first`` on (default 0)."""

    def __init__(
        self, down: int, up: int, rank: int, ranks: int, batches: int, first: Mapping[int, int] | None = None
    ) -> None:
        self.down, self.up = down, up
        self.rank, self.below, self.batches = rank, ranks - 1 - rank, batches
        self.ranks, self.first = ranks, first or {}
        self.actions: list[Action] = []
        self.counts: dict[tuple[int, Op], int] = {}
        self.waiting: list[Action] = []

    def row(self) -> tuple[Action, ...]:
        """All eight parts."""
        self._warm_up()
        for _ in range(self.batches - 2 * self.ranks + self.rank + 1):
            self._add((self.down, Op.F), (self.up, Op.B), (self.up, Op.F), (self.down, Op.B))
        for _ in range(self.below):
            self._add((self.up, Op.B), (self.up, Op.F), (self.down, Op.B))
        self._drain()
        return tuple(self.actions)

    def _warm_up(self) -> None:
        for _ in range(2 * self.below):
            self._add((self.down, Op.F))
        for _ in range(self.rank + 1):
            self._add((self.down, Op.F), (self.up, Op.F))
        for _ in range(self.below):
            self._add((self.up, Op.I))
            self._weight()
            self._add((self.up, Op.F))

    def _drain(self) -> None:
        """The second half of the last backwards is split; it begins up on odd ranks, down on even ones."""
        half, odd = (self.rank + 1) // 2, self.rank % 2 == 1
        for n in range(self.rank + 1):
            up = Op.I if n > half or (n == half and odd) else Op.B
            self._add((self.up, up), (self.down, Op.I if n >= half else Op.B))
        for _ in range(self.below):
            self._weight()
            self._add((self.down, Op.I))
        for _ in range(self.rank + 1):
            self._weight()

    def _add(self, *steps: tuple[int, Op]) -> None:
        for stage, op in steps:
            key = (stage, Op.F if op is Op.F else Op.B)
            action = Action(stage, op, self.counts.get(key, self.first.get(stage, 0)))
            self.counts[key] = action.micro_batch + 1
            self.actions.append(action)
            if op is Op.I:
                self.waiting.append(action._replace(op=Op.W))

    def _weight(self) -> None:
        if self.waiting:
            self.actions.append(self.waiting.pop(0))
