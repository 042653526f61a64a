"""Stages under torch's pipeline runtime on real ranks: gradients of one process, by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from autopipe.core.schedule import Action, Op, Order, Schedule
from autopipe.runtime.checking.draws import same_draws
from autopipe.runtime.checking.parity import RankParity, dense, largest_magnitude
from autopipe.runtime.running.batches import Part, Weighed
from autopipe.runtime.running.runner import Runner
from tests.models import ZOO
from tests.runtime.chained import captured_case, eager, legal_cuts, reference_of, take_steps
from tests.runtime.ranks import Ranks

MICRO_BATCHES, ROWS = 4, 2
SMALL = 1e-3


def order(placement: tuple[int, ...], *, split: bool) -> Order:
    """One forward, one backward, a stage at a time; with ``split`` W runs two micro-batches late, or at the end."""
    ranks = 1 + max(placement)
    table = []
    for rank in range(ranks):
        mine = [stage for stage, where in enumerate(placement) if where == rank]
        row = [Action(stage, Op.F, m) for stage in mine for m in range(MICRO_BATCHES)]
        if len(mine) == 1 and len(placement) == ranks:
            row = one_f_one_b(mine[0], ranks)
        else:
            row += [Action(stage, Op.B, m) for stage in reversed(mine) for m in range(MICRO_BATCHES)]
        table.append(tuple(delayed(row) if split else row))
    return tuple(table)


def one_f_one_b(stage: int, stages: int) -> list[Action]:
    warm = min(MICRO_BATCHES, stages - stage)
    row = [Action(stage, Op.F, m) for m in range(warm)]
    for m in range(MICRO_BATCHES):
        row.append(Action(stage, Op.B, m))
        if warm + m < MICRO_BATCHES:
            row.append(Action(stage, Op.F, warm + m))
    return row


def delayed(row: list[Action]) -> list[Action]:
    made: list[Action] = []
    waiting: list[Action] = []
    for action in row:
        if action.op is Op.B:
            made.append(Action(action.stage, Op.I, action.micro_batch))
            waiting.append(Action(action.stage, Op.W, action.micro_batch))
            if len(waiting) > 2:
                made.append(waiting.pop(0))
        else:
            made.append(action)
    return made + waiting


def worst_difference(
    name: str, cuts: list[int], placement: tuple[int, ...], split: bool, recompute: list[int]
) -> tuple[float, str]:
    """Run on every rank: two SGD steps on stages and in eager mode; the largest relative difference and where."""
    case = ZOO[name]
    captured = captured_case(case, batch=4 if case.fixed else ROWS)
    reference = reference_of(case, captured.model)
    rows = captured.micro_batch or ROWS
    runner = Runner(
        captured,
        Schedule("test", placement, order(placement, split=split)),
        cuts,
        micro_batch=rows,
        loss_fn=case.loss_fn,
        device=torch.device("cpu"),
        recompute=recompute,
    )
    worst = RankParity()
    for step in range(2):
        torch.manual_seed(step)
        batches = [case.example_batch(rows) for _ in range(MICRO_BATCHES)]
        weighed = [Weighed(target, 1 / MICRO_BATCHES) for _, target in batches]
        with same_draws(captured):
            losses = runner.backward([Part(rows, [captured.bind(inputs) for inputs, _ in batches], weighed)])
            expected = eager(case, reference, batches)
        if losses:
            worst.note("loss", abs(sum(map(float, losses)) - sum(expected)))
        note_differences(worst, captured.model, reference, runner)
        take_steps(reference, *runner.modules)
    return worst.max_gradient_difference, worst.worst


def note_differences(worst: RankParity, model: Any, reference: Any, runner: Runner) -> None:
    held = {name for module in runner.modules for name, _ in module.named_parameters()}
    buffers = {name for module in runner.modules for name, _ in module.named_buffers()}
    named = {name: None if p.grad is None else dense(p.grad) for name, p in reference.named_parameters()}
    scale = SMALL * largest_magnitude(named.values())
    for name, parameter in model.named_parameters():
        expected, found = named[name], parameter.grad
        if name not in held or (expected is None and found is None):
            continue
        assert found is not None, f"{name} got no gradient"
        found = dense(found)
        right = torch.zeros_like(found) if expected is None else expected
        worst.note(name, float((found - right).abs().max()) / max(float(right.abs().max()), scale))
    others = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.numel():
            worst.note(name, float((buffer.double() - others[name].double()).abs().max()))


def check(ranks: Ranks, name: str, stages: int, placement: tuple[int, ...], split: bool, seed: int = 0) -> None:
    captured = captured_case(ZOO[name])
    draw = random.Random(seed)
    cuts = sorted(draw.sample(legal_cuts(captured), stages - 1))
    recompute = [n for n in range(len(captured.layers)) if draw.random() < 0.3]
    for worst, where in ranks.run(worst_difference, name, cuts, placement, split, recompute, ranks=1 + max(placement)):
        assert worst < 1e-5, (where, cuts, recompute)


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("name", ["gpt2", "unet_inplace"])
def test_three_ranks(ranks: Ranks, name: str, split: bool) -> None:
    check(ranks, name, 3, (0, 1, 2), split)


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1)], ids=["v", "loop"])
def test_two_stages_on_each_of_two_ranks(ranks: Ranks, placement: tuple[int, ...], split: bool) -> None:
    check(ranks, "gpt2", 4, placement, split)
    check(ranks, "late_detached", 4, placement, split)


def test_a_frozen_stage_sends_no_gradient(ranks: Ranks) -> None:
    for worst, where in ranks.run(worst_difference, "lora", [2, 4], (0, 1, 2), True, [], ranks=3):
        assert worst < 1e-5, where


def test_ranks_sum_shared_parameters_in_one_order(ranks: Ranks) -> None:
    """An encoder that is called twice: the outer rank has its first layer first, the inner one its second."""
    check(ranks, "siamese", 4, (0, 1, 1, 0), split=False, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in ZOO.values() if not case.refused])
def test_the_whole_zoo_on_ranks(ranks: Ranks, name: str) -> None:
    most = len(legal_cuts(captured_case(ZOO[name]))) + 1
    check(ranks, name, min(most, 3), tuple(range(min(most, 3))), split=True)
    if most >= 4:
        check(ranks, name, 4, (0, 1, 1, 0), split=len(name) % 2 == 0, seed=1)
