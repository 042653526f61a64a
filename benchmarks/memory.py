"""Predicted against measured peak memory of each rank: models × schedules × recomputation, on two real ranks.

    python benchmarks/memory.py [--micro-batches 6]

Predicted is what a plan would say: layer bytes from one profile, through the simulator. Measured are the bytes of live
tensors in a warm step, counted at the dispatcher (the allocator's peak on CUDA), and the resident size of the process
beside it. Both are the same in every run: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.profile import Profile
from autopipe.core.schedule import Schedule, kind
from autopipe.core.stage import shared_ties, stage_cost
from autopipe.core.units import format_bytes, format_percent
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.checking.plans import peak_bytes
from autopipe.runtime.measuring.measure import LayerTimer
from autopipe.runtime.measuring.profiling import facts_of, with_costs
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import own_device
from autopipe.runtime.ranks.memory import resident_bytes
from autopipe.runtime.running.runner import Runner, make_optimizer
from autopipe.runtime.workload import ModelFile, Workload
from autopipe.simulate import simulate

MODELS = {"examples/gpt2.py": 4, "examples/llama.py": 2, "examples/mlp.py": 64}
"""Model files of the project and the micro-batch that each is run with."""
SCHEDULES = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "ZB-H1": 1, "ZB-V": 2}
"""The schedules and their stages on a rank."""
RANKS = 2


class Row(NamedTuple):
    """A plan on one rank: bytes."""

    plan: str
    rank: int
    predicted: int
    measured: int
    resident: int


def cuts_of(profile: Profile, stages: int) -> list[int]:
    """Cuts into stages of about equally many layers."""
    legal = profile.legal_cuts()
    return [legal[round((k + 1) * (len(legal) + 1) / stages) - 1] for k in range(stages - 1)]


def measure_model(path: str, micro_batch: int, micro_batches: int) -> list[Row]:
    """One rank's part: its profile, then a few steps of every plan."""
    device = own_device("cpu")
    workload = ModelFile(path).open()
    captured = capture(workload.model, workload.batch(max(2, micro_batch))[0])
    profile = _profile(workload, captured, micro_batch, device)
    rows = []
    for name, number in SCHEDULES.items():
        table = kind(name).schedule(RANKS, micro_batches, stages_per_rank=number)
        for recompute in ((), tuple(range(len(captured.layers)))):
            launch.beat.phase(f"{Path(path).stem}, {name}")
            rows.append(_row(workload, captured, profile, table, micro_batch, recompute))
    return rows


def _profile(workload: Workload, captured: Captured, micro_batch: int, device: Any) -> Profile:
    facts = facts_of(workload, captured, "cpu", threads=1, ranks=RANKS, optimizer="adamw")
    batches = {micro_batch: workload.batch(micro_batch)}
    timer = LayerTimer(captured, facts.legal_cuts(), batches, workload.loss, "adamw", device)
    timer.warm_up()
    timer.rotate()
    workload.model.zero_grad()
    return with_costs(facts, timer.samples, 0.0)


def _row(
    workload: Workload,
    captured: Captured,
    profile: Profile,
    table: Schedule,
    micro_batch: int,
    recompute: tuple[int, ...],
) -> Row:
    cuts = cuts_of(profile, table.stages)
    bounds = list(pairwise([0, *cuts, len(profile.layers)]))
    costs = [
        stage_cost(
            profile,
            *layers,
            micro_batch,
            recompute=recompute,
            shared=shared_ties(profile, bounds, table.placement, stage),
        )
        for stage, layers in enumerate(bounds)
    ]
    predicted = simulate(table, costs, [None] * (table.stages - 1)).peak_bytes
    device = own_device("cpu")
    runner = Runner(
        captured, table, cuts, micro_batch=micro_batch, loss_fn=workload.loss, device=device, recompute=recompute
    )
    optimizer = make_optimizer("adamw", runner.parameters, 1e-6)
    micro_batches = runner.split(*workload.batch(micro_batch * table.micro_batches))
    for _ in range(2):
        runner.timed_step(micro_batches, optimizer)
    measured = peak_bytes(runner, micro_batches, optimizer)
    plan = f"{workload.name} {table.name}{' recomputing' if recompute else ''}"
    return Row(plan, runner.rank, predicted[runner.rank], measured, resident_bytes())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=6)
    count = parser.parse_args().micro_batches
    root = Path(__file__).parents[1]
    rows: list[Row] = []
    for path, size in MODELS.items():
        parts = launch.launch(measure_model, (str(root / path), size, count), ranks=RANKS, timeout_s=300)
        rows += [row for pair in zip(*parts, strict=True) for row in pair]
    print(f"{'plan':40} {'rank':>4} {'predicted':>10} {'measured':>10} {'error':>8} {'process':>9}")
    for row in rows:
        error = format_percent(row.predicted / row.measured - 1, sign=True)
        sizes = f"{format_bytes(row.predicted):>10} {format_bytes(row.measured):>10} {error:>8}"
        print(f"{row.plan:40} {row.rank:4} {sizes} {format_bytes(row.resident):>9}")
    errors = [row.predicted / row.measured - 1 for row in rows]
    low, high = format_percent(min(errors), sign=True), format_percent(max(errors), sign=True)
    print(f"median |error| {format_percent(statistics.median(map(abs, errors)))}, from {low} to {high}")


if __name__ == "__main__":
    main()
