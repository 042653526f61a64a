"""Cuts, placement and schedule chosen together, against what others choose, under one simulator.

    python benchmarks/joint.py [--quick] [--part heads|tight|models] [--ranks 4,8] [--whole] [--verbose]

Others cut by a rule (autopipe/baselines) and run a known schedule. Three parts:

heads    Six language models with heads of 0.6 to 11 blocks (shapes.headed) on 4 and 8 ranks, with blocks whole or cut
         in two; transfers of 2 % of a rank's forward, memory for the activations of 1.5 micro-batches of the whole
         model on each rank, no recomputation. By m = p, 2p, 4p micro-batches: how much of the step is saved against
         equal layers with 1F1B; against the shortest longest stage (min-max, PipeDream's rule) with 1F1B, with
         Interleaved1F1B, and with the best known schedule that fits, of 1 or 2 stages a rank (v ≤ 2), and of 1, 2 or
         4; and against the best of all rules and all known schedules. Known schedules are taken in their published
         order, which is made for equal stages; and, where their order depends on the stages' seconds, also in orders
         made for these very stages, links and memory (ways.py). Then the gap to the bound, of all cases and where the
         head takes more than a rank's share of the work.
tight    The same in the memory of one micro-batch: whether there is a plan, and in how many cases any known schedule
         with any rule fits.
models   A GPT, a CNN and an encoder–decoder from profiles/, and a vision–language model, on 2 to 16 ranks in three
         memories, m = 2p: the steps of each rule with 1F1B and with Interleaved1F1B, over ours. Layers recompute where
         it is needed to fit.

Exit code 1 where no plan is found, or a known schedule with any rule is faster than ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shapes import BLOCK_BYTES, HEADS, headed, racks, vision_language
from ways import Job, Way, ways

from autopipe.baselines import BASELINES
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.profile import Profile
from autopipe.core.schedule import kinds
from autopipe.core.stage import stage_cost
from autopipe.planning.best import search
from autopipe.planning.space import Space

MIN_MAX = "PipeDream's split"
"""The name of the rule that makes the longest stage shortest."""

PROFILES = Path(__file__).parents[1] / "profiles"
GOALS = {
    1: {"equal layers, 1F1B": 0.35, "min-max, publ. v ≤ 2": 0.12, "min-max, published": 0.12, "min-max, made": 0.12},
    2: {"equal layers, 1F1B": 0.26, "min-max, publ. v ≤ 2": 0.07, "min-max, published": 0.07, "min-max, made": 0.07},
    4: {"equal layers, 1F1B": 0.18, "min-max, publ. v ≤ 2": 0.05, "min-max, published": 0.05, "min-max, made": 0.05},
}
"""By micro-batches a rank: what should be saved against what."""


class Result(NamedTuple):
    """Our step and its gap to the bound (infinite without a plan), what it is, and what others give that fits."""

    job: Job
    step_s: float
    gap: float
    plan: str
    others: tuple[Way, ...]
    seconds: float

    def saved(self, of: Mapping[str, object]) -> float | None:
        """The part of the step that is saved against the best of the others with such fields."""
        steps = [way.step_s for way in self.others if all(getattr(way, name) == value for name, value in of.items())]
        return 1 - self.step_s / min(steps) if steps else None

    @property
    def heavy_head(self) -> bool:
        """Whether the last layer takes more than a rank's share of the work."""
        work = [cost.forward_s + cost.backward_s for cost in self.job.profile.at(self.job.micro_batch)]
        return work[-1] > sum(work) / self.job.ranks


def run(job: Job) -> Result:
    """Our plan and the others'."""
    started = time.process_time()
    best, bound_s = search(space(job))
    seconds = time.process_time() - started
    found = tuple(ways(job))
    if best is None:
        return Result(job, float("inf"), float("inf"), "none", found, seconds)
    case, (_, step_s, _) = best
    what = f"{case.outline.name} × {case.stages // case.depth}"
    return Result(job, step_s, max(step_s / bound_s - 1, 0.0), what, found, seconds)


def space(job: Job) -> Space:
    """Every schedule that torch's runtime takes, on all of the job's ranks."""
    batch = job.micro_batch * job.micro_batches
    return Space(job.setting, batch, (job.ranks,), (1,), (job.micro_batch,), kinds("torch"), job.recompute)


def heads(*, part: float, batches: Sequence[int], asked: argparse.Namespace) -> Iterator[Job]:
    """The six language models in the memory of ``part`` micro-batches."""
    names = ("GPT2-XL", "Qwen2.5-0.5B") if asked.quick else tuple(HEADS)
    for factor in batches:
        for name in names:
            for ranks in (4,) if asked.quick else asked.ranks or (4, 8):
                for halves in (False,) if asked.quick or asked.whole else (False, True):
                    profile = headed(*HEADS[name], halves=halves)
                    layers = profile.at(1)
                    hop = Link(0.02 * sum(cost.forward_s for cost in layers) / ranks, 1e18)
                    cluster = Cluster("one link", (Device("declared", 1 << 62, ranks),), (Tier("all", ranks, hop),))
                    held = sum(cost.held_after_forward_bytes for cost in layers)
                    memory = round(part * held) + BLOCK_BYTES // 100
                    what = f"{name}{' halves' if halves else ''} p{ranks} m{factor * ranks}"
                    yield Job(what, profile, cluster, ranks, 1, factor * ranks, memory, "none")


