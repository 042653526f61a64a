"""Runs without a flush as a user makes them: schedulers, clipping, checkpoints in the middle, failing ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.core.errors import RankFailed
from autopipe.core.plan import Plan
from autopipe.runtime.own.pipemare import PipeMare
from autopipe.runtime.ranks import launch
from autopipe.runtime.workload import ModelFile, Workload, call, rows
from tests.runtime import recurrences
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import plan_for

SMALL = str(Path(__file__).with_name("small_mlp.py"))
UPDATES = 10


def _workload() -> Workload:
    torch.manual_seed(0)
    return ModelFile(SMALL).open()


def batches(workload: Workload, plan: Plan, count: int) -> list[Any]:
    """Different batches, the same on every rank."""
    whole, target = workload.batch(plan.global_batch * count)
    return [
        (rows(whole, n, n + plan.global_batch), rows(target, n, n + plan.global_batch))
        for n in range(0, plan.global_batch * count, plan.global_batch)
    ]


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def train(plan: Plan, runs: tuple[int, ...], again: Plan | None = None, **how: Any) -> dict[str, Any]:
    """On each rank: runs of so many updates; with ``again`` a new pipeline resumes before the last of them."""
    workload = _workload()
    feed = iter(batches(workload, plan, sum(runs)))
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=workload.batch(plan.global_batch)[0])
    optimizer = optimizer_for(pipeline.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    losses: list[float] = []
    begun = [name for name, _ in pipeline.named_parameters()]
    for number, updates in enumerate(runs):
        if again is not None and number == len(runs) - 1:
            saved = [pipeline.checkpoint(optimizer)]
            torch.distributed.broadcast_object_list(saved, 0)
            fresh = _workload()
            with torch.no_grad():
                for parameter in fresh.model.parameters():
                    parameter.zero_()
            pipeline = again.build(fresh.model, fresh.loss_fn, example_inputs=fresh.batch(plan.global_batch)[0])
            optimizer = optimizer_for(pipeline.parameters())
            state, scheduler = scheduler.state_dict(), torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
            scheduler.load_state_dict(state)
            pipeline.resume(optimizer, saved[0])
        losses += pipeline.train(feed, optimizer, updates=updates, scheduler=scheduler, **how)
    own = [name for name, _ in pipeline.named_parameters()]
    return {"losses": losses, "state": pipeline.full_state_dict(), "begun": begun, "own": own}


def expected(plan: Plan, stages: list[list[str]], runs: tuple[int, ...], **how: Any) -> tuple[Any, list[float]]:
    """The recurrence in one process, with the same learning rates, drained where the pipeline was."""
    workload, size = _workload(), plan.micro_batch
    whole = batches(workload, plan, sum(runs))
    parts = [
        [(rows(inputs, n, n + size), rows(target, n, n + size)) for n in range(0, plan.global_batch, size)]
        for inputs, target in whole
    ]
    schedulers: list[Any] = []

    def step(optimizers: Any) -> None:
        if not schedulers:
            schedulers.extend(torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in optimizers)
        for scheduler in schedulers:
            scheduler.step()

    losses = recurrences.train(
        plan.schedule.name,
        workload.model,
        stages,
        parts,
        lambda model, inputs, target: workload.loss_fn(call(model, inputs), target),
        optimizer_for,
        drained_after=tuple(sum(runs[:n]) for n in range(1, len(runs))),
        on_step=step,
        **how,
    )
    return workload.model.state_dict(), losses


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-5) for name, value in right.items())


def moved(plan: Plan, layers: int) -> Plan:
    """The plan with the last so many layers of its first stage in the second, or with −layers the other way."""
    first, second = plan.stages
    every, cut = (*first.layers, *second.layers), first.stop - layers
    first = dataclasses.replace(first, stop=cut, layers=every[:cut])
    second = dataclasses.replace(second, start=cut, layers=every[cut:])
    return dataclasses.replace(plan, stages=(first, second))


@pytest.mark.parametrize(("schedule", "layers"), [("PipeDream-2BW", 2), ("PipeMare", 2), ("PipeMare", -1)])
def test_a_run_is_resumed_in_the_middle(ranks: Ranks, schedule: str, layers: int) -> None:
    """Drain, save under the model's names, load under other cuts, refill: the recurrence with a flush in the middle.

    A layer that moves from the last stage to one with a delay brings no average of its changes: PipeMare's begins at 0.
    """
    plan = plan_for(SMALL, 2, schedule, micro_batches=2)
    runs = (6, 5)
    mitigation = PipeMare(annealing=20, decay=0.2) if schedule == "PipeMare" else None
    how = {"annealing": 20, "decay": 0.2} if mitigation else {}
    found = ranks.run(train, plan, runs, moved(plan, layers), ranks=2, mitigation=mitigation)
    stages = [rank["begun"] for rank in found]
    assert stages != [rank["own"] for rank in found]
    state, losses = expected(plan, stages, runs, moved=[rank["own"] for rank in found], **how)
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-4)
    assert same(found[0]["state"], state)
    assert list(found[0]["state"]) == list(state)


def test_clipping_takes_the_norms_that_have_come_along(ranks: Ranks) -> None:
    """A bound that no gradient reaches changes nothing; one that all reach bounds every update on every rank."""
    plan = plan_for(SMALL, 3, "PipeDream", micro_batches=1)
    free, loose, tight = (ranks.run(clipped, plan, max_norm, ranks=3) for max_norm in (None, 1e6, 1e-3))
    assert [rank["own"] for rank in loose] == [rank["own"] for rank in free]
    assert tight[0]["own"] != free[0]["own"]
    for rank in range(3):
        for update, (own, used) in enumerate(zip(tight[rank]["own"], tight[rank]["used"], strict=True)):
            newest = [tight[other]["before"][_newest(rank, other, update)] if _newest(rank, other, update) >= 0 else 0.0
                      for other in range(3)]  # fmt: skip
            norm = math.sqrt(sum(value**2 for value in newest))
            assert used == pytest.approx(norm, rel=1e-4)
            assert own <= 1e-3 * (1 + 1e-4)


def _newest(rank: int, other: int, update: int) -> int:
    """Of which update the newest norm of another stage is, at a stage's step: of later stages the same one.

    Stage r steps in update u when it has run its forwards up to j = u + (p − r) − 1, or the last. An earlier stage s
    sent j on after its backward j − (p − s), which before draining is u − 1 − (r − s), and its norm came along.
    """
    batch = min(update + (3 - rank) - 1, UPDATES - 1)
    return update if other >= rank else batch - (3 - other)


def clipped(plan: Plan, max_norm: float | None) -> dict[str, list[float]]:
    """On each rank: its gradient's norm in every update before and after clipping, and the norm that was used."""
    workload = _workload()
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=workload.batch(plan.global_batch)[0])
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-9)
    seen: dict[str, list[float]] = {"own": [], "used": [], "before": []}
    optimizer.register_step_pre_hook(lambda *_: seen["own"].append(_norm(pipeline)))
    from autopipe.runtime.own.norms import Norms

    clip = Norms.clip

    def noted(self: Norms, weights: Any, *, flushed: bool) -> float:
        seen["before"].append(_norm(pipeline))
        seen["used"].append(clip(self, weights, flushed=flushed))
        return seen["used"][-1]

    Norms.clip = noted  # type: ignore[method-assign]
    try:
        pipeline.train(batches(workload, plan, UPDATES), optimizer, max_norm=max_norm)
    finally:
        Norms.clip = clip  # type: ignore[method-assign]
    return seen


