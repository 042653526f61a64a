"""An order for few micro-batches made into one for more: part of its steady state repeats.

How an order begins and ends is as hard to find for 256 micro-batches as for 24, and takes longer. Each micro-batch from
``cut`` on comes later, by as many periods as are put in; those that are put in run as the first of them did, a period
behind each other. A micro-batch's own actions all move alike, so none runs before what it waits for; whether the
repeated part fits in memory is another matter, and which cuts and steps do is tried. Rank 0 of ZB-H1 at equal times

    0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2

becomes for five micro-batches, cut at the last one, with a step of one,

    0F0 0F1     0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0F4 0I3 0W3     0I4 0W4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.core.schedule import Shape, StageMemory, StageTimes
from autopipe.ordering.annealing import begin_times, measured
from autopipe.ordering.presets import period_s
from autopipe.ordering.rows import Listed


def stretched(
    few: Listed, shape: Shape, times: Sequence[StageTimes], memory: StageMemory, *, fast: bool = False
) -> Iterator[Listed | None]:
    """The order for more micro-batches by every step and cut, cuts in the middle first; None where one does not fit."""
    begins, batches = begin_times(few, times, memory, fast=fast), few.shape.micro_batches
    period, more = period_s(shape, times), shape.micro_batches - batches
    steps = [step for step in range(1, shape.ranks + 1) if more % step == 0]
    for cut in sorted(range(batches), key=lambda cut: abs(2 * cut - batches)):
        for step in steps:
            if cut + step <= batches:
                made = _repeated(few, begins, shape, cut, step, period)
                yield measured(made, times, memory, fast=fast)


def _repeated(few: Listed, begins: Sequence[float], shape: Shape, cut: int, step: int, period: float) -> Listed:
    """``step`` micro-batches from ``cut`` on repeat until there are enough."""
    batches = few.shape.micro_batches
    more = shape.micro_batches - batches
    rows = []
    for row in few.rows:
        placed = []
        for kind in sorted({int(code) // batches for code in row}):
            own = begins[kind * batches : (kind + 1) * batches]
            put_in = [own[cut + n % step] + (n - n % step) * period for n in range(more)]
            line = sorted([*own[:cut], *put_in, *(at + more * period for at in own[cut:])])
            placed += [(at, kind * shape.micro_batches + batch) for batch, at in enumerate(line)]
        rows.append([code for _, code in sorted(placed)])
    return Listed(shape, tuple(rows), 0.0, 0.0)
