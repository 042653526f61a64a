"""One rank made three times slower for real, its work repeated: does the plan give it a third of the layers?

    python benchmarks/unequal.py [--times 3]

Twelve equal blocks on two ranks. Rank 1 repeats every operation, whatever runs on it, so that devices, layers and the
plan are measured as on a slower device; autopipe is told nothing. Needs two free cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autopipe
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime import launch
from autopipe.runtime.checking import try_plan
from autopipe.runtime.links import measure_cluster

MODEL = """
import torch
from torch import nn

WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build_model():
    return nn.Sequential(*(Block() for _ in range(12)))


def example_batch(batch_size):
    seed = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, WIDTH, generator=seed),), torch.randn(batch_size, WIDTH, generator=seed)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""
MICRO_BATCH, MICRO_BATCHES = 384, 8
TIMEOUT_S, MEASURING_S = 300.0, 20.0


class Repeating(TorchDispatchMode):
    """Does every operation so many times, but for those that change a tensor or draw random numbers."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        again = func.namespace == "aten" and not func._schema.is_mutable
        if again and torch.Tag.nondeterministic_seeded not in func.tags:
            for _ in range(self.times - 1):
                func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def slowly(times: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a rank runs, on rank 1 so many times slower."""
    if os.environ["RANK"] != "1":
        return function(*args)
    with Repeating(times):
        return function(*args)


def launched(times: int) -> Callable[..., list[Any]]:
    """``launch`` with a slow rank 1."""
    original = launch.launch
    return lambda function, args, **options: original(slowly, (times, function, args), **options)


def main() -> None:
    """Print the speeds, the cut, and its step against the prediction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(launch, "launch", launched(times)):
        model = str(Path(folder, "blocks.py"))
        Path(model).write_text(MODEL)
        cluster = measure_cluster(2)
        profile = autopipe.profile(model, devices=2, micro_batches=(MICRO_BATCH,), optimizer="sgd")
        plan = autopipe.plan(profile, cluster, global_batch=MICRO_BATCH * MICRO_BATCHES, depths=(2,))
        found = try_plan(plan, model, timeout_s=TIMEOUT_S, seconds=MEASURING_S)
    speeds = ", ".join(f"{device.speed:g}" for device in cluster.ranks())
    print(f"rank 1 repeats its work {times} times: measured speeds {speeds}, noise {format_percent(profile.noise)}")
    print(f"plan      {plan.schedule.name}, {' / '.join(str(len(stage.layers)) for stage in plan.stages)} blocks")
    predicted_s = plan.predicted.step_s
    print(
        f"step      predicted {format_duration(predicted_s)}, measured {format_duration(found.step_s)} "
        f"({format_percent(found.step_s / predicted_s - 1, sign=True)}), spread {format_percent(found.spread)}"
    )


if __name__ == "__main__":
    main()