def models(asked: argparse.Namespace) -> Iterator[Job]:
    """Models of four kinds, in the memory of the fullest rank of PipeDream's cut and 1, 1.5 or 2.5 micro-batches."""
    for name, profile, micro_batch in kinds_of_models():
        for ranks in (4,) if asked.quick else asked.ranks or (2, 4, 8, 16):
            for part in (1.0,) if asked.quick else (1.0, 1.5, 2.5):
                memory = _memory(profile, ranks, micro_batch, part)
                what = f"{name} p{ranks} {part:g}A"
                yield Job(what, profile, racks(16, 1 << 62), ranks, micro_batch, 2 * ranks, memory, "auto")


@cache
def kinds_of_models() -> tuple[tuple[str, Profile, int], ...]:
    """A GPT with a heavy head, a CNN, an encoder–decoder, a vision–language model; and their micro-batch."""

    def shipped(name: str, size: int) -> Profile:
        read = files.read(PROFILES / f"{name}.profile.json", Profile)
        return replace(read, costs=tuple(table for table in read.costs if table.micro_batch == size))

    return (
        ("gpt2-medium", shipped("gpt2-medium.a100", 4), 4),
        ("resnet50", shipped("resnet50.v100", 128), 128),
        ("gnmt", shipped("gnmt.v100", 32), 32),
        ("vision-language", vision_language((1,)), 1),
    )


def _memory(profile: Profile, ranks: int, micro_batch: int, part: float) -> int:
    cuts = BASELINES[MIN_MAX](profile, ranks) or ()
    bounds = [0, *cuts, len(profile.layers)]
    costs = [stage_cost(profile, a, b, micro_batch) for a, b in pairwise(bounds)]
    fixed = max(cost.static_bytes + cost.workspace_bytes for cost in costs)
    return fixed + round(part * sum(cost.held_after_forward_bytes for cost in costs))


def percent(values: Sequence[float]) -> str:
    """Median and range."""
    if not values:
        return "–"
    return f"{100 * statistics.median(values):.1f} % ({100 * min(values):.0f}..{100 * max(values):.0f})"


COLUMNS: Mapping[str, Mapping[str, object]] = {
    "equal layers, 1F1B": {"rule": "equal layers", "schedule": "1F1B"},
    "min-max, 1F1B": {"rule": MIN_MAX, "schedule": "1F1B"},
    "min-max, interleaved": {"rule": MIN_MAX, "schedule": "Interleaved1F1B"},
    "min-max, publ. v ≤ 2": {"rule": MIN_MAX, "published": True, "few": True},
    "min-max, published": {"rule": MIN_MAX, "published": True},
    "min-max, made": {"rule": MIN_MAX},
    "any, published": {"published": True},
    "any, made": {},
}
"""What a step is compared with: the best of those that have these fields; made ones include the published."""


def print_heads(found: Sequence[Result]) -> None:
    """A line for each number of ranks and of micro-batches, and of all ranks together; whether the goals are met."""
    print(f"{'p':3} {'m':3} {'cases':>5} " + " ".join(f"{name:>20}" for name in COLUMNS))
    for ranks, group in by_ranks(found):
        for factor in GOALS:
            if some := _of(group, factor):
                cells = " ".join(f"{percent(saved(some, name)):>20}" for name in COLUMNS)
                print(f"{ranks:3} {_times(factor):3} {len(some):5} {cells}")
    for factor, goals in GOALS.items():
        some = _of(found, factor)
        for name, goal in goals.items() if some else ():
            reached = statistics.median(saved(some, name))
            print(f"    {_times(factor):2} {_verdict(f'saved against {name}', reached, goal)}")
    for ranks, group in by_ranks(found):
        print_gaps(ranks, group)
    print(f"CPU seconds a plan: median {statistics.median(r.seconds for r in found):.1f}, most {_slowest(found)}")


def by_ranks(found: Sequence[Result]) -> Iterator[tuple[str, Sequence[Result]]]:
    """The results of each number of ranks, and where there are several numbers all of them."""
    numbers = sorted({r.job.ranks for r in found})
    for ranks in numbers:
        yield str(ranks), [r for r in found if r.job.ranks == ranks]
    if len(numbers) > 1:
        yield "all", found


def _of(found: Sequence[Result], factor: int) -> list[Result]:
    """Those with so many micro-batches a rank."""
    return [r for r in found if r.job.micro_batches == factor * r.job.ranks]


