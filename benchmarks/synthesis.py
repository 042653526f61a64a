"""Synthesized against the bound and against every known schedule that fits in the same memory.

    python benchmarks/synthesis.py [--most-ranks 8] [--memory 0.5,0.75,1,1.25,1.5,2] [--chains 60] [--budget 2]

Memory counts micro-batches' activations of a rank, held until W, as parts of p. Cases are the rows of zero_bubble.py
with one stage on a rank, two and four in a V and in a loop; and random uneven chains with transfers of 0, 5 and 20 % of
a forward. Needs numba; compilation is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zero_bubble import ROWS, stages_of

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Schedule, Shape, StageMemory, StageTimes, kinds, place
from autopipe.core.validation import validate
from autopipe.ordering.annealing import evaluated
from autopipe.synthesis import known_order, synthesize

PLACEMENTS = ((1, "loop"), (2, "v"), (2, "loop"), (4, "v"), (4, "loop"))
TRIES = 100_000


class Case(NamedTuple):
    """A name and what to order."""

    name: str
    shape: Shape
    times: Sequence[StageTimes]


class Result(NamedTuple):
    """The gap to the bound, makespan over that of the best known schedule (None where none fits), and seconds."""

    gap: float
    against: float | None
    best_known: str
    origin: str
    seconds: float


def rows(most_ranks: int) -> Iterator[Case]:
    """The published rows."""
    for row in ROWS:
        if row.ranks <= most_ranks:
            for number, how in PLACEMENTS:
                shape, times = stages_of(row, number, how)
                yield Case(f"{row.name} p{row.ranks} m{row.micro_batches} v{number} {how}", shape, times)


def chains(count: int) -> Iterator[Case]:
    """Random uneven stages."""
    for seed in range(count):
        rng = random.Random(seed)
        ranks, (number, how) = rng.choice([4, 8]), rng.choice(PLACEMENTS[:4])
        batches = ranks * rng.randint(1, 4)
        placement = place(how, ranks, number)
        seconds = [[rng.uniform(0.5, 1.5) for _ in range(3)] for _ in placement]
        times = [StageTimes(f, i + w, i, w) for f, i, w in seconds]
        hop = rng.choice([0.0, 0.05, 0.2])
        hops = tuple(0.0 if a == b else hop for a, b in pairwise(placement))
        yield Case(f"chain {seed} p{ranks} m{batches} v{number} {how}", Shape(ranks, batches, placement, hops), times)


def run(case: Case, part: float, budget_s: float) -> Result | None:
    """One case in memory of ``part`` · p; None where nothing fits."""
    memory = StageMemory.of(case.shape, part * case.shape.ranks)
    begin = time.perf_counter()
    try:
        found = synthesize(case.shape, case.times, memory, tries=TRIES, budget_s=budget_s, fast=True)
    except UsageError:
        return None
    seconds = time.perf_counter() - begin
    validate(Schedule("Synthesized", case.shape.placement, found.order))
    measured = evaluated(case.shape, found.order, case.times, memory, fast=True)
    assert measured is not None, "over the memory"
    assert abs(measured.makespan_s / found.makespan_s - 1) < 1e-9
    known = min(_known(case, memory), default=None)
    against = found.makespan_s / known[0] if known else None
    return Result(found.gap, against, known[1] if known else "", found.origin, seconds)


def _known(case: Case, memory: StageMemory) -> Iterator[tuple[float, str]]:
    for kind in kinds():
        order = known_order(kind, case.shape, case.times)
        made = evaluated(case.shape, order, case.times, memory, fast=True) if order else None
        if made:
            yield made.makespan_s, kind.name


def report(title: str, cases: Sequence[Case], part: float, budget_s: float, verbose: bool) -> None:
    """Run the cases of one memory, print a line."""
    results = {case.name: run(case, part, budget_s) for case in cases}
    found = {name: result for name, result in results.items() if result}
    if verbose:
        for name, r in found.items():
            known = f"{r.against - 1:+.2%} against {r.best_known}" if r.against else "no known schedule fits"
            print(f"  {part}p {name:28} gap {r.gap:7.3%}  {known:34} {r.origin}, {r.seconds:.1f} s", flush=True)
    gaps = [r.gap for r in found.values()]
    ratios = [r.against for r in found.values() if r.against]
    print(
        f"{title:8} {part:4}p {len(found):3} cases: {sum(gap <= 1e-3 for gap in gaps):3} within 0.1 % of the bound, "
        f"gap median {statistics.median(gaps):.2%} worst {max(gaps):.2%}; lost to a known schedule "
        f"{sum(r > 1 + 1e-9 for r in ratios)}, none fits in {len(found) - len(ratios)}, against it median "
        f"{statistics.median(ratios) - 1 if ratios else 0:+.2%}; "
        f"longest {max(r.seconds for r in found.values()):.1f} s",
        flush=True,
    )


def main() -> None:
    """Print a line for each memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most-ranks", type=int, default=32)
    parser.add_argument("--memory", default="0.5,0.75,1,1.25,1.5,2")
    parser.add_argument("--chains", type=int, default=60)
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    published, uneven = [*rows(options.most_ranks)], [*chains(options.chains)]
    warm = published[0]
    synthesize(warm.shape, warm.times, StageMemory.of(warm.shape, warm.shape.ranks), tries=500, fast=True)
    for part in map(float, options.memory.split(",")):
        for title, cases in (("rows", published), ("chains", uneven)):
            if cases:
                report(title, cases, part, options.budget, options.verbose)


if __name__ == "__main__":
    main()
