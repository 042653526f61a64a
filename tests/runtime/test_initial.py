"""Models without weights become, tensor by tensor, what building them would have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopipe import without_weights
from autopipe.core.errors import FileError, ModelError
from autopipe.core.plan import Plan
from autopipe.runtime.capture import capture
from autopipe.runtime.capture.program import named_tensors
from autopipe.runtime.stages.initial import notes_of
from autopipe.runtime.stages.shards import Shards
from autopipe.runtime.workload import ModelFile
from tests.models import ZOO
from tests.runtime.planned import plan_of, zoo_file
from tests.runtime.ranks import Ranks

FAST = ("gpt2", "vit", "resnet", "lstm", "weight_norm", "spectral_norm")


def assert_made_alike(build: Any, seed: int = 3) -> None:
    """Every tensor, asked for from the last to the first, is the one that building makes."""
    model = without_weights(build, seed=seed)
    torch.manual_seed(seed)
    expected = named_tensors(build())
    assert list(named_tensors(model)) == list(expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    notes = notes_of(model)
    assert notes is not None
    for name, tensor in reversed(named_tensors(model).items()):
        assert torch.equal(notes.value(tensor) if tensor.is_meta else tensor, expected[name]), name


@pytest.mark.parametrize("name", FAST)
def test_values_are_bit_for_bit_those_of_building(name: str) -> None:
    assert_made_alike(ZOO[name].build_model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in FAST])
def test_values_of_the_whole_zoo_are_those_of_building(name: str) -> None:
    assert_made_alike(ZOO[name].build_model)


class Odd(nn.Module):
    """Initialises by orthogonal and truncated numbers, views, constants and draws outside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.randint(1, 5, ()))
        self.a, self.b = nn.Linear(7, 9), nn.Linear(9, 9)
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.5, a=-0.5, b=0.5)
        with torch.no_grad():
            self.a.bias[2:5].normal_()
            self.a.bias.mul_(torch.linspace(0, self.scale, 9))
            self.b.weight.data = self.b.weight.data.t().contiguous()
            self.b.bias.copy_(torch.arange(9.0))
        self.register_buffer("mask", torch.ones(3, 3).tril())
        self.c = nn.Parameter(torch.randn(4) + self.mask[0, 0])


def test_unusual_ways_to_initialise() -> None:
    assert_made_alike(Odd)


def test_building_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    without_weights(Odd)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_looks_at_its_weights_is_refused() -> None:
    class Looks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            assert self.weight.abs().max().item() < 1

    with pytest.raises(ModelError, match="cannot be built without its weights"):
        without_weights(Looks)


# ---------------------------------------------------------------------------- on ranks


def begun(plan: Plan, seed: int, checkpoint: str | None) -> dict[str, Any]:
    """On each rank: a model without weights, one step of it; what it holds."""
    workload = ModelFile(str(plan.model.path)).open()
    model = without_weights(ZOO[Path(str(plan.model.path)).stem].build_model, seed=seed)
    inputs, target = workload.batch(plan.global_batch)
    pipeline = plan.build(model, workload.loss_fn, example_inputs=inputs, example_target=target, checkpoint=checkpoint)
    first = pipeline.full_state_dict()
    made = {name: value.clone() for name, value in pipeline.state_dict().items()}
    loss = pipeline.step(**inputs, target=target) if isinstance(inputs, dict) else pipeline.step(*inputs, target=target)
    pipeline.evaluate(**inputs, target=target) if isinstance(inputs, dict) else pipeline.evaluate(
        *inputs, target=target
    )
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    still = sum(p.is_meta for p in model.parameters())
    return {"state": first, "own": made, "loss": float(loss), "gradients": gradients, "without": still}


