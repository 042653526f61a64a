"""Around a plan's steps: accumulation, checkpoints between cuts, mixed precision, batches as they come, predictions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.plan import Plan
from autopipe.runtime.checking.parity import difference, largest, largest_magnitude
from autopipe.runtime.running import forms
from autopipe.runtime.running.pipeline import MOST_FORMS, Pipeline
from autopipe.runtime.running.shares import pieces, shares
from autopipe.runtime.workload import Inputs, ModelFile, Workload, call, rows
from tests.runtime.planned import plan_of, zoo_file
from tests.runtime.ranks import Ranks


def opened(plan: Plan) -> Workload:
    return ModelFile(str(plan.model.path)).open()


def built(plan: Plan, workload: Workload) -> Pipeline:
    inputs, target = workload.batch(plan.global_batch)
    return plan.build(workload.model, workload.loss_fn, example_inputs=inputs, example_target=target)


def step(pipeline: Pipeline, batch: tuple[Inputs, Any]) -> torch.Tensor:
    inputs, target = batch
    return pipeline.step(**inputs, target=target) if isinstance(inputs, dict) else pipeline.step(*inputs, target=target)


def step_alone(plan: Plan, workload: Workload, batch: tuple[Inputs, Any], size: int) -> float:
    """The same in one process: share × loss of each micro-batch, in order."""
    cuts, total = pieces(size, plan.micro_batch), 0.0
    for cut, share in zip(cuts, shares(plan.reduction, *batch, cuts), strict=True):
        inputs, target = rows(batch, *cut)
        loss = workload.loss_fn(call(workload.model, inputs), target) * share
        loss.backward()
        total += float(loss.detach())
    return total


def batch_of(workload: Workload, size: int, seed: int) -> tuple[Inputs, Any]:
    torch.manual_seed(seed)
    return workload.example_batch(size)


def worst(pipeline: Pipeline, reference: nn.Module) -> float:
    """The largest relative difference of this rank's gradients, and those that only one has."""
    expected = {name: p.grad for name, p in reference.named_parameters()}
    most = largest_magnitude(expected.values())
    return largest(difference(p.grad, expected[name], most) for name, p in pipeline.named_parameters())


# ---------------------------------------------------------------------------- accumulation, short batches


def accumulated(plan: Plan, sizes: list[int]) -> list[float]:
    """On each rank: differences of losses and gradients after each of several steps without clearing."""
    workload, alone = opened(plan), opened(plan)
    pipeline = built(plan, workload)
    found = []
    for seed, size in enumerate(sizes):
        batch = batch_of(workload, size, seed)
        loss, expected = float(step(pipeline, batch)), step_alone(plan, alone, batch, size)
        found.append(largest((abs(loss - expected) / abs(expected), worst(pipeline, alone.model))))
    return found


