"""Asynchronous pipelines: throughput against a flushed one, and what stale weights do to a training run.

    python benchmarks/asynchronous.py throughput [--rounds 5]    # emulated ranks, p = 4, m = 4
    python benchmarks/asynchronous.py digits [--svg FILE]         # scikit-learn's digits on 4 ranks

``throughput``: four ranks whose stages wait instead of computing, so that two cores do. In each round 1F1B flushes
after every update on torch's runtime, and PipeDream-2BW goes on without one on ours. Predicted is what the simulator
says for the stages' seconds and the gap between two actions that the same round measured.

``digits``: one perceptron, one order of batches and one learning rate for every way to train; the loss of each update,
averaged over the last ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.cluster import Link
from autopipe.core.periodic import for_updates, steady
from autopipe.core.schedule import Op, Schedule, kind
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Span
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime import launch
from autopipe.runtime.capture import capture
from autopipe.runtime.emulated import EmulatedStage
from autopipe.runtime.own.pipemare import PipeMare
from autopipe.runtime.own.runtime import OwnRuntime
from autopipe.runtime.own.training import Training
from autopipe.runtime.recorder import Recorder
from autopipe.runtime.runner import Runner
from autopipe.runtime.torch_ir import TorchRuntime
from autopipe.simulate import simulate

RANKS, PER_UPDATE = 4, 4
FORWARD_S, BACKWARD_S = 0.010, 0.020
ELEMENTS = 1 << 14
UPDATES = 12
CPU = torch.device("cpu")


class Part(NamedTuple):
    """What a rank brings back from one round: seconds of a flushed step, and the spans of the run without a flush."""

    flushed_s: float
    spans: list[Span]


class Waiting:
    """Work that waits for a stage's seconds."""

    def forward(self, received: float) -> float:
        """Wait for the forward's seconds."""
        time.sleep(FORWARD_S)
        return 0.0

    def backward(self, received: float) -> float:
        """Wait for the backward's seconds."""
        time.sleep(BACKWARD_S)
        return 0.0

    def weight_backward(self) -> Callable[[], None]:
        """Nothing is put off."""
        return lambda: None


def throughput_on_rank(rounds: int) -> list[Part]:
    """On each rank: rounds of some flushed steps, then a run of updates without a flush."""
    return [Part(_flushed(), _continuous()) for _ in range(rounds)]


def _stage() -> EmulatedStage:
    return EmulatedStage(dist.get_rank(), Waiting(), receives=ELEMENTS, sends=ELEMENTS)


def _flushed() -> float:
    """Seconds of a step of 1F1B on torch's runtime, from a common start to the last rank's end; the best known way."""
    schedule, stage, recorder = kind("1F1B").schedule(RANKS, PER_UPDATE), _stage(), Recorder(dist.get_rank(), CPU)
    runtime = TorchRuntime(schedule, [stage], 1, CPU, lambda output, target: output[0].sum())
    for each in runtime.stages:
        recorder.watch(each)
    seconds = []
    for _ in range(UPDATES + 1):
        dist.barrier()
        begun = time.perf_counter()
        runtime.step([{}] * PER_UPDATE, [None] * PER_UPDATE)
        end = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        seconds.append(float(end))
    return statistics.median(seconds[1:])


def _continuous() -> list[Span]:
    """What ran when in a run of PipeDream-2BW."""
    schedule, stage, recorder = kind("2BW").schedule(RANKS, PER_UPDATE), _stage(), Recorder(dist.get_rank(), CPU)
    runtime = OwnRuntime(schedule, {stage.index: stage}, 1, CPU, lambda output, target: output[0].sum(), recorder)
    training = Training(schedule, runtime.executor)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-6)
    dist.barrier()
    recorder.restart()
    training.run(iter([([{}] * PER_UPDATE, [None] * PER_UPDATE)] * 99), schedule.updates + UPDATES, optimizer)
    return recorder.spans()


def periods(schedule: Schedule, spans: Sequence[Span]) -> list[float]:
    """Seconds between optimizer steps in the steady part of a rank's run."""
    first, last = steady(for_updates(schedule, schedule.updates + UPDATES))
    ends = [span.end_s for span in spans if span.action.op is Op.O]
    return [b - a for a, b in pairwise(ends[first : last + 1])]


def gap_s(spans: Sequence[Span]) -> float:
    """The median time between the end of an action and the next one's start, where that waits for nothing."""
    return statistics.median(after.start_s - before.end_s for before, after in pairwise(spans))


def predicted_s(name: str, spans: Sequence[Span]) -> float:
    """The simulator's step or period for stages that take what theirs took in the round."""
    medians = {
        op: statistics.median(s.end_s - s.start_s for s in spans if s.action.op is op) for op in (Op.F, Op.B, Op.O)
    }
    size = 8 * ELEMENTS
    cost = StageCost(
        forward_s=medians[Op.F],
        backward_s=medians[Op.B],
        input_grad_s=0.0,
        weight_grad_s=0.0,
        optimizer_s=medians[Op.O],
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=0,
        buffer_bytes=0,
        held_after_forward_bytes=0,
        held_after_input_grad_bytes=0,
        workspace_bytes=0,
        receive_bytes=size,
        send_bytes=size,
        receive_grad_bytes=size,
        send_grad_bytes=size,
    )
    hops: list[Link | None] = [LINK] * (RANKS - 1)
    return simulate(
        kind(name).schedule(RANKS, PER_UPDATE), [cost] * RANKS, hops, overhead_s=max(0.0, gap_s(spans))
    ).step_s


