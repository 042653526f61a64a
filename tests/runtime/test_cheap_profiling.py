"""Profiles that cost as much as their distinct layers: sampled units, sizes on a line, sizes that do not fit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.profile import CostTable, LayerCost
from autopipe.runtime.measuring import profiling
from autopipe.runtime.measuring.curves import first_sizes, interpolated, straight
from autopipe.runtime.measuring.measure import Samples, stage_price_s
from autopipe.runtime.measuring.profiling import profile
from autopipe.runtime.measuring.unit_bytes import UnitBytes
from autopipe.runtime.ranks import launch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


def model(blocks: int, width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 1))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - target).square().mean()


def samples(unit_s: list[float], single_s: float, places: list[list[int]], stages: int) -> Samples:
    made = Samples(places, stages)
    for _ in range(5):
        made.units["forward"].append(unit_s)
        made.units["backward"].append([2 * s for s in unit_s])
        made.single["forward"].append(single_s)
        made.single["backward"].append(2 * single_s)
    return made


def test_a_unit_costs_what_its_kind_does_and_the_price_of_a_stage_is_shared() -> None:
    """Units E A A A A N, of which E A A, A N are run in a chain, and put together to two stages."""
    made = samples([3.0, 2.0, 2.0, 2.0, 5.0], 14.0 - 3 * 0.5, [[0], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [4]], 2)
    assert made.median("forward") == [3.0, 2.0, 2.0, 2.0, 2.0, 5.0]
    assert stage_price_s(made, "forward") == 0.5
    assert made.alike()
    assert not samples([3.0, 2.0, 2.3, 2.0, 5.0], 14.0, made.places, 2).alike()


def test_sizes_between_are_interpolated_where_the_middle_lies_on_the_line() -> None:
    assert first_sizes((1, 2, 4)) == (1, 2, 4)
    assert first_sizes((8, 1, 2, 4)) == (1, 2, 8) or first_sizes((8, 1, 2, 4)) == (1, 4, 8)
    assert first_sizes((1, 2, 4, 8, 16)) == (1, 4, 16)

    def at(seconds: float) -> Samples:
        return samples([seconds, seconds], 2 * seconds, [[0], [1]], 1)

    line = {1: at(2.0), 4: at(5.0), 16: at(17.0)}
    assert straight(line, (1, 4, 16))
    assert not straight({**line, 4: at(6.0)}, (1, 4, 16))


def test_an_interpolated_size_has_its_own_bytes() -> None:
    def table(size: int) -> CostTable:
        return CostTable(size, (LayerCost(size + 1.0, 2.0 * size, size, size, 100 * size, 0, 8),))

    made = interpolated(6, [table(1), table(4), table(8)], {0: UnitBytes(held_after_forward=7, output=9)})
    assert made.interpolated
    (cost,) = made.layers
    assert (cost.forward_s, cost.backward_s) == (7.0, 12.0)
    assert (cost.held_after_forward_bytes, cost.output_bytes) == (7, 9)


def test_equal_layers_of_a_deep_model_get_equal_costs(tmp_path) -> None:
    batch = ((torch.randn(4, 8),), torch.randn(4))
    made = profile(model(20), batch, loss, micro_batches=(2,), budget_s=0.0, save=tmp_path / "deep.profile.json")
    assert len(made.layers) == 22
    blocks = made.at(2)[2:20]
    assert len({(cost.forward_s, cost.held_after_forward_bytes) for cost in blocks}) == 1


@pytest.mark.parametrize("lack", [MemoryError, torch.OutOfMemoryError])
def test_a_size_that_runs_out_of_memory_is_a_fact_in_the_profile(monkeypatch, tmp_path, lack) -> None:
    def small(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(target) > 2:
            raise lack("no room for more than two")
        return loss(output, target)

    with alone(tmp_path):
        monkeypatch.setattr(launch, "launch", lambda function, args, **options: [function(*args)])
        batch = ((torch.randn(4, 8),), torch.randn(4))
        made = profiling.profile(model(2), batch, small, micro_batches=(1, 2, 4), budget_s=0.0)
    assert (made.micro_batches, made.out_of_memory) == ((1, 2), (4,))
    with pytest.raises(UsageError, match="micro-batch 4 ran out of memory on"):
        made.at(4)


def test_a_rank_that_is_much_slower_is_left_out(monkeypatch, tmp_path) -> None:
    def two_ranks(function, args, **options):
        first = function(*args)
        if not isinstance(first, profiling.RankSamples):
            return [first]
        second = copy.deepcopy(first)
        for samples in second.samples.values():
            samples.units = {what: [[1e6 * s for s in row] for row in rows] for what, rows in samples.units.items()}
            samples.single = {what: [1e6 * s for s in row] for what, row in samples.single.items()}
        return [first, second]

    with alone(tmp_path):
        monkeypatch.setattr(launch, "launch", two_ranks)
        batch = ((torch.randn(4, 8),), torch.randn(4))
        made = profiling.profile(model(2), batch, loss, micro_batches=(2,), budget_s=0.0)
    assert max(cost.forward_s for cost in made.at(2)) < 1.0


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_layers_are_timed_with_events_and_clocks_on_a_gpu(tmp_path: Path) -> None:
    batch = ((torch.randn(4, 8),), torch.randn(4))
    made = profile(model(20), batch, loss, micro_batches=(2,), budget_s=0.0, save=tmp_path / "deep.profile.json")
    assert made.device == torch.cuda.get_device_name()
    assert all(cost.forward_s > 0 for cost in made.at(2))


@pytest.mark.gpu
def test_a_batch_larger_than_the_gpu_is_a_fact_in_the_profile(tmp_path: Path) -> None:
    width = 1 << 14
    rows = torch.cuda.get_device_properties(0).total_memory // (4 * width)
    batch = ((torch.randn(4, 8),), torch.randn(4))
    made = profile(
        model(2, width), batch, loss, micro_batches=(2, rows), budget_s=0.0, save=tmp_path / "wide.profile.json"
    )
    assert (made.micro_batches, made.out_of_memory) == ((2,), (rows,))