def saved(found: Sequence[Result], name: str) -> list[float]:
    """A column: the parts of the step that are saved, where anything is there to compare with."""
    return [part for r in found if (part := r.saved(COLUMNS[name])) is not None]


def print_gaps(ranks: str, found: Sequence[Result]) -> None:
    """The gap to the bound, by the number of micro-batches, of all cases and of those with a heavy head."""
    for factor in GOALS:
        if some := _of(found, factor):
            heavy, rest = ([r.gap for r in some if r.heavy_head == is_heavy] for is_heavy in (True, False))
            print(
                f"gap, p {ranks}, m = {_times(factor)}: {percent([r.gap for r in some])}; of {len(heavy)} with a head "
                f"above a rank's share {percent(heavy)}, of the others {percent(rest)}"
            )


def _verdict(what: str, reached: float, goal: float) -> str:
    verdict = "met" if reached >= goal else f"missed by {100 * (goal - reached):.1f} points"
    return f"goal: {100 * goal:.0f} % {what}: {verdict}"


def _times(factor: int) -> str:
    return "p" if factor == 1 else f"{factor}p"


def _slowest(found: Sequence[Result]) -> str:
    slowest = max(found, key=lambda r: r.seconds)
    return f"{slowest.seconds:.1f} ({slowest.job.name})"


def print_tight(found: Sequence[Result]) -> None:
    """How many cases have a plan, and how many any known schedule that fits."""
    for ranks, group in by_ranks(found):
        planned, known = [r for r in group if r.plan != "none"], [r for r in group if r.others]
        print(f"cap 1.0A, p {ranks}: a plan in {len(planned)} of {len(group)} cases; a known one fits in {len(known)}")
        gaps, better = [r.gap for r in planned], saved(known, "any, made")
        print(f"    gap {percent(gaps)}, saved against the best that fits {percent(better)}")


def print_models(found: Sequence[Result]) -> None:
    """A line a case: the step of each rule with 1F1B and interleaved, over ours."""
    rules = list(BASELINES)
    print("step of each rule with 1F1B / with Interleaved1F1B, over ours; – where it does not fit or cannot cut so")
    print(f"{'':26} {'ours':>9} {'gap':>6} {'schedule':18} " + " ".join(f"{_short(rule):>14}" for rule in rules))
    for r in found:
        cells = " ".join(
            f"{_ratio(r, rule, '1F1B')} / {_ratio(r, rule, 'Interleaved1F1B')}".rjust(14) for rule in rules
        )
        ours = f"{1e3 * r.step_s:.1f} ms"
        print(f"{r.job.name:26} {ours:>9} {100 * r.gap:4.1f} % {r.plan:18} {cells}")


def _short(rule: str) -> str:
    return rule.removesuffix("'s split").replace("parameters", "params")


def _ratio(result: Result, rule: str, schedule: str) -> str:
    less = result.saved({"rule": rule, "schedule": schedule})
    return "–" if less is None else f"{1 / (1 - less):.2f}"


def worse(found: Sequence[Result]) -> int:
    """Print the cases without a plan, and those in which another way is faster; how many there are."""
    count = 0
    for r in found:
        faster = [way for way in r.others if way.step_s < r.step_s * (1 - 1e-6)]
        if r.plan == "none" or faster:
            count += 1
            best = min(faster, key=lambda way: way.step_s, default=None)
            by = f"{best.rule}, {best.schedule} × {best.stages_per_rank}: {best.step_s / r.step_s:.4f}" if best else ""
            print(f"    {r.job.name}: {'no plan' if r.plan == 'none' else by}")
    return count


def results(jobs: Iterator[Job], *, verbose: bool) -> list[Result]:
    """Run the jobs."""
    found = []
    for job in jobs:
        found.append(run(job))
        if verbose:
            r = found[-1]
            less = r.saved({})
            against = "–" if less is None else f"{100 * less:+.1f} %"
            print(
                f"  {job.name:28} {r.plan:22} gap {100 * r.gap:5.2f} %  best other {against}  {r.seconds:.1f} s",
                flush=True,
            )
    return found


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--part", choices=("heads", "tight", "models"), help="one part alone")
    parser.add_argument(
        "--ranks", type=lambda text: tuple(map(int, text.split(","))), help="these numbers of ranks only"
    )
    parser.add_argument("--whole", action="store_true", help="no blocks that are cut in two")
    parser.add_argument("--verbose", action="store_true", help="a line for each plan")
    asked = parser.parse_args()
    lost = 0
    parts = {
        "heads": (lambda: heads(part=1.5, batches=(1, 2, 4), asked=asked), print_heads),
        "tight": (lambda: heads(part=1.0, batches=(2,), asked=asked), print_tight),
        "models": (lambda: models(asked), print_models),
    }
    for name, (jobs, show) in parts.items():
        if asked.part in (None, name):
            found = results(jobs(), verbose=asked.verbose)
            show(found)
            lost += worse(found)
    print(f"without a plan, or slower than another way: {lost}")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
