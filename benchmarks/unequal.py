"""One rank made three times slower for real, its work repeated: does the plan give it a third of the layers?

    python benchmarks/unequal.py [--times 3] [--rounds 3]

Twelve equal blocks on two ranks. Rank 1 repeats every operation, whatever runs on it, so that devices, layers and plans
are measured as on a slower device; autopipe is told nothing. A round measures cluster and model and runs the plan and
those with its cut moved by a block; processors change their speed by some per cent from minute to minute, so the median
of the rounds counts. Needs two free cores. Exit code 1 where the median error of the plan is above 5 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

import autopipe
from autopipe.core.cluster import Cluster
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.checking.plans import try_plan
from autopipe.runtime.measuring.links import measure_cluster
from autopipe.runtime.ranks import launch

BLOCKS = 12
MODEL = f"""
import torch
from torch import nn

WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))  # has the first block compute its input's gradient, as the others
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.shift
        return x + self.down(torch.relu(self.up(x)))


def build_model():
    return nn.Sequential(*(Block() for _ in range({BLOCKS})))


def example_batch(batch_size):
    seed = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, WIDTH, generator=seed),), torch.randn(batch_size, WIDTH, generator=seed)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""
MICRO_BATCH, MICRO_BATCHES = 128, 32
"""Products large enough to outweigh what Python adds to each, and enough micro-batches for the work to decide: with
few, filling and draining the pipeline does."""
TIMEOUT_S, MEASURING_S = 300.0, 15.0
GOAL = 0.05
"""How far the plan's step may be from its prediction."""


class Repeating(TorchDispatchMode):
    """Does every operation so many times, but for those that draw random numbers.

    What changes a tensor is repeated on a spare one of the same shape, so that results stay as they are.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self._spares: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
            given = (args, kwargs) if not func._schema.is_mutable else self._spared(func, args, kwargs)
            for _ in range(self.times - 1 if given else 0):
                func(*given[0], **given[1])
        return func(*args, **kwargs)

    def _spared(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments with spare tensors in place of those that are changed; None while a model is traced."""
        if tree_any(lambda value: isinstance(value, torch.Tensor) and not _holds_numbers(value), (args, kwargs)):
            return None
        changed = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        names = [argument.name for argument in func._schema.arguments]
        return (
            [self._spare(value) if name in changed else value for name, value in zip(names, args, strict=False)],
            {name: self._spare(value) if name in changed else value for name, value in kwargs.items()},
        )

    def _spare(self, value: Any) -> Any:
        """A spare for each tensor in it."""
        numbers = iter(range(1 << 20))

        def spare(tensor: torch.Tensor) -> torch.Tensor:
            key = (next(numbers), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in self._spares:
                self._spares[key] = torch.zeros_like(tensor)
            return self._spares[key]

        return tree_map_only(torch.Tensor, spare, value)


def _holds_numbers(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


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


def planned(profile: Profile, cluster: Cluster, blocks: int | None = None) -> Plan:
    """The plan, or the one with so many blocks in its first stage."""
    pins = {layer.name: int(number >= blocks) for number, layer in enumerate(profile.layers)} if blocks else None
    return autopipe.plan(profile, cluster, global_batch=MICRO_BATCH * MICRO_BATCHES, depths=(2,), pins=pins)


class Row(NamedTuple):
    """A plan's blocks on rank 0 and on rank 1, and its step as measured over the one predicted, less 1."""

    blocks: str
    error: float
    measured_s: float


def row(plan: Plan, model: str) -> Row:
    """Run a plan, and print its line."""
    found = try_plan(plan, model, timeout_s=TIMEOUT_S, seconds=MEASURING_S)
    expected_s = plan.predicted.step_s
    made = Row(blocks_of(plan), found.step_s / expected_s - 1, found.step_s)
    print(
        f"{plan.schedule.name:<8}{made.blocks:>8}{format_duration(expected_s):>12}{format_duration(found.step_s):>12}"
        f"{format_percent(made.error, sign=True):>9}{format_percent(found.spread):>9}",
        flush=True,
    )
    return made


def blocks_of(plan: Plan) -> str:
    """The numbers of blocks, by rank."""
    return " / ".join(str(len(stage.layers)) for stage in sorted(plan.stages, key=lambda stage: stage.rank))


def measured(times: int) -> list[Row]:
    """A round: the plan and its neighbours on this cluster and this profile, the plan first.

    In a folder of its own: a profile is kept beside its model, and the next round would read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "blocks.py")
        model.write_text(MODEL)
        return rows_of(str(model), times)


def rows_of(model: str, times: int) -> list[Row]:
    """The plan of a model file and its neighbours, measured now."""
    cluster = measure_cluster(2)
    profile = autopipe.profile(model, devices=2, micro_batches=(MICRO_BATCH,), optimizer="sgd")
    speeds = ", ".join(f"{device.speed:g}" for device in cluster.ranks())
    print(f"rank 1 repeats its work {times} times: measured speeds {speeds}, noise {format_percent(profile.noise)}")
    print(f"{'plan':<8}{'blocks':>8}{'predicted':>12}{'measured':>12}{'error':>9}{'spread':>9}")
    chosen = planned(profile, cluster)
    near = [blocks for blocks in (chosen.cuts[0] - 1, chosen.cuts[0] + 1) if 0 < blocks < BLOCKS]
    return [row(plan, model) for plan in (chosen, *(planned(profile, cluster, blocks) for blocks in near))]


def main() -> None:
    """Print the rounds, and over them the plan's error and its step over the neighbours'."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with mock.patch.object(launch, "launch", launched(asked.times)):
        rounds = [measured(asked.times) for _ in range(asked.rounds)]
    chosen = ", ".join(sorted({rows[0].blocks for rows in rounds}))
    error = statistics.median(rows[0].error for rows in rounds)
    print(f"plan {chosen}: median error {format_percent(error, sign=True)} of {asked.rounds} rounds", end="; ")
    over = statistics.median(rows[0].measured_s / min(row.measured_s for row in rows[1:]) for rows in rounds)
    print(f"its step over the better neighbour's {over:.2f}")
    sys.exit(abs(error) > GOAL)


if __name__ == "__main__":
    main()