@pytest.mark.parametrize(
    "name", ["resnet", "custom_function", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))]
)
def test_ranks_make_their_own_weights_and_train(ranks: Ranks, tmp_path: Path, name: str) -> None:
    plan = plan_of(zoo_file(tmp_path, name), 2, "1F1B")
    found = ranks.run(begun, plan, 5, None, ranks=2)
    torch.manual_seed(5)
    model = ZOO[name].build_model()
    assert list(found[0]["state"]) == list(model.state_dict())
    assert all(torch.equal(found[0]["state"][key], value) for key, value in model.state_dict().items())
    assert all(rank["without"] > 0 for rank in found)  # the other ranks' weights were never made
    workload = ModelFile(str(plan.model.path)).open()
    assert_gradients(found, model, workload.batch(plan.global_batch), name)


def assert_gradients(found: list[dict[str, Any]], model: nn.Module, batch: Any, name: str) -> None:
    (inputs, target), total = batch, 0.0
    for start in range(0, 8, 2):
        given = {k: v[start : start + 2] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs
        output = model(**given) if isinstance(inputs, dict) else model(*(v[start : start + 2] for v in inputs))
        loss = ZOO[name].loss_fn(output, target[start : start + 2]) / 4
        loss.backward()
        total += loss.item()
    assert found[0]["loss"] == pytest.approx(total, rel=1e-5)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    for rank in found:
        for key, value in rank["gradients"].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def test_shards_of_two_ranks_are_read_by_three(ranks: Ranks, tmp_path: Path) -> None:
    path = zoo_file(tmp_path, "own_attention")
    two, three = (plan_of(path, depth, "1F1B") for depth in (2, 3))
    saved = ranks.run(begun, two, 5, None, ranks=2)
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, rank in enumerate(saved):
        save_file(rank["own"], str(shards / f"rank-{number}.safetensors"))
    loaded = ranks.run(begun, three, 8, str(shards), ranks=3)  # under another seed: all is read
    assert all(torch.equal(loaded[0]["state"][key], value) for key, value in saved[0]["state"].items())
    assert loaded[0]["loss"] == pytest.approx(saved[0]["loss"], rel=1e-6)


def unfilled(plan: Plan, checkpoint: str | None) -> str:
    workload = ModelFile(str(plan.model.path)).open()
    with torch.device("meta"):
        model = ZOO["sequential"].build_model()
    inputs, _ = workload.batch(plan.global_batch)
    with pytest.raises(ModelError) as caught:
        plan.build(model, workload.loss_fn, example_inputs=inputs, checkpoint=checkpoint)
    return str(caught.value)


def test_what_has_no_value_is_named(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(zoo_file(tmp_path, "sequential"), 2, "1F1B")
    said = ranks.run(unfilled, plan, None, ranks=2)
    assert "0.weight is on the meta device" in said[0]
    assert "autopipe.without_weights(build_model), or give checkpoint=" in said[0]
    save_file({"0.weight": torch.zeros(8, 8), "0.bias": torch.zeros(3)}, str(tmp_path / "part.safetensors"))
    said = ranks.run(unfilled, plan, str(tmp_path / "part.safetensors"), ranks=2)
    assert "0.bias has shape (3,), the model's (8,)" in said[0]
    assert "the checkpoint lacks 6." in said[1]


def test_a_checkpoint_may_have_the_usual_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, str(tmp_path / "one.safetensors"))
    save_file({"b": torch.zeros(3)}, str(tmp_path / "two.safetensors"))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shards = Shards(tmp_path)
    assert shards["a"].tolist() == [1, 1]
    assert shards["b"].shape == (3,)
    assert "c" not in shards
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(FileError, match="no index of a checkpoint"):
        Shards(tmp_path)


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no \.safetensors file"):
        Shards(tmp_path)
    (tmp_path / "broken.safetensors").write_text("no")
    with pytest.raises(FileError, match=r"broken\.safetensors cannot be read"):
        Shards(tmp_path)
    with pytest.raises(FileError, match="cannot be read"):
        Shards(tmp_path / "missing.safetensors")


def test_the_capture_says_that_gradients_were_not_compared() -> None:
    case = ZOO["llama"]
    captured = capture(without_weights(case.build_model), case.example_batch(2)[0])
    assert any("gradients were not compared" in note for note in captured.notes)
