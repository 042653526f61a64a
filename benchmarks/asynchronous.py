"""Asynchronous pipelines: throughput against a flushed one, on emulated ranks, p = 4, m = 4.

    python benchmarks/asynchronous.py [--rounds 5]

Four ranks whose stages wait instead of computing, so that two cores do. In each round 1F1B flushes after every update
on torch's runtime, and PipeDream-2BW goes on without one on ours. Predicted is what the simulator says for the stages'
seconds and the gap between two actions that the same round measured. What stale weights do to a training run is
benchmarks/stale_weights.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.cluster import Link
from autopipe.core.periodic import for_updates, steady
from autopipe.core.schedule import Op, Schedule, kind
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Span
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.own.runtime import OwnRuntime
from autopipe.runtime.own.training import Training
from autopipe.runtime.ranks import launch
from autopipe.runtime.tables.emulated import EmulatedStage
from autopipe.runtime.tables.recorder import Recorder
from autopipe.runtime.tables.torch_ir import TorchRuntime
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


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    throughput(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
