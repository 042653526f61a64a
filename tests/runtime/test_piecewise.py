"""Optimizers over pieces of parameters: the same numbers as whole ones, less memory, one form of state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.optimizer import Optimizer
from autopipe.core.plan import Plan
from autopipe.core.profile import Layer
from autopipe.runtime.checking.parity import largest, largest_magnitude
from autopipe.runtime.checking.plans import check_rank, combine
from autopipe.runtime.running import piecewise
from autopipe.runtime.running.piecewise import MASTER, Piecewise, kept_tensors
from autopipe.runtime.running.runner import OPTIMIZERS
from autopipe.runtime.workload import ModelFile
from tests.runtime.planned import plan_of, zoo_file
from tests.runtime.ranks import Ranks
from tests.runtime.test_training import assert_bit_equal, batch_of, built, opened, step, step_alone

SHAPES = [(7, 5), (3,), (), (1,), (0, 4), (40, 50)]


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """Some of each shape, one laid out as convolutions on channels are."""
    torch.manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    channels = torch.randn(4, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
    return [*made, nn.Parameter(channels)]


def give_gradients(held: Sequence[nn.Parameter], number: int) -> None:
    """Equal ones for equal numbers; of the fourth parameter in the second step none."""
    for place, parameter in enumerate(held):
        torch.manual_seed(100 * number + place)
        parameter.grad = None if (number, place) == (1, 3) else torch.randn(parameter.shape).to(parameter.dtype)


def stepped(optimizer: torch.optim.Optimizer, held: Sequence[nn.Parameter], numbers: Sequence[int]) -> None:
    for number in numbers:
        give_gradients(held, number)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in held)


def by_hand(make: Callable[..., Any], held: Sequence[nn.Parameter], numbers: Sequence[int], **options: Any) -> None:
    """Mixed precision as it is written out: a float32 copy of each, its gradient in float32, and the result rounded."""
    copies = [nn.Parameter(parameter.detach().float()) for parameter in held]
    optimizer = make(copies, **options)
    for number in numbers:
        give_gradients(held, number)
        for copy, parameter in zip(copies, held, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, held, strict=True):
                parameter.copy_(copy)


@pytest.fixture(params=[4 << 20, 64])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of many elements, and of few."""
    monkeypatch.setattr(piecewise, "_AT_ONCE_BYTES", request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_copies_in_float32_are_what_is_written_out_by_hand(name: str) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = Piecewise(ours, OPTIMIZERS[name], {"lr": 0.1}, master_weights=True)
    stepped(optimizer, ours, range(4))
    by_hand(OPTIMIZERS[name], theirs, range(4), lr=0.1)
    assert_bit_equal(dict(enumerate(ours)), dict(enumerate(theirs)))


def test_small_updates_are_not_lost() -> None:
    """What the copies are for: 100 updates of a thousandth each, of which bfloat16 has no eighth."""
    plain, copied = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizers = (
        torch.optim.SGD([plain], lr=1e-3),
        Piecewise([copied], torch.optim.SGD, {"lr": 1e-3}, master_weights=True),
    )
    for _ in range(100):
        for optimizer, parameter in zip(optimizers, (plain, copied), strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert plain[0].item() == 1.0
    assert copied[0].item() == pytest.approx(0.9, abs=4e-3)


def test_schedules_and_groups_are_heard() -> None:
    ours, theirs = parameters(torch.float16), parameters(torch.float16)
    groups = [{"params": ours[:2], "weight_decay": 0.5}, {"params": ours[2:]}]
    optimizer = Piecewise(groups, torch.optim.AdamW, {"lr": 0.1}, master_weights=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    copies = [nn.Parameter(p.detach().float()) for p in theirs]
    plain = torch.optim.AdamW([{"params": copies[:2], "weight_decay": 0.5}, {"params": copies[2:]}], lr=0.1)
    expected = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for number in range(3):
        give_gradients(ours, number)
        for copy, parameter in zip(copies, ours, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        for each in (optimizer, plain, scheduler, expected):
            each.step()
    assert_bit_equal(dict(enumerate(ours)), {place: copy.detach().half() for place, copy in enumerate(copies)})


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("weights_first", [True, False])
def test_a_saved_state_goes_on(weights_first: bool) -> None:
    whole, before, after = (parameters(torch.bfloat16) for _ in range(3))
    asked: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    stepped(Piecewise(whole, torch.optim.SGD, asked, master_weights=True), whole, range(5))
    saved = Piecewise(before, torch.optim.SGD, asked, master_weights=True)
    stepped(saved, before, range(3))
    state = saved.state_dict()
    assert state["state"][0][MASTER].dtype is torch.float32
    assert [tuple(kept[MASTER].shape) for kept in state["state"].values()] == [tuple(p.shape) for p in before]
    loaded = Piecewise(after, torch.optim.SGD, asked, master_weights=True)

    def take_weights() -> None:
        with torch.no_grad():
            for mine, theirs in zip(after, before, strict=True):
                mine.copy_(theirs)

    if weights_first:
        take_weights()
    loaded.load_state_dict(state)
    if not weights_first:
        take_weights()
    stepped(loaded, after, range(3, 5))
    assert_bit_equal(dict(enumerate(after)), dict(enumerate(whole)))


def test_a_state_without_copies_can_be_loaded() -> None:
    """That of a plain optimizer in one process, as before the plan had master weights."""
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    before = torch.optim.AdamW(plain, lr=0.1)
    stepped(before, plain, range(2))
    after = Piecewise(ours, torch.optim.AdamW, {"lr": 0.1}, master_weights=True)
    after.load_state_dict(before.state_dict())
    stepped(after, ours, [2])
    kept = after.state_dict()["state"][0]
    assert (int(kept["step"]), kept["exp_avg"].dtype) == (3, torch.float32)


def test_a_parameter_that_something_else_changes_is_heard() -> None:
    ours = parameters(torch.bfloat16)
    optimizer = Piecewise(ours, torch.optim.SGD, {"lr": 0.0}, master_weights=True)
    stepped(optimizer, ours, [0])
    with torch.no_grad():
        ours[0].fill_(3.0)
    stepped(optimizer, ours, [1])
    assert (ours[0] == 3.0).all()


def test_a_parameter_with_gaps_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \(4, 2\) has gaps"):
        Piecewise([nn.Parameter(torch.zeros(4, 4)[:, :2])], torch.optim.SGD, {"lr": 0.1}, master_weights=True)


# ---------------------------------------------------------------------------- shared out


def shared(
    name: str, dtype: torch.dtype, *, masters: bool, few: bool
) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """On each rank: the parameters after steps that a saved state parts, the state, and the bytes that are kept."""
    if few:
        piecewise._AT_ONCE_BYTES = 64
    held = parameters(dtype)
    given = held, OPTIMIZERS[name], {"lr": 0.1}
    first = Piecewise(*given, master_weights=masters, peers=dist.group.WORLD)
    stepped(first, held, range(2))
    second = Piecewise(*given, master_weights=masters, peers=dist.group.WORLD)
    second.load_state_dict(first.state_dict())
    stepped(second, held, range(2, 4))
    kept = sum(tensor.nbytes for tensor in second.tensors() if tensor.dim())
    piecewise._AT_ONCE_BYTES = 4 << 20
    return [parameter.detach() for parameter in held], second.state_dict(), kept


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "masters"),
    [("adamw", torch.float32, False), ("adam", torch.bfloat16, True), ("momentum", torch.float32, False)],
)
def test_shared_state_gives_the_same_bits(
    ranks: Ranks, name: str, dtype: torch.dtype, masters: bool, few: bool
) -> None:
    alone = parameters(dtype)
    plain = Piecewise(alone, OPTIMIZERS[name], {"lr": 0.1}, master_weights=masters)
    stepped(plain, alone, range(4))
    layer = Layer("all", sum(p.nbytes for p in alone), sum(p.numel() for p in alone))
    for held, state, kept in ranks.run(shared, name, dtype, masters=masters, few=few, ranks=3):
        assert_bit_equal(dict(enumerate(held)), dict(enumerate(alone)))
        assert_bit_equal(state, plain.state_dict())
        share = Optimizer(name, masters, 3).state_bytes(layer)
        assert kept <= share + 12 * len(alone)  # at most one element more of each, of 12 bytes


# ---------------------------------------------------------------------------- in a pipeline


def trained(plan: Plan, steps: int) -> tuple[float, float, dict[str, Any]]:
    """How far updates are from those of one process, the bytes kept over those planned, and the whole state."""
    workload, alone = opened(plan), opened(plan)
    dtype = getattr(torch, plan.dtype)
    for model in (workload.model, alone.model):
        model.to(dtype)
    pipeline = built(plan, workload)
    optimizer = pipeline.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    copies = {name: nn.Parameter(p.detach().float()) for name, p in alone.model.named_parameters()}
    expected = torch.optim.SGD(copies.values(), lr=0.1, momentum=0.9)
    start = {name: copy.detach().clone() for name, copy in copies.items()}
    for seed in range(steps):
        batch = batch_of(workload, plan.global_batch, seed)
        step(pipeline, batch)
        step_alone(plan, alone, batch, plan.global_batch)
        for name, parameter in alone.model.named_parameters():
            copies[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        alone.model.load_state_dict({name: copy.detach() for name, copy in copies.items()}, strict=False)
    moved = {name: copy.detach() - start[name] for name, copy in copies.items()}
    most = largest_magnitude(moved.values())
    state = pipeline.optimizer_state_dict(optimizer)["state"]
    ours = {
        name: state[name].get(MASTER, parameter.detach()) - start[name]
        for name, parameter in pipeline.named_parameters()
    }
    held = [*pipeline.parameters()]
    layer = Layer("own", sum(p.nbytes for p in held), sum(p.numel() for p in held))
    kept = sum(tensor.nbytes for tensor in kept_tensors(optimizer) if tensor.dim())
    far = largest(float((change - moved[name]).abs().max()) / most for name, change in ours.items())
    return far, kept / plan.update.state_bytes(layer), pipeline.full_optimizer_state_dict(optimizer)


def planned(folder: Path, name: str, depth: int, **changes: Any) -> Plan:
    plan = plan_of(zoo_file(folder, name), depth, "1F1B", replicas=changes.get("replicas", 1))
    return dataclasses.replace(plan, optimizer="momentum", **changes)


@pytest.mark.parametrize("depth", [1, 2])
def test_replicas_that_share_the_state_train_as_one_process(ranks: Ranks, tmp_path: Path, depth: int) -> None:
    """With embeddings that are tied over two ranks."""
    plan = planned(tmp_path, "gpt2", depth, replicas=2, sharded_optimizer=True)
    found = ranks.run(trained, plan, 3, ranks=2 * depth)
    for far, kept, _ in found:
        assert far < 1e-4
        assert kept == pytest.approx(1, abs=0.02)
    whole = found[0][2]
    assert set(whole["state"]) == {name for name, _ in opened(plan).model.named_parameters()}
    assert not any(state for _, _, state in found[1:])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_bf16_model_with_master_weights_trains_as_one_process(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "master_weights": True, "sharded_optimizer": sharded}
    depth = 1 if sharded else 2
    plan = planned(tmp_path, "llama", depth, replicas=2 // depth, **changes)
    for far, kept, whole in ranks.run(trained, plan, 3, ranks=2):
        assert far < 2e-2
        assert kept == pytest.approx(1, abs=0.02)
        assert all(state[MASTER].dtype is torch.float32 for state in whole.get("state", {}).values())


def test_such_a_plan_is_checked(ranks: Ranks, tmp_path: Path) -> None:
    path = zoo_file(tmp_path, "gpt2")
    plan = dataclasses.replace(plan_of(path, 2, "1F1B", replicas=2), sharded_optimizer=True)
    result = combine(plan, ranks.run(check_rank, plan, ModelFile(str(path)), "cpu", ranks=4), "cpu")
    assert result.parity.passed, result.parity
