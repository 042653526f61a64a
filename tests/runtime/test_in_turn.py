"""What a forward leaves for the next one: met in micro-batch order by stages, or refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.errors import CaptureError, UsageError
from autopipe.core.schedule import Schedule, kind
from autopipe.runtime.capture import capture
from autopipe.runtime.running.in_turn import check_in_turn
from tests.models import ZOO, Case, square_loss, vector_batch
from tests.runtime.chained import captured_case, legal_cuts
from tests.runtime.tabled import assert_trains_by_table
from tests.synthetic import random_schedule


@pytest.mark.parametrize("name", ["spectral_norm", "ema_buffers", "hidden_state", "counter", "byol"])
def test_many_forwards_in_flight_meet_what_one_process_meets(name: str) -> None:
    captured, rng = captured_case(ZOO[name]), random.Random(name)
    cuts = legal_cuts(captured)
    again = list(range(0, len(captured.layers), 2))
    for schedule in (kind("1F1B").schedule(3, 4), kind("ZB-V").schedule(2, 4, stages_per_rank=2)):
        if schedule.stages <= len(cuts) + 1:
            assert_trains_by_table(ZOO[name], captured, schedule, cuts[: schedule.stages - 1], recompute=again)
    for _ in range(3):
        stages = rng.randint(2, len(cuts) + 1)
        table = random_schedule(rng, ranks=2, stages=stages, micro_batches=4, in_turn=True)
        assert_trains_by_table(ZOO[name], captured, table, sorted(rng.sample(cuts, stages - 1)), recompute=again)


def out_of_order() -> Schedule:
    rng = random.Random(0)
    while True:
        table = random_schedule(rng, ranks=2, stages=2, micro_batches=3)
        if [action.micro_batch for action in table.order[table.placement[0]] if action.op == "F"] != [0, 1, 2]:
            return table


@pytest.mark.parametrize(("name", "left"), [("spectral_norm", "0.weight_u"), ("hidden_state", "0.hidden")])
def test_another_order_is_refused_with_what_is_left_behind(name: str, left: str) -> None:
    captured = captured_case(ZOO[name])
    said = rf"\.py:\d+: each forward changes {left} for the next one, and random runs 0F\d before 0F\d"
    with pytest.raises(UsageError, match=said):
        check_in_turn(captured, out_of_order(), [1])


def test_two_copies_of_what_is_left_behind_are_refused() -> None:
    table = kind("Chimera").schedule(2, 4)
    with pytest.raises(UsageError, match=r"Chimera trains 2 copies of it: use a one-way schedule"):
        check_in_turn(captured_case(ZOO["ema_buffers"]), table, [2])
    check_in_turn(captured_case(ZOO["sequential"]), out_of_order(), [1])


def test_two_copies_may_keep_statistics_that_no_forward_looks_at() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), vector_batch(4)[0])
    check_in_turn(captured, kind("Chimera").schedule(2, 4), [1])
    with pytest.raises(UsageError, match=r"each forward changes 1\.running_mean"):
        check_in_turn(captured, out_of_order(), [2])


class Cell(nn.Module):
    """Goes on from the last row of the batch before, which it keeps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._last = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) if self._last is None else self.linear(x + self._last))
        self._last = y[-1].detach()
        return y


class Ends(nn.Module):
    """Uses one cell at both ends."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cell(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.cell(x)


class Looking(nn.Module):
    """Looks at its values, and keeps an average that it subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(x - self.average if x.sum().item() < 1e9 else x)


@pytest.mark.parametrize("cell", [Cell, Looking])
def test_calls_that_share_what_is_left_behind_are_not_parted(cell: type[nn.Module]) -> None:
    case = Case("ends", lambda: Ends(cell()), vector_batch, square_loss)
    captured = captured_case(case)
    assert not legal_cuts(captured)
    assert "changes in each forward" in captured.layout.barred[1]
    assert_trains_by_table(case, captured, kind("1F1B").schedule(1, 3), [])


def test_buffers_that_a_module_kept_whole_changes_are_told_apart() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), Looking()), vector_batch(4)[0])
    names = {"average", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert captured.changed_state() == {f"1.{name}" for name in names}


class Clipped(nn.Module):
    """Clips its weight, and looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(x)) * min(1.0, x.abs().sum().item())


def test_a_module_kept_whole_may_not_change_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Clipped(), nn.Linear(8, 8))
    before = model[1].linear.weight.clone()
    with pytest.raises(CaptureError, match=r"test_in_turn\.py:\d+: .*1 changes its parameters"):
        capture(model, vector_batch(4)[0])
    assert torch.equal(model[1].linear.weight, before)


def test_capture_leaves_parameters_that_a_forward_changes_alone() -> None:
    model = ZOO["byol"].build_model()
    before = [parameter.clone() for parameter in model.parameters()]
    capture(model, ZOO["byol"].example_batch(4)[0])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Alternating(nn.Module):
    """Halves every other result, by a count that all of its kind share."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Alternating.calls += 1
        return torch.tanh(self.linear(x)) * (1.0 if Alternating.calls % 2 else 0.5)


def test_what_is_left_outside_the_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_in_turn\.py:\d+: .*of two micro-batches"):
        capture(nn.Sequential(Alternating(), nn.Linear(8, 8)), vector_batch(4)[0])
