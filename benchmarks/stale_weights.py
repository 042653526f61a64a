"""What stale weights do to a training run, over updates and over time: scikit-learn's digits on 4 ranks.

    python benchmarks/stale_weights.py [--lr 0.02] [--svg FILE]

One perceptron, one order of batches and one learning rate for every way to train. The time is what the simulator says
for even stages with B = 2 F and free links: an update of a pipeline that flushes takes (m + p − 1) / m as long as one
without a flush, which makes more updates in the same time. Losses are means over the last updates.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopipe.core.schedule import kind
from autopipe.core.stage_seconds import StageSeconds
from autopipe.exploring import explore
from autopipe.runtime.capture import capture
from autopipe.runtime.own.pipemare import PipeMare
from autopipe.runtime.own.training import Training
from autopipe.runtime.ranks import launch
from autopipe.runtime.running.runner import Runner

RANKS, ROWS, UPDATES, LAST = 4, 32, 500, 50
"""``UPDATES`` are those of the run that flushes; the others make as many as take the same time."""

FLUSHED = "1F1B"
RUNS = (FLUSHED, "PipeDream", "PipeDream-Sync", "PipeDream-2BW", "PipeMare")
COLOURS = ("#444", "#0072b2", "#56b4e9", "#e69f00", "#cc3311")
CPU = torch.device("cpu")


class Run(NamedTuple):
    """The loss of every update, and the time that an update takes, in times that a stage works on a batch."""

    update: float
    losses: list[float]


def micro_batches(name: str) -> int:
    """How many micro-batches an update takes: one where the scheme can, so that its pipeline is its own."""
    return RANKS if name in (FLUSHED, "PipeDream-2BW") else 1


def update_time(name: str) -> float:
    """The time of an update by simulation; a stage works on a batch for a time of 1, F and B together."""
    part = 1 / 3 / micro_batches(name)
    even = StageSeconds.equal(RANKS, forward_s=part, input_grad_s=part, weight_grad_s=part, transfer_s=0.0)
    return explore(name, even, ranks=RANKS, micro_batches=micro_batches(name)).makespan_s


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8 × 8, scaled to 0 … 1, and their digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


def perceptron() -> nn.Module:
    """Four layers, 64 wide: one a rank."""
    torch.manual_seed(0)
    hidden = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def all_on_rank(lr: float) -> dict[str, Run]:
    """On each rank: every way to train, for the time of the run that flushes."""
    time = UPDATES * update_time(FLUSHED)
    return {name: Run(update_time(name), trained(name, lr, round(time / update_time(name)))) for name in RUNS}


def trained(name: str, lr: float, updates: int) -> list[float]:
    """The loss of each update. What flushes has 2BW's table with a flush after every update."""
    launch.beat.phase(f"training with {name}")
    count = micro_batches(name)
    rows = ROWS // count
    inputs, target = digits()
    captured = capture(perceptron(), (inputs[: max(rows, 2)],))
    table = kind("PipeDream-2BW" if name == FLUSHED else name).schedule(RANKS, count)
    layers = len(captured.layers)
    cuts = [n * layers // RANKS for n in range(1, RANKS)]
    runner = Runner(captured, table, cuts, micro_batch=rows, loss_fn=nn.functional.cross_entropy, device=CPU)
    mitigation = PipeMare(annealing=UPDATES // 4) if name == "PipeMare" else None
    training = Training(table, runner.own_executor(), mitigation)
    optimizer = torch.optim.SGD(runner.parameters, lr=lr, momentum=0.9)
    order = torch.Generator().manual_seed(1)
    picks = [torch.randint(0, len(target), (ROWS,), generator=order) for _ in range(updates)]
    feed = (runner.whole((inputs[pick],), target[pick]) for pick in picks)
    return training.run(feed, updates, optimizer, flush=name == FLUSHED)


def ends(run: Run) -> tuple[float, float]:
    """The loss after the updates of the run that flushes, and after its time."""
    return statistics.fmean(run.losses[UPDATES - LAST : UPDATES]), statistics.fmean(run.losses[-LAST:])


def text(runs: Mapping[str, Run], lr: float) -> str:
    """Where every run ends."""
    updates, time = ends(runs[FLUSHED])
    first, second = f"after {UPDATES} updates", f"after {UPDATES * runs[FLUSHED].update:g} batches' time"
    lines = [
        f"digits, {RANKS} ranks, batches of {ROWS}, SGD {lr} with momentum 0.9; means over {LAST} updates",
        f"{'':<16} {'an update':>9}   {first:>18}   {second:>24}",
    ]
    for name, run in runs.items():
        after, at_end = ends(run)
        label = f"{name} (flushed)" if name == FLUSHED else name
        shown = [f"{loss:.4f} {loss - best:+.4f}" for loss, best in ((after, updates), (at_end, time))]
        lines.append(f"{label:<16} {run.update:>9.3f}   {shown[0]:>18}   {shown[1]:>24}")
    return "\n".join(lines)


def curves(runs: Mapping[str, Run], width: int = 720, height: int = 320) -> str:
    """The losses over time as SVG, each point the mean of 20 updates, on a logarithmic axis from 0.001 to 3."""
    left, right, bottom, size = 50, width - 10, height - 30, 20
    low, high = math.log10(1e-3), math.log10(3.0)
    most = max(run.update * len(run.losses) for run in runs.values())

    def x(time: float) -> float:
        return left + time / most * (right - left)

    def y(loss: float) -> float:
        return bottom - (math.log10(min(max(loss, 1e-3), 3.0)) - low) / (high - low) * (bottom - 20)

    def points(update: float, losses: Sequence[float]) -> str:
        means = [(n, statistics.fmean(losses[n : n + size])) for n in range(0, len(losses) - size + 1, size)]
        return " ".join(f"{x((n + size / 2) * update):.1f},{y(mean):.1f}" for n, mean in means)

    head = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {head}>']
    for tick in (0.001, 0.01, 0.1, 1.0):
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number, ((name, run), colour) in enumerate(zip(runs.items(), COLOURS, strict=True)):
        line = points(run.update, run.losses)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}"/>')
        parts.append(f'<text x="{width - 150}" y="{34 + 16 * number}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">0</text>')
    parts.append(f'<text x="{right}" y="{height - 8}" text-anchor="end">time of {most:g} batches</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--svg", type=Path)
    given: Any = parser.parse_args()
    runs: dict[str, Run] = launch.launch(all_on_rank, (given.lr,), ranks=RANKS, timeout_s=300)[0]
    print(text(runs, given.lr))
    if given.svg:
        given.svg.write_text(curves(runs))


if __name__ == "__main__":
    main()
