"""A user's own loop over a plan, against the same loop in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.plan import Plan
from autopipe.runtime.checking.parity import without_dropout
from autopipe.runtime.running.forms import repeated
from autopipe.runtime.workload import ModelFile, Workload, call, rows
from tests.runtime.ranks import Ranks
from tests.runtime.test_checking import EXAMPLES, plan_for

STEPS = 3
CLIP = 0.5


def _open(name: str) -> Workload:
    workload = ModelFile(str(EXAMPLES / name)).open()
    without_dropout(workload.model)
    return workload


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(plan: Plan, name: str) -> dict[str, Any]:
    """On each rank: a few clipped steps; what came out."""
    workload = _open(name)
    inputs, target = workload.batch(plan.global_batch)
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=inputs)
    optimizer = _optimizer(pipeline.parameters())
    losses, norms = [], []
    for _ in range(STEPS):
        loss = _call_step(pipeline.step, inputs, target)
        norms.append(float(pipeline.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    evaluated = float(_call_step(pipeline.evaluate, inputs, target))
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "state": pipeline.full_state_dict(),
        "own": list(pipeline.state_dict()),
        "training": workload.model.training,
    }


def _call_step(step: Any, inputs: Any, target: Any) -> torch.Tensor:
    result: torch.Tensor = step(**inputs, target=target) if isinstance(inputs, dict) else step(*inputs, target=target)
    return result


def train_in_one_process(plan: Plan, name: str) -> dict[str, Any]:
    workload = _open(name)
    model = workload.model
    batch = workload.batch(plan.global_batch)
    optimizer = _optimizer(model.parameters())
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(_accumulate(workload, batch, plan, backward=True))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        evaluated = _accumulate(workload, batch, plan, backward=False)
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "state": model.state_dict()}


def _accumulate(workload: Workload, batch: Any, plan: Plan, *, backward: bool) -> float:
    total = 0.0
    for start in range(0, plan.global_batch, plan.micro_batch):
        inputs, target = rows(batch, start, start + plan.micro_batch)
        loss = workload.loss_fn(call(workload.model, inputs), target) / plan.micro_batches
        if backward:
            loss.backward()
        total += float(loss.detach())
    return total


LOOPS = [("gpt2.py", 2, "1F1B"), ("llama.py", 3, "1F1B"), ("mlp.py", 2, "1F1B"), ("mlp.py", 2, "ZB-V")]


@pytest.mark.parametrize(("name", "depth", "schedule"), LOOPS)
def test_a_users_loop_trains_as_in_one_process(ranks: Ranks, name: str, depth: int, schedule: str) -> None:
    plan = plan_for(name, depth, schedule)
    found = ranks.run(train, plan, name, ranks=depth)
    expected = train_in_one_process(plan, name)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        assert rank["training"]
    state = found[0]["state"]
    assert list(state) == list(expected["state"])
    assert all(found[rank]["state"] == {} for rank in range(1, depth))
    for key, value in expected["state"].items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)
    assert {key for rank in found for key in rank["own"]} <= set(state)


def reload(plan: Plan, name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On each rank: take a whole model's state, give it back."""
    workload = _open(name)
    inputs, _ = workload.batch(plan.global_batch)
    pipeline = plan.build(workload.model, workload.loss_fn, example_inputs=inputs)
    pipeline.load_state_dict(state)
    full: dict[str, torch.Tensor] = pipeline.full_state_dict()
    return full


@pytest.mark.parametrize("depth", [2, 3])
def test_a_whole_checkpoint_loads_into_any_cut_and_comes_back_bit_equal(ranks: Ranks, depth: int) -> None:
    state = {key: torch.randn_like(value) for key, value in _open("gpt2.py").model.state_dict().items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    back = ranks.run(reload, plan_for("gpt2.py", depth, "1F1B"), "gpt2.py", state, ranks=depth)[0]
    assert list(back) == list(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def misuse(plan: Plan) -> list[str]:
    """On each rank: what wrong calls say."""
    workload = _open("mlp.py")
    inputs, target = workload.batch(plan.global_batch)
    pipeline = plan.build(workload.model, workload.loss_fn)
    said = []
    for wrong in (
        lambda: list(pipeline.parameters()),
        lambda: pipeline.step(*repeated(inputs, 8, 9), target=repeated(target, 8, 9)),
        lambda: pipeline.step(*inputs, target=target, extra=1),
    ):
        with pytest.raises(UsageError) as caught:
            wrong()
        said.append(str(caught.value))
    pipeline.step(*inputs, target=target)
    with pytest.raises(ModelError) as missing:
        pipeline.load_state_dict({})
    return [*said, str(missing.value)]


def test_misuse_is_told_before_anything_runs(ranks: Ranks) -> None:
    said = ranks.run(misuse, plan_for("mlp.py", 2, "1F1B"), ranks=2)[0]
    assert "example_inputs" in said[0]
    assert "the batch has 9 rows, the plan takes 1 to 8 (4 micro-batches of 2)" in said[1]
    assert "not both" in said[2]
    assert "lacks" in said[3]
