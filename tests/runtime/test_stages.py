"""Stages against eager mode, in one process; on ranks in test_stages_on_ranks.py."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopipe.core.errors import ModelError, UsageError
from autopipe.runtime.capture import capture
from autopipe.runtime.stages.modules import build_stages
from tests.models import ZOO, Case
from tests.runtime.chained import assert_trains_alike, captured_case, chained, eager, legal_cuts

CASES = [case for case in ZOO.values() if not case.refused]
FAST = [case for case in CASES if case.fast]
SLOW = [case for case in CASES if not case.fast]


def spread(cuts: list[int], stages: int) -> list[int]:
    """About equal stages."""
    wanted = min(stages, len(cuts) + 1)
    return sorted({cuts[(n * len(cuts)) // wanted] for n in range(1, wanted)})


def train_every_way(case: Case) -> None:
    captured = captured_case(case)
    cuts = legal_cuts(captured)
    assert cuts
    everything = range(len(captured.layers))
    assert_trains_alike(case, captured, [])
    assert_trains_alike(case, captured, spread(cuts, 2), recompute=everything)
    assert_trains_alike(case, captured, spread(cuts, 3), deferred=True, wait=True)
    assert_trains_alike(case, captured, cuts, deferred=True, recompute=list(everything)[::2])
    if not case.fixed:
        assert_trains_alike(case, captured, spread(cuts, 2), sizes=(1, 2, 3, 4, 8), steps=1)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_stages_train_like_the_model(case: Case) -> None:
    train_every_way(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_the_whole_zoo_trains_like_the_model(case: Case) -> None:
    train_every_way(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_cuts(case: Case) -> None:
    captured = captured_case(case)
    cuts, draw = legal_cuts(captured), random.Random(case.name)
    for _ in range(12):
        chosen = sorted(draw.sample(cuts, draw.randint(0, min(len(cuts), 4))))
        again = [n for n in range(len(captured.layers)) if draw.random() < 0.3]
        sizes = (4, 4) if case.fixed else tuple(draw.choices((1, 2, 3, 4, 8), k=2))
        assert_trains_alike(
            case, captured, chosen, steps=1, sizes=sizes, recompute=again, deferred=draw.random() < 0.5, wait=True
        )


@pytest.mark.parametrize("name", ["gpt2", "resnet", "ema_buffers", "custom_function"])
def test_state_has_the_models_names_and_is_the_models_own(name: str) -> None:
    captured = captured_case(ZOO[name])
    stages = build_stages(captured, legal_cuts(captured)[:3])
    whole = captured.model.state_dict()
    assert set(whole) == {key for stage in stages for key in stage.state_dict()}
    parameters = {id(parameter) for parameter in captured.model.parameters()}
    assert parameters == {id(parameter) for stage in stages for parameter in stage.parameters()}
    names = dict(captured.model.named_buffers())
    for stage in stages:
        assert all(names[key] is buffer for key, buffer in stage.named_buffers() if key in names)


def test_a_checkpoint_of_the_whole_model_loads_into_stages() -> None:
    case = ZOO["resnet"]
    captured = captured_case(case)
    stages = build_stages(captured, [2, 4])
    torch.manual_seed(7)
    other = case.build_model()
    for stage in stages:
        whole = other.state_dict()
        stage.load_state_dict({key: whole[key] for key in stage.state_dict()})
    batches = [case.example_batch(4)]
    assert chained(case, captured, stages, batches) == eager(case, other, batches)


def test_only_the_asked_stages_are_built() -> None:
    captured = captured_case(ZOO["gpt2"])
    (stage,) = build_stages(captured, [2, 4], only=[1])
    assert (stage.index, stage.start, stage.stop) == (1, 2, 4)
    assert not any(name.startswith("lm_head") for name, _ in stage.named_parameters())


@pytest.mark.parametrize("cuts", [[0], [8], [3, 2], [2, 2]])
def test_cuts_that_cannot_be_meant_are_refused(cuts: list[int]) -> None:
    captured = captured_case(ZOO["gpt2"])
    with pytest.raises(UsageError, match="cuts"):
        build_stages(captured, cuts)


class Torn(nn.Module):
    """Writes into one tensor from two blocks; the second writes after the first was read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.blocks[0](x)
        out[:, 0] = 0
        y = self.blocks[1](out.clone())
        out[:, 1] = y[:, 1]
        return self.blocks[2](out)


def test_a_cut_through_an_in_place_group_is_refused_with_the_reason() -> None:
    captured = capture(Torn(), (torch.randn(4, 8),))
    assert [layer.cut_after for layer in captured.layers] == [False, True, True]
    with pytest.raises(UsageError, match=r"layer 1 \(blocks.1\): .* in place"):
        build_stages(captured, [1])
    case = Case("torn", Torn, ZOO["sequential"].example_batch, ZOO["sequential"].loss_fn)
    assert_trains_alike(case, captured_case(case), [2])


