"""Cuts, placement and schedule chosen together, against what others choose, under one simulator.

    python benchmarks/joint.py [--quick] [--part heads|tight|models] [--ranks 4,8] [--whole] [--verbose]

Others cut by a rule (autopipe/baselines) and run a known schedule. Three parts:

heads    Six language models with heads of 0.6 to 11 blocks (shapes.headed) on 4 and 8 ranks, with blocks whole or cut
         in two; transfers of 2 % of a rank's forward, memory for the activations of 1.5 micro-batches of the whole
         model on each rank, no recomputation. By m = p, 2p, 4p micro-batches: how much of the step is saved against
         equal layers with 1F1B; against the shortest longest stage (min-max, PipeDream's rule) with 1F1B, with
         Interleaved1F1B, and with the best known schedule that fits, of 1, 2 or 4 stages a rank, orders made for these
         very stages among them; and against the best of all rules and all known schedules.
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shapes import BLOCK_BYTES, HEADS, headed, racks, vision_language

from autopipe.baselines import BASELINES
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.errors import UsageError
from autopipe.core.profile import Profile
from autopipe.core.schedule import Kind, Shape, StageTimes, kinds
from autopipe.core.stage import stage_cost
from autopipe.planning.cases import Case
from autopipe.planning.outcome import Outcome, outcome
from autopipe.planning.ranges import Ranges
from autopipe.planning.remaking import shape_for
from autopipe.planning.space import SEVERAL, Space, search
from autopipe.planning.tables import Setting
from autopipe.synthesis import NAME

MIN_MAX = "PipeDream's split"
"""The name of the rule that makes the longest stage shortest."""

PROFILES = Path(__file__).parents[1] / "profiles"
GOALS = {1: (0.35, 0.12), 2: (0.26, 0.07), 4: (0.18, 0.05)}
"""By micro-batches a rank: what should be saved against equal layers with 1F1B, and min-max with the best schedule."""


class Job(NamedTuple):
    """What is planned: ``memory`` bytes on each of ``ranks``, micro-batches of a size, layers that may recompute."""

    name: str
    profile: Profile
    cluster: Cluster
    ranks: int
    micro_batch: int
    micro_batches: int
    memory: int
    recompute: str

    @property
    def setting(self) -> Setting:
        """What the search shares."""
        limits = (self.memory,) * self.ranks
        return Setting(self.profile, self.cluster, self.profile.optimizer, limits, {})


class Way(NamedTuple):
    """A rule with a schedule, and its step."""

    rule: str
    schedule: str
    stages_per_rank: int
    step_s: float


class Result(NamedTuple):
    """Our step and its gap to the bound (infinite without a plan), what it is, and what others give that fits."""

    job: Job
    step_s: float
    gap: float
    plan: str
    others: tuple[Way, ...]
    seconds: float

    def saved(self, rule: str | None = None, schedule: str | None = None) -> float | None:
        """The part of the step that is saved against the best of the others with that rule and schedule."""
        steps = [w.step_s for w in self.others if rule in (None, w.rule) and schedule in (None, w.schedule)]
        return 1 - self.step_s / min(steps) if steps else None


def run(job: Job) -> Result:
    """Our plan and the others'."""
    started = time.process_time()
    best, bound_s = search(space(job))
    seconds = time.process_time() - started
    found = tuple(others(job))
    if best is None:
        return Result(job, float("inf"), float("inf"), "none", found, seconds)
    case, (_, step_s, _) = best
    what = f"{case.outline.name} × {case.stages // case.depth}"
    return Result(job, step_s, max(step_s / bound_s - 1, 0.0), what, found, seconds)


def space(job: Job) -> Space:
    """Every schedule that torch's runtime takes, on all of the job's ranks."""
    batch = job.micro_batch * job.micro_batches
    return Space(job.setting, batch, (job.ranks,), (1,), (job.micro_batch,), kinds("torch"), job.recompute)


def others(job: Job) -> Iterator[Way]:
    """Every rule with every known schedule that fits."""
    ranges = Ranges.of(job.profile, job.micro_batch, optimizer=job.setting.optimizer)
    for kind in kinds("torch"):
        for number in kind.stages_per_rank or SEVERAL if kind.name != NAME else ():
            placement = kind.place(job.ranks, number)
            stages = len(placement)
            if stages > ranges.pieces or kind.refuses(Shape(job.ranks, job.micro_batches, placement)):
                continue
            rules = ("none", "auto") if job.recompute == "auto" else (job.recompute,)
            cases = [_case(job, ranges, kind, number, rule) for rule in rules]
            for name, rule in BASELINES.items():
                cuts = rule(job.profile, stages)
                steps = [s for case in cases if cuts is not None and (s := _step(case, kind, ranges.places(cuts)))]
                if steps:
                    yield Way(name, kind.name, number, min(steps))


