"""Every named schedule at the costs of the papers: makespan, memory and idle against the published values.

    python benchmarks/schedules.py

The first table has equal stages, F = I = W = 1 a rank and free transfers; a rank's work is shared by its stages. The
second has the profiles of the zero-bubble paper. Two measures of idle are in use: the authors' looks at the rank that
takes longest from its own start to its own end, ours at the whole step with its flush. Memory is in micro-batches'
activations of a rank, of which only what the weight gradients need is held from I to W, as the authors count it. Exit
code 1 where a value is worse than the published one, or over the schedule's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from zero_bubble import ROWS, Row, stages_of

from autopipe.core.schedule import Op, kind
from autopipe.core.stage_seconds import StageSeconds
from autopipe.exploring import Explored, examine, explore


class Published(NamedTuple):
    """Makespan and peak on 4 ranks with 8 micro-batches, and on 8 with 16."""

    stages_per_rank: int
    small: tuple[float, float]
    large: tuple[float, float]


UNIT = {
    "GPipe": Published(1, (33, 8), (69, 16)),
    "1F1B": Published(1, (33, 4), (69, 8)),
    "Interleaved1F1B": Published(2, (28.5, 5.5), (58.5, 11.5)),
    "LoopedBFS": Published(2, (28.5, 8), (58.5, 16)),
    "ZB-H1": Published(1, (27, 4), (55, 8)),
    "ZB-H2": Published(1, (27, 7), (55, 15)),
    "ZB-V": Published(2, (25.5, 4), (51.5, 8)),
    "DualPipeV": Published(2, (25.5, 4.5), (51.5, 8.5)),
    "V-Half": Published(2, (26.5, 3), (56.5, 5)),
    "V-Min": Published(2, (29.5, 2), (61.5, 4)),
}
"""By replaying torch's and the authors' orders."""

IDLE = {
    ("1.5B", 24): {"1F1B": 0.2431, "ZB-H1": 0.1585, "ZB-1p": 0.1585, "ZB-H2": 0.1083, "ZB-2p": 0.0433, "ZB-V": 0.0703},
    ("1.5B", 64): {"1F1B": 0.1240, "ZB-H1": 0.0674, "ZB-1p": 0.0674, "ZB-H2": 0.0444, "ZB-2p": 0.0026, "ZB-V": 0.0298},
    ("6.2B", 24): {"1F1B": 0.2347, "ZB-H1": 0.1323, "ZB-1p": 0.1323, "ZB-H2": 0.0698, "ZB-2p": 0.0029, "ZB-V": 0.0403},
    ("28.3B", 96): {"1F1B": 0.2646, "ZB-H1": 0.1421, "ZB-1p": 0.1421, "ZB-H2": 0.0641, "ZB-2p": 0.0038, "ZB-V": 0.0531},
}  # fmt: skip
"""Idle of the longest rank's own time, of Qi et al. (2023, arXiv 2401.10241), table 6 and its generator."""

MEMORY: dict[str, Callable[[int], int]] = {
    "1F1B": lambda p: p,
    "ZB-H1": lambda p: p,
    "ZB-1p": lambda p: p,
    "ZB-H2": lambda p: 2 * p - 1,
    "ZB-2p": lambda p: 2 * p,
    "ZB-V": lambda p: p,
}
"""What each may hold, by the number of ranks."""

WITHIN = 0.0005
"""So much more idle than published counts as equal: the table gives four digits."""


def unit(name: str, ranks: int, micro_batches: int) -> Explored:
    """A schedule at F = I = W = 1 a rank."""
    number = UNIT[name].stages_per_rank
    part = 1 / number
    costs = StageSeconds.equal(ranks * number, forward_s=part, input_grad_s=part, weight_grad_s=part)
    return explore(name, costs, ranks=ranks, micro_batches=micro_batches)


def unit_table(say: Callable[[str], None]) -> int:
    """Print the first table; how many cells are worse than published."""
    worse = 0
    say(f"{'F = I = W = 1':18} {'p4 m8':>11} {'published':>11}   {'p8 m16':>11} {'published':>11}")
    for name, published in UNIT.items():
        cells = []
        for ranks, batches, wanted in ((4, 8, published.small), (8, 16, published.large)):
            found = unit(name, ranks, batches)
            got = (found.makespan_s, max(found.peak_in_flight))
            worse += got[0] > wanted[0] * (1 + 1e-9) or got[1] > wanted[1] * (1 + 1e-9)
            cells += [f"{got[0]:g} / {got[1]:g}", f"{wanted[0]:g} / {wanted[1]:g}"]
        say(f"{name:18} {cells[0]:>11} {cells[1]:>11}   {cells[2]:>11} {cells[3]:>11}")
    return worse


def published_row(row: Row, name: str) -> Explored:
    """A schedule on a row of the paper, in memory as its authors count it."""
    number, how = (2, "v") if name == "ZB-V" else (1, "loop")
    shape, times = stages_of(row, number, how, weight_part=row.weight_part)
    return examine(kind(name).table(shape, times), shape, times)


def held(row: Row, explored: Explored) -> float:
    """The most that a rank holds, in micro-batches' activations."""
    table, most = explored.schedule, 0.0
    for rank, actions in enumerate(table.order):
        now = 0.0
        for action in actions:
            left = row.weight_part
            now += {Op.F: 1.0, Op.B: -1.0, Op.I: left - 1.0, Op.W: -left}[action.op] / table.placement.count(rank)
            most = max(most, now)
    return most


def idle_table(say: Callable[[str], None]) -> int:
    """Print the second table; how many cells are worse than published."""
    worse = 0
    say(f"{'idle':20} {'schedule':10} {'of stage time':>14} {'published':>10} {'of the step':>12} {'memory':>10}")
    for row in ROWS:
        for name, published in IDLE.get((row.name, row.micro_batches), {}).items():
            found = published_row(row, name)
            memory, most = held(row, found), MEMORY[name](row.ranks)
            worse += found.stage_idle > published + WITHIN or memory > most * (1 + 1e-9)
            label = f"{row.name} p{row.ranks} m{row.micro_batches}"
            ours = f"{found.stage_idle:14.4f} {published:10.4f} {found.timeline.idle:12.4f}"
            say(f"{label:20} {name:10} {ours} {f'{memory:.1f} of {most}':>10}")
    return worse


def main() -> None:
    """Print both tables."""
    worse = unit_table(print)
    print()
    worse += idle_table(print)
    cells = 2 * len(UNIT) + sum(map(len, IDLE.values()))
    print(f"\n{cells - worse} of {cells} cells are equal to the published ones or better")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