LINK = Link(0.3e-3, 1e9)
"""About what a message between two processes of one machine takes; ``autopipe cluster`` measures it."""


def throughput(rounds: int) -> None:
    """Print both rates, their ratio, and the error of the predicted period."""
    parts = launch.launch(throughput_on_rank, (rounds,), ranks=RANKS, timeout_s=120)
    schedule = kind("2BW").schedule(RANKS, PER_UPDATE)
    rows = []
    for index in range(rounds):
        flushed_s = max(part[index].flushed_s for part in parts)
        period_s = statistics.fmean(periods(schedule, parts[0][index].spans))
        predicted = max(predicted_s("2BW", part[index].spans) for part in parts)
        rows.append((flushed_s, period_s, predicted))
        print(
            f"round {index}   1F1B {format_duration(flushed_s)} a step   2BW {format_duration(period_s)} an update   "
            f"ratio {flushed_s / period_s:.3f}   predicted {format_duration(predicted)} "
            f"({format_percent(period_s / predicted - 1, sign=True)})"
        )
    ratios, errors = [a / b for a, b, _ in rows], [b / c - 1 for _, b, c in rows]
    print(f"median ratio {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"median error of the predicted period {format_percent(statistics.median(errors), sign=True)}")


# what stale weights do

DIGITS_RANKS, DIGITS_ROWS, DIGITS_UPDATES, LAST = 4, 32, 500, 50
RUNS = ("1F1B", "PipeDream", "PipeDream-Sync", "PipeDream-2BW", "PipeMare")


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


def digits_on_rank(lr: float) -> dict[str, list[float]]:
    """On each rank: the loss of every update, for every way to train."""
    return {name: _trained(name, lr) for name in RUNS}


def _trained(name: str, lr: float) -> list[float]:
    launch.beat.phase(f"training with {name}")
    count = DIGITS_RANKS if name in ("1F1B", "PipeDream-2BW") else 1
    rows = DIGITS_ROWS // count
    scheme = "2BW" if name == "1F1B" else name
    inputs, target = digits()
    captured = capture(perceptron(), (inputs[: max(rows, 2)],))
    table = kind(scheme).schedule(DIGITS_RANKS, count)
    layers = len(captured.layers)
    cuts = [n * layers // DIGITS_RANKS for n in range(1, DIGITS_RANKS)]
    runner = Runner(captured, table, cuts, micro_batch=rows, loss_fn=nn.functional.cross_entropy, device=CPU)
    mitigation = PipeMare(annealing=DIGITS_UPDATES // 4) if name == "PipeMare" else None
    training = Training(table, runner.own_executor(), mitigation)
    optimizer = torch.optim.SGD(runner.parameters, lr=lr, momentum=0.9)
    order = torch.Generator().manual_seed(1)
    picks = [torch.randint(0, len(target), (DIGITS_ROWS,), generator=order) for _ in range(DIGITS_UPDATES)]
    feed = (runner.whole((inputs[pick],), target[pick]) for pick in picks)
    return training.run(feed, DIGITS_UPDATES, optimizer, flush=name == "1F1B")


def train_digits(svg: Path | None, lr: float) -> None:
    """Print where every run ends, and draw all of them."""
    losses: dict[str, list[float]] = launch.launch(digits_on_rank, (lr,), ranks=DIGITS_RANKS, timeout_s=300)[0]
    at_end = {name: statistics.fmean(values[-LAST:]) for name, values in losses.items()}
    print(
        f"digits, {DIGITS_RANKS} ranks, batches of {DIGITS_ROWS}, {DIGITS_UPDATES} updates, SGD {lr} with momentum 0.9"
    )
    for name, value in at_end.items():
        label = "1F1B (flushed)" if name == "1F1B" else name
        print(f"{label:<16} loss {value:.4f} over the last {LAST} updates   {value - at_end['1F1B']:+.4f}")
    if svg:
        svg.write_text(curves(losses))


def curves(losses: dict[str, list[float]], width: int = 720, height: int = 320) -> str:
    """The losses over updates as SVG, each point the mean of 20 updates, on a logarithmic axis from 0.001 to 3."""
    import math

    left, bottom, colours = 50, height - 30, ("#444", "#0072b2", "#56b4e9", "#e69f00", "#cc3311")
    low, high, size = math.log10(1e-3), math.log10(3.0), 20

    def y(loss: float) -> float:
        return bottom - (math.log10(max(loss, 1e-3)) - low) / (high - low) * (bottom - 20)

    head = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {head}>']
    for tick in (0.001, 0.01, 0.1, 1.0):
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number, (name, values) in enumerate(losses.items()):
        means = [statistics.fmean(values[n : n + size]) for n in range(0, len(values), size)]
        step = (width - 10 - left) / max(1, len(means) - 1)
        points = " ".join(f"{left + n * step:.1f},{y(mean):.1f}" for n, mean in enumerate(means))
        parts.append(f'<polyline fill="none" stroke="{colours[number]}" stroke-width="1.5" points="{points}"/>')
        parts.append(f'<text x="{width - 150}" y="{34 + 16 * number}" fill="{colours[number]}">{name}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">0</text>')
    parts.append(
        f'<text x="{width - 10}" y="{height - 8}" text-anchor="end">{len(next(iter(losses.values())))} updates</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "digits"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--svg", type=Path)
    given: Any = parser.parse_args()
    if given.what == "throughput":
        throughput(given.rounds)
    else:
        train_digits(given.svg, given.lr)


if __name__ == "__main__":
    main()