def _case(job: Job, ranges: Ranges, kind: Kind, number: int, recompute: str) -> Case:
    stages = number * job.ranks
    table = kind.schedule(job.ranks, job.micro_batches, stages_per_rank=number, times=[ranges.times(stages)] * stages)
    return Case.of(job.setting, ranges, table, job.micro_batch, recompute)


def _step(case: Case, kind: Kind, positions: Sequence[int]) -> float | None:
    """The step of a split, of a schedule that looks at times with the order for it; None where it does not fit."""
    splits = any(row.splits for row in case.outline.rows)
    if splits and not all(layer.can_split_backward for layer in case.setting.profile.layers):
        return None
    found = outcome(case, positions)
    if kind.looks_at_times:
        remade = _remade(case, kind, found)
        found = outcome(remade, positions) if remade else found
    return found.step_s if found.over_limit() is None else None


def _remade(case: Case, kind: Kind, found: Outcome) -> Case | None:
    overhead_s = case.setting.profile.overhead_s
    times = [StageTimes(*(seconds + overhead_s for seconds in cost.times)) for cost in found.costs]
    try:
        return case.ordered(kind.table(shape_for(case, found.costs), times))
    except UsageError:
        return None


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


COLUMNS = {
    "equal layers, 1F1B": ("equal layers", "1F1B"),
    "min-max, 1F1B": (MIN_MAX, "1F1B"),
    "min-max, interleaved": (MIN_MAX, "Interleaved1F1B"),
    "min-max, best": (MIN_MAX, None),
    "best of all": (None, None),
}


def print_heads(found: Sequence[Result]) -> None:
    """A line for each number of micro-batches, and whether the goals are met."""
    print(f"{'m':3} {'cases':>5} " + " ".join(f"{name:>22}" for name in COLUMNS) + f" {'gap':>18}")
    for factor, goals in GOALS.items():
        some = [r for r in found if r.job.micro_batches == factor * r.job.ranks]
        if not some:
            continue
        columns = [[s for r in some if (s := r.saved(*of)) is not None] for of in COLUMNS.values()]
        m = "p" if factor == 1 else f"{factor}p"
        cells = " ".join(f"{percent(column):>22}" for column in columns)
        print(f"{m:3} {len(some):5} {cells} {percent([r.gap for r in some]):>18}")
        for what, values, goal in (
            ("equal layers", columns[0], goals[0]),
            ("min-max with the best known schedule", columns[-2], goals[1]),
        ):
            reached = statistics.median(values)
            verdict = "met" if reached >= goal else f"missed by {100 * (goal - reached):.1f} points"
            print(f"    goal: {100 * goal:.0f} % saved against {what}: {verdict}")
    print(f"CPU seconds a plan: median {statistics.median(r.seconds for r in found):.1f}, most {_slowest(found)}")


def _slowest(found: Sequence[Result]) -> str:
    slowest = max(found, key=lambda r: r.seconds)
    return f"{slowest.seconds:.1f} ({slowest.job.name})"


def print_tight(found: Sequence[Result]) -> None:
    """How many cases have a plan, and how many any known schedule that fits."""
    planned, known = [r for r in found if r.plan != "none"], [r for r in found if r.others]
    print(f"cap 1.0A: a plan in {len(planned)} of {len(found)} cases; a known schedule fits in {len(known)} of them")
    gaps, saved = [r.gap for r in planned], [s for r in known if (s := r.saved()) is not None]
    print(f"    gap {percent(gaps)}, saved against the best that fits {percent(saved)}")


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


def _cell(result: Result, rule: str) -> str:
    return f"{_ratio(result, rule, '1F1B')} / {_ratio(result, rule, 'Interleaved1F1B')}"


def _ratio(result: Result, rule: str, schedule: str) -> str:
    saved = result.saved(rule, schedule)
    return "–" if saved is None else f"{1 / (1 - saved):.2f}"


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
            saved = r.saved()
            print(
                f"  {job.name:28} {r.plan:22} gap {100 * r.gap:5.2f} %  best other "
                f"{'–' if saved is None else f'{100 * saved:+.1f} %'}  {r.seconds:.1f} s",
                flush=True,
            )
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


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