def _norm(pipeline: Any) -> float:
    return float(torch.stack([p.grad.square().sum() for p in pipeline.parameters() if p.grad is not None]).sum().sqrt())


def fail(plan: Plan, how: str, pids: str) -> None:
    """On each rank: train, and on the second one fail in the middle."""
    Path(pids, str(torch.distributed.get_rank())).write_text(str(os.getpid()))
    workload = _workload()
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=workload.batch(plan.global_batch)[0])
    optimizer = optimizer_for(pipeline.parameters())
    if torch.distributed.get_rank() == 1:
        optimizer.register_step_post_hook(lambda *_: _misbehave(how, optimizer, pids))
    pipeline.train(iter(batches(workload, plan, 1) * 2000), optimizer, updates=2000)


def _misbehave(how: str, optimizer: Any, pids: str) -> None:
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps == 7:
        Path(pids, "failed").write_text(str(time.time()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom in update 7")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [("raise", "rank 1 failed: ValueError: boom in update 7"), ("kill", "rank 1 was killed by SIGKILL")],
)
def test_a_failing_rank_ends_the_run_with_its_error_first(how: str, text: str, tmp_path: Path) -> None:
    plan = plan_for(SMALL, 3, "PipeDream", micro_batches=1)
    with pytest.raises(RankFailed, match=text):
        launch.launch(fail, (plan, how, str(tmp_path)), ranks=3, timeout_s=60)
    assert time.time() - float((tmp_path / "failed").read_text()) < 30  # not by the time-out
    for file in tmp_path.glob("[0-2]"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
