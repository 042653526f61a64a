"""Predicted against measured step time: two models × GPipe and 1F1B × three cuts, on two real ranks.

    python benchmarks/prediction.py [--rounds 15]

In each round the layers are timed and then every plan runs a step, so that profile and steps see the same machine. The
medians of the layers predict each plan's step; the medians of its steps are what it took. The noise floor is how well
the medians themselves are known. Needs two free cores.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from autopipe.core.cluster import Link
from autopipe.core.profile import Profile
from autopipe.core.schedule import Schedule, kind
from autopipe.core.spread import error_of_median
from autopipe.core.stage import stage_cost
from autopipe.core.timeline import Span, Timeline
from autopipe.core.units import format_duration, format_percent
from autopipe.graph import Graph, costs_of
from autopipe.jitter import jitter_s
from autopipe.runtime.capture import capture
from autopipe.runtime.measuring.links import measure_cluster
from autopipe.runtime.measuring.measure import LayerTimer, Samples, pooled
from autopipe.runtime.measuring.profiling import facts_of, with_costs
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import own_device
from autopipe.runtime.running.runner import Runner, make_optimizer
from autopipe.runtime.tables.emulated import runtime_costs
from autopipe.runtime.workload import ModelFile
from autopipe.simulate import simulate

MODELS = {"examples/gpt2.py": 4, "examples/mlp.py": 128}
"""Model files of the project and the micro-batch that each is run with."""
MICRO_BATCHES = 8
SCHEDULES = ("GPipe", "1F1B")


def cuts_of(layers: int) -> tuple[int, ...]:
    """Three cuts: in the middle, and a third of the layers to either side."""
    return tuple(sorted({max(1, layers // 3), layers // 2, layers - max(1, layers // 3)}))


class Part(NamedTuple):
    """What a rank brings back: the bare profile, its layers' samples, (gap, late) of the runtime, each plan's steps."""

    profile: Profile
    samples: Samples
    runtime: list[tuple[float, float]]
    steps: dict[tuple[str, int], list[list[Span]]]


def measure_model(path: str, micro_batch: int, rounds: int) -> Part:
    """On each rank: rounds of layers and steps; the runtime's own costs in every fifth."""
    device = own_device("cpu")
    workload = ModelFile(path).open()
    captured = capture(workload.model, workload.batch(micro_batch)[0])
    profile = facts_of(workload, captured, "cpu", threads=1, ranks=2, optimizer="adamw")
    batches = {micro_batch: workload.batch(micro_batch)}
    timer = LayerTimer(captured, profile.legal_cuts(), batches, workload.loss, "adamw", device)
    plans = [(name, cut) for name in SCHEDULES for cut in cuts_of(len(profile.layers)) if cut in profile.legal_cuts()]
    runners = {plan: _runner(captured, plan, micro_batch, workload, device) for plan in plans}
    micro_batches = next(iter(runners.values())).split(*workload.batch(micro_batch * MICRO_BATCHES))
    optimizers = {plan: make_optimizer("adamw", runner.parameters, 1e-6) for plan, runner in runners.items()}
    timer.warm_up()
    steps: dict[tuple[str, int], list[list[Span]]] = {plan: [] for plan in plans}
    runtime = []
    for index in range(rounds + 1):
        timer.rotate()
        if index % 5 == 0:
            runtime.append(runtime_costs(device))
        for plan, runner in runners.items():
            launch.beat.phase(f"round {index} of {rounds}")
            runner.timed_step(micro_batches, optimizers[plan])
            if index:
                steps[plan].append(runner.recorder.spans())
    return Part(profile, timer.samples[micro_batch], runtime, steps)


def _runner(captured: Any, plan: tuple[str, int], micro_batch: int, workload: Any, device: Any) -> Runner:
    return Runner(
        captured, _schedule(plan[0]), [plan[1]], micro_batch=micro_batch, loss_fn=workload.loss, device=device
    )


def _schedule(name: str) -> Schedule:
    import autopipe.schedules  # noqa: F401  (registers them)

    return kind(name).schedule(2, MICRO_BATCHES)


def rows(path: str, micro_batch: int, rounds: int, link: Link) -> list[tuple[str, float, float, float]]:
    """(plan, predicted, measured, noise) for each plan of a model."""
    ranks = launch.launch(measure_model, (path, micro_batch, rounds), ranks=2, timeout_s=300)
    samples = pooled([rank.samples for rank in ranks])
    gap_s = statistics.fmean(gap_s for rank in ranks for gap_s, _ in rank.runtime)
    link = replace(link, late_s=statistics.fmean(late_s for _, late_s in ranks[0].runtime))
    profile = with_costs(ranks[0].profile, {micro_batch: samples}, gap_s)
    found = []
    for name, cut in ranks[0].steps:
        layers = len(profile.layers)
        stages = [stage_cost(profile, *part, micro_batch) for part in ((0, cut), (cut, layers))]
        timeline = simulate(_schedule(name), stages, [link], overhead_s=profile.overhead_s)
        assert profile.jitter
        costs = costs_of(stages, [link], profile.overhead_s)
        predicted = timeline.step_s + jitter_s(profile.jitter, Graph.of(_schedule(name)), costs, timeline)
        measured = zip(*(rank.steps[name, cut] for rank in ranks), strict=True)
        seconds = [Timeline.of_ranks(step, "measured").step_s for step in measured]
        noise = error_of_median(seconds) + error_of_median(samples.totals())
        found.append((f"{Path(path).stem} {name} cut {cut}", predicted, statistics.median(seconds), noise))
    return found


def link() -> Link:
    """The link between two local ranks, measured."""
    return measure_cluster(2).tiers[0].link


def show(found: list[tuple[str, float, float, float]]) -> None:
    """Print the rows and what they come to."""
    print(f"{'plan':28} {'predicted':>11} {'measured':>11} {'error':>8} {'noise floor':>12}")
    for name, predicted, measured, noise in found:
        error = format_percent(measured / predicted - 1, sign=True)
        print(
            f"{name:28} {format_duration(predicted):>11} {format_duration(measured):>11} {error:>8} "
            f"{format_percent(noise):>12}"
        )
    errors = [abs(measured / predicted - 1) for _, predicted, measured, _ in found]
    print(f"median |error| {format_percent(statistics.median(errors))}, worst {format_percent(max(errors))}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    root = Path(__file__).parents[1]
    between = link()
    show([row for path, size in MODELS.items() for row in rows(str(root / path), size, rounds, between)])


if __name__ == "__main__":
    main()