@pytest.mark.parametrize(
    ("name", "schedule", "replicas"),
    [
        ("gpt2", "1F1B", 1),
        ("uneven_tokens", "ZB-H1", 1),
        ("summed", "GPipe", 2),
        pytest.param("gpt2", "GPipe", 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_accumulate_over_whole_and_short_batches(
    ranks: Ranks, tmp_path: Path, name: str, schedule: str, replicas: int
) -> None:
    plan = plan_of(zoo_file(tmp_path, name), 2, schedule, replicas=replicas)
    sizes = [8 * replicas, 5, 8 * replicas, 1, 2]
    for rank in ranks.run(accumulated, plan, sizes, ranks=2 * replicas):
        assert largest(rank) < 1e-5, rank


def test_a_model_of_one_micro_batch_size_names_the_sizes_it_takes(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(zoo_file(tmp_path, "batch_branch"), 2, "1F1B", micro_batch=4, micro_batches=2)
    said = ranks.run(refused_sizes, plan, [6, 9, 4], ranks=2)[0]
    assert "runs in micro-batches of 4 only: give a multiple of 4, up to 8" in said[0]
    assert "the batch has 9 rows, the plan takes 1 to 8" in said[1]
    assert said[2] == ""


def refused_sizes(plan: Plan, sizes: list[int]) -> list[str]:
    workload = opened(plan)
    pipeline = built(plan, workload)
    said = []
    for size in sizes:
        try:
            step(pipeline, batch_of(workload, size, 0))
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


# ---------------------------------------------------------------------------- other forms of batches


def lengths(plan: Plan) -> tuple[list[float], str]:
    """On each rank: differences for sequences of other lengths, and what one length too many says."""
    workload, alone = opened(plan), opened(plan)
    pipeline = built(plan, workload)
    found = []
    for length in (12, 7, 9, 12, 7):
        inputs, target = batch_of(workload, plan.global_batch, length)
        batch = ({"input_ids": inputs["input_ids"][:, :length]}, target[:, :length])
        step(pipeline, batch)
        step_alone(plan, alone, batch, plan.global_batch)
        found.append(worst(pipeline, alone.model))
    return found, one_length_too_many(pipeline, inputs["input_ids"], target)


def one_length_too_many(pipeline: Pipeline, tokens: torch.Tensor, target: torch.Tensor) -> str:
    for length in range(1, MOST_FORMS + 1):
        try:
            step(pipeline, ({"input_ids": tokens[:, :length]}, target[:, :length]))
        except UsageError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_other_sequence_lengths_are_captured_once_each_up_to_a_limit(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(zoo_file(tmp_path, "gpt2"), 2, "1F1B")
    for found, said in ranks.run(lengths, plan, ranks=2):
        assert largest(found) < 1e-5
        assert "pad to" in said
        assert "['input_ids'] int64 (·, 7)" in said


def unlike(plan: Plan) -> str:
    workload = opened(plan)
    pipeline = built(plan, workload)
    with pytest.raises(UsageError) as caught:
        step(pipeline, batch_of(workload, 6 + dist.get_rank(), 0))
    return str(caught.value)


def test_ranks_that_are_given_unlike_batches_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(zoo_file(tmp_path, "sequential"), 2, "1F1B")
    said = ranks.run(unlike, plan, ranks=2)
    assert "rank 0 was given 6 rows" in said[0]
    assert "rank 1 7 rows" in said[0]
    assert "the whole global batch" in said[1]


def alone_with_it(plan: Plan) -> str:
    """Rank 1 goes on as before while rank 0 has a short batch: rank 0 must say so, not hang."""
    forms.WAIT_S = 3.0
    workload = opened(plan)
    pipeline = built(plan, workload)
    if dist.get_rank():
        dist.barrier()
        return ""
    with pytest.raises(UsageError) as caught:
        step(pipeline, batch_of(workload, 5, 0))
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_waits_for_others_says_so(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(zoo_file(tmp_path, "sequential"), 2, "1F1B")
    assert "nothing new within 3 s" in ranks.run(alone_with_it, plan, ranks=2)[0]


# ---------------------------------------------------------------------------- checkpoints


def _optimizer(named: Any) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW in two groups, as most trainers have it, with a schedule of the learning rate."""
    named = list(named)
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def trained(plan: Plan, state: dict[str, Any] | None, steps: list[int]) -> dict[str, Any]:
    """On each rank: load, some steps, what came out."""
    workload = opened(plan)
    pipeline = built(plan, workload)
    optimizer, scheduler = _optimizer(pipeline.named_parameters())
    if state is not None:
        state = copy.deepcopy(state)  # the ranks were handed one piece of shared memory
        pipeline.load_state_dict(state["model"])
        pipeline.load_optimizer_state_dict(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for seed in steps:
        step(pipeline, batch_of(workload, plan.global_batch, seed))
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    inputs, _ = batch_of(workload, plan.global_batch, 99)
    return {
        "model": pipeline.full_state_dict(),
        "optimizer": pipeline.full_optimizer_state_dict(optimizer),
        "scheduler": scheduler.state_dict(),
        "logits": pipeline.predict(**inputs),
    }


def trained_alone(plan: Plan, state: dict[str, Any] | None, steps: list[int]) -> dict[str, Any]:
    workload = opened(plan)
    model = workload.model
    optimizer, scheduler = _optimizer(model.named_parameters())
    if state is not None:
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for seed in steps:
        step_alone(plan, workload, batch_of(workload, plan.global_batch, seed), plan.global_batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    inputs, _ = batch_of(workload, plan.global_batch, 99)
    with torch.no_grad():
        outputs = [model.eval()(**rows(inputs, *cut)).logits for cut in pieces(plan.global_batch, plan.micro_batch)]
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "logits": outputs}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in flat(item, f"{path}/{name}").items()}
    return {path: value}


def assert_bit_equal(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert list(found) == list(expected)
    for path, value in expected.items():
        same = torch.equal(found[path], value) if isinstance(value, torch.Tensor) else found[path] == value
        assert same, path


def test_a_checkpoint_of_two_ranks_goes_on_on_three_and_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    path = zoo_file(tmp_path, "gpt2")
    two, three = (plan_of(path, depth, "1F1B") for depth in (2, 3))
    saved = ranks.run(trained, two, None, [0, 1], ranks=2)[0]
    assert list(saved["model"]) == list(opened(two).model.state_dict())
    loaded = ranks.run(trained, three, saved, [], ranks=3)
    assert_bit_equal(loaded[0], saved)  # parameters, optimizer state, schedule, logits
    assert loaded[1]["model"] == loaded[2]["optimizer"] == {}
    alone = trained_alone(two, saved, [])
    assert_bit_equal(alone["model"], saved["model"])
    assert torch.equal(torch.cat(alone["logits"]), saved["logits"].logits)
    known = alone["optimizer"]["state"]
    assert set(saved["optimizer"]["state"]) == set(known)
    for name, values in saved["optimizer"]["state"].items():
        assert_bit_equal(values, known[name])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_goes_on_as_if_it_had_not_been_moved(ranks: Ranks, tmp_path: Path, replicas: int) -> None:
    path = zoo_file(tmp_path, "gpt2")
    plan = plan_of(path, 2, "1F1B", replicas=replicas)
    first = ranks.run(trained, plan, None, [0, 1], ranks=plan.depth * replicas)[0]
    second = ranks.run(trained, plan_of(path, 3, "ZB-H1", micro_batches=4 * replicas), first, [2, 3], ranks=3)[0]
    expected = trained_alone(plan, None, [0, 1, 2, 3])
    for name, value in expected["model"].items():
        # 1 % of one step's change: Adam makes steps of rounding where a gradient is zero in theory, as of a key's bias
        torch.testing.assert_close(second["model"][name], value, rtol=1e-3, atol=1e-4)
    assert second["optimizer"]["param_groups"][0]["lr"] == expected["optimizer"]["param_groups"][0]["lr"]


def wrong_states(plan: Plan) -> list[str]:
    workload = opened(plan)
    pipeline = built(plan, workload)
    optimizer, _ = _optimizer(pipeline.named_parameters())
    state = pipeline.optimizer_state_dict(optimizer)
    fewer = {"state": {}, "param_groups": [group | {"params": []} for group in state["param_groups"]]}
    said = []
    for wrong in (fewer, {"state": {}, "param_groups": state["param_groups"][:1]}):
        with pytest.raises(ModelError) as caught:
            pipeline.load_optimizer_state_dict(optimizer, wrong)
        said.append(str(caught.value))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    with pytest.raises(UsageError) as strange:
        pipeline.optimizer_state_dict(other)
    return [*said, str(strange.value)]


def test_states_that_do_not_fit_are_told(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(wrong_states, plan_of(zoo_file(tmp_path, "sequential"), 2, "1F1B"), ranks=2)[0]
    assert "lacks 0.weight" in said[0]
    assert "has 1 parameter groups, the optimizer 2" in said[1]
    assert "shape (3,) that is not this rank's" in said[2]


# ---------------------------------------------------------------------------- mixed precision


def mixed(plan: Plan, *, bf16: bool) -> tuple[float, float, str]:
    """On each rank: the loss's and the gradients' difference from one process, and the dtype of a boundary."""
    workload, alone = opened(plan), opened(plan)
    if bf16:
        workload.model.bfloat16()
        alone.model.bfloat16()
    pipeline = built(plan, workload)
    batch = batch_of(workload, plan.global_batch, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not bf16):
        loss = float(step(pipeline, batch))
        expected = step_alone(plan, alone, batch, plan.global_batch)
    runner = list(pipeline._runners.values())[-1]
    boundary = runner.modules[0].sends[0].dtype if runner.modules[0].sends else runner.modules[0].receives[0].dtype
    return abs(loss - expected) / abs(expected), worst(pipeline, alone.model), boundary


@pytest.mark.parametrize(("name", "boundary"), [("gpt2", "float32"), ("sequential", "bfloat16"), ("unet", "bfloat16")])
def test_autocast_around_a_step_is_that_of_one_process(ranks: Ranks, tmp_path: Path, name: str, boundary: str) -> None:
    for loss, gradient, dtype in ranks.run(_autocast, plan_of(zoo_file(tmp_path, name), 2, "1F1B"), ranks=2):
        assert loss < 1e-5
        assert gradient < 2e-2
        assert dtype == boundary


def _autocast(plan: Plan) -> tuple[float, float, str]:
    return mixed(plan, bf16=False)


def _bf16(plan: Plan) -> tuple[float, float, str]:
    return mixed(plan, bf16=True)


def test_a_bf16_model_trains_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    for loss, gradient, dtype in ranks.run(_bf16, plan_of(zoo_file(tmp_path, "llama"), 2, "1F1B"), ranks=2):
        assert loss < 2e-2
        assert gradient < 2e-2
        assert dtype == "bfloat16"


# ---------------------------------------------------------------------------- outputs


def predicted(plan: Plan, size: int) -> Any:
    workload = opened(plan)
    pipeline = built(plan, workload)
    inputs, _ = batch_of(workload, size, 5)
    return pipeline.predict(**inputs) if isinstance(inputs, dict) else pipeline.predict(*inputs)


@pytest.mark.parametrize(
    ("name", "size", "replicas"),
    [("gpt2_labels", 8, 1), ("dict_output", 5, 1), ("resnet", 11, 2), ("late_integer", 1, 1)],
)
def test_outputs_are_gathered_in_order(ranks: Ranks, tmp_path: Path, name: str, size: int, replicas: int) -> None:
    plan = plan_of(zoo_file(tmp_path, name), 2, "1F1B", replicas=replicas)
    found = ranks.run(predicted, plan, size, ranks=2 * replicas)
    assert all(other is None for other in found[1:])
    workload = opened(plan)
    inputs, _ = batch_of(workload, size, 5)
    with torch.no_grad():
        expected = call(workload.model.eval(), inputs)
    expected = {"out": expected} if isinstance(expected, torch.Tensor) else dict(expected)
    given = {"out": found[0]} if isinstance(found[0], torch.Tensor) else dict(found[0])
    expected.pop("cache", None)  # an object of a type of its own
    assert list(given) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(given[key], value, rtol=1e-5, atol=1e-6)