def test_missing_tensors_are_named() -> None:
    captured = captured_case(ZOO["late_integer"])
    first, last = build_stages(captured, [2])
    with pytest.raises(ModelError, match="needs the model's input 'x'"):
        first()
    with pytest.raises(ModelError, match="receives 1 tensors, but got 0"):
        last(x=torch.randn(4, 8))


def test_a_fixed_size_is_enforced_on_stages() -> None:
    captured = captured_case(ZOO["batch_branch"])
    assert captured.micro_batch == 4
    (stage,) = build_stages(captured, [])
    captured.bind((torch.randn(8, 8),))
    with pytest.raises(ModelError, match=r"8 rows.* 4 only"):
        stage(**captured.bind((torch.randn(8, 8),)))
    with pytest.raises(ModelError, match=r"6 rows.* 4 only"):
        captured.bind((torch.randn(6, 8),))


def saved_by(stage: nn.Module, received: torch.Tensor, bound: dict[str, torch.Tensor]) -> tuple[set[int], torch.Tensor]:
    """The addresses of what a stage saves for its backward, parameters left out."""
    found: set[int] = set()
    own = {p.data_ptr() for p in stage.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (made,) = stage(received, **bound)
    return found - own, made


def test_the_receive_buffer_and_the_output_are_saved_without_copies() -> None:
    captured = captured_case(ZOO["sequential"])
    stage = build_stages(captured, [1, 3])[1]
    received = torch.randn(4, 8, requires_grad=True)
    saved, made = saved_by(stage, received, captured.bind((torch.randn(4, 8),)))
    assert received.untyped_storage().data_ptr() in saved
    assert made.untyped_storage().data_ptr() in saved  # tanh saves what it returns


def test_recomputation_keeps_only_the_inputs_of_a_layer() -> None:
    captured = captured_case(ZOO["gpt2"])
    bound = captured.bind({"input_ids": torch.zeros(4, 12, dtype=torch.long)})
    received = torch.randn(4, 12, 32, requires_grad=True)
    plain, again = (build_stages(captured, [2, 4], recompute=chosen)[1] for chosen in ((), (2, 3)))
    assert len(saved_by(plain, received, bound)[0]) > 20
    assert len(saved_by(again, received, bound)[0]) <= 4


def test_input_gradient_frees_what_the_weight_gradient_does_not_need() -> None:
    captured = captured_case(ZOO["sequential"])
    stage = build_stages(captured, [1, 4], deferred=True)[1]
    received = torch.randn(4, 8, requires_grad=True)
    (made,) = stage(received, **captured.bind((torch.randn(4, 8),)))
    made.backward(torch.ones_like(made))
    assert received.grad is not None
    assert all(parameter.grad is None for parameter in stage.parameters())
    work = stage.weight_backward()
    stage.weight_backward()()  # nothing is left
    assert all(parameter.grad is None for parameter in stage.parameters())
    work()
    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_a_parameter_with_a_hook_is_not_put_off() -> None:
    captured = captured_case(ZOO["sequential"])
    seen = []
    captured.model[2].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    stage = build_stages(captured, [], deferred=True)[0]
    (made,) = stage(**captured.bind((torch.randn(4, 8),)))
    made.sum().backward()
    assert seen == [captured.model[2].weight]


def test_a_stage_keeps_the_mode_that_it_was_captured_in() -> None:
    (stage,) = build_stages(captured_case(ZOO["sequential"]), [])
    stage.train()
    with pytest.raises(UsageError, match="captured in train mode: capture the model in eval mode"):
        stage.eval()


def test_a_module_kept_whole_moves_and_loads_with_its_stage() -> None:
    captured = captured_case(ZOO["moe_loop"])
    stage = build_stages(captured, [2])[1]
    assert stage.get_submodule("layers.1") is captured.model.get_submodule("layers.1")
    assert "layers.1.experts.2.weight" in stage.state_dict()


def test_no_grad_mode_survives_an_error_inside_a_stage() -> None:
    captured = captured_case(ZOO["modes"])
    (stage,) = build_stages(captured, [])
    with pytest.raises(RuntimeError):
        stage(x=torch.randn(4, 9))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_under_autocast_stages_are_those_of_autocast() -> None:
    case = ZOO["gpt2"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = captured_case(case)
        assert captured.edges[2].dtype == "float32"  # what a residual stream stays
        for deferred in (False, True):
            assert_trains_alike(case, captured, [1, 3, 6], deferred=deferred, steps=1, tolerance=1e-2)
