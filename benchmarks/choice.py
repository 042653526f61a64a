"""Whether the chosen schedule is the best one when all are really run: a model planned with every schedule, two ranks.

    python benchmarks/choice.py [--model examples/gpt2.py] [--batch 16] [--rounds 15]

The model is profiled and planned with all schedules; then the best plan of each runs on two local processes, one step
each in every round, so that all of them see the same machine. Needs two free cores. The noise is how well a median is
known; the chosen plan is compared with the best one round by round. Exit code 1 where it is more than 2 % slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import autopipe
import autopipe.synthesis
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.plan import Plan
from autopipe.core.schedule import kinds
from autopipe.core.spread import error_of_median
from autopipe.core.timeline import Span, Timeline
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.checking.plans import runner_of
from autopipe.runtime.measuring.links import measure_cluster
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import own_device
from autopipe.runtime.running.runner import make_optimizer
from autopipe.runtime.workload import ModelFile

RANKS = 2
ALLOWED = 0.02

Steps = dict[str, list[list[Span]]]
"""The spans of each plan's steps on one rank, by the schedule's name."""


def plans_of(profile: autopipe.Profile, cluster: autopipe.Cluster, batch: int) -> tuple[Plan, dict[str, Plan]]:
    """The plan that is chosen among all schedules, and the best plan of each."""
    chosen = autopipe.plan(profile, cluster, global_batch=batch, depths=[RANKS], schedules=["all"])
    each = {}
    for kind in kinds("torch"):
        try:
            each[kind.name] = autopipe.plan(profile, cluster, global_batch=batch, depths=[RANKS], schedules=[kind.name])
        except (NoPlanFits, UsageError) as error:
            print(f"{kind.name}: {error}", file=sys.stderr)
    return chosen, {**each, chosen.schedule.name: chosen}


def run_plans(model: str, plans: dict[str, Plan], rounds: int) -> Steps:
    """On each rank: one step of every plan in each round, after one that does not count."""
    device = own_device("cpu")
    workload = ModelFile(model).open()
    runners, data, optimizers = {}, {}, {}
    for name, plan in plans.items():
        batch = workload.batch(plan.global_batch)
        runner = runner_of(plan, workload, batch, device)
        runners[name], data[name] = runner, runner.split(*batch)
        optimizers[name] = make_optimizer(plan.optimizer, runner.parameters, 1e-6)
    steps: Steps = {name: [] for name in plans}
    for index in range(rounds + 1):
        for name, runner in runners.items():
            launch.beat.phase(f"round {index} of {rounds}")
            runner.timed_step(data[name], optimizers[name])
            if index:
                steps[name].append(runner.recorder.spans())
    return steps


def report(chosen: str, plans: dict[str, Plan], seconds: dict[str, list[float]]) -> str:
    """Print a line a plan, fastest first; the name of the best."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    heads = ("schedule", "stages", "micro-batch", "predicted", "measured", "error", "noise")
    print("{:22} {:>6} {:>11} {:>10} {:>10} {:>8} {:>7}".format(*heads))
    names = sorted(medians, key=lambda name: medians[name])
    for name in names:
        plan = plans[name]
        error = format_percent(medians[name] / plan.predicted.step_s - 1, sign=True)
        times = f"{format_duration(plan.predicted.step_s):>10} {format_duration(medians[name]):>10}"
        noise = format_percent(error_of_median(seconds[name]))
        mark = "  chosen" if name == chosen else ""
        print(f"{name:22} {len(plan.stages):6} {plan.micro_batch:11} {times} {error:>8} {noise:>7}{mark}")
    return names[0]


def compared(chosen: str, best: str, seconds: dict[str, list[float]]) -> float:
    """Print by how much the chosen plan is slower than the best, in the same rounds, and the noise of that."""
    ratios = [one / other for one, other in zip(seconds[chosen], seconds[best], strict=True)]
    slower = statistics.median(ratios) - 1
    print(
        f"{chosen} was chosen; {best} is the best of {len(seconds)} that were run: "
        f"{format_percent(slower, sign=True)}, noise {format_percent(error_of_median(ratios))}; "
        f"goal {format_percent(ALLOWED)} at the most: {'met' if slower <= ALLOWED else 'missed'}"
    )
    return slower


def main() -> None:
    """Profile, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).parents[1]
    parser.add_argument("--model", default=str(root / "examples" / "gpt2.py"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    profile = autopipe.profile(options.model, devices=RANKS)
    chosen, plans = plans_of(profile, measure_cluster(RANKS), options.batch)
    ranks = launch.launch(run_plans, (options.model, plans, options.rounds), ranks=RANKS, timeout_s=600)
    seconds = {
        name: [Timeline.of_ranks(step, "measured").step_s for step in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in plans
    }
    best = report(chosen.schedule.name, plans, seconds)
    slower = compared(chosen.schedule.name, best, seconds)
    sys.exit(slower > ALLOWED)


if __name__ == "__main__":
    main()
