"""What a capture finds in a model, what it refuses, and that it leaves the model alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopipe.core.errors import CaptureError, ModelError
from autopipe.runtime.capture import capture, tracing
from autopipe.runtime.capture.program import aten
from autopipe.runtime.measuring.profiling import capture_checked
from autopipe.runtime.stages.modules import build_stages
from tests.models import ZOO, Case, sequential, vector_batch
from tests.runtime.chained import assert_trains_alike, captured_case, legal_cuts
from tests.runtime.twins import opened


def edges(captured: Any) -> list[tuple[int | None, tuple[int, ...], tuple[int | str, ...], str, bool]]:
    return [(e.producer, e.consumers, e.shape, e.dtype, e.needs_gradient) for e in captured.edges]


# ---------------------------------------------------------------------------- layers, edges, ties


def test_gpt2_is_its_blocks_and_one_value_between_them() -> None:
    captured = captured_case(ZOO["gpt2_labels"])
    names = ["wte", "wpe", *(f"h.{n}" for n in range(4)), "ln_f"]
    assert [layer.name for layer in captured.layers] == [*(f"transformer.{name}" for name in names), "lm_head"]
    blocks = [layer.structure for layer in captured.layers[2:6]]
    assert len(set(blocks)) == 1
    assert len({layer.structure for layer in captured.layers}) == 5
    hidden = [((n), (n + 1,), ("b", 12, 32), "float32", True) for n in range(7)]
    assert edges(captured)[2:] == hidden  # positions and masks are made again, views are sunk
    assert captured.ties[0].layers == (0, 7)
    assert captured.dtype == "float32"
    assert captured.micro_batch is None
    assert captured.notes == ()


def test_inputs_are_edges_without_a_producer() -> None:
    captured = captured_case(ZOO["late_integer"])
    assert edges(captured)[:2] == [
        (None, (0,), ("b", 8), "float32", False),
        (None, (4,), ("b",), "int64", False),
    ]


def test_relayed_values_cross_every_cut_up_to_their_last_reader() -> None:
    captured = captured_case(ZOO["unet"])
    skips = [edge for edge in captured.edges if len(edge.consumers) > 1 and edge.producer is not None]
    assert len(skips) == 2
    for cut in range(1, len(captured.layers)):
        expected = [e for e in captured.edges if e.producer is not None and e.producer < cut <= e.consumers[-1]]
        assert list(captured.crossing(cut)) == expected


def test_encoder_output_and_position_bias_of_t5_are_relayed() -> None:
    captured = captured_case(ZOO["t5"])
    decoder = next(n for n, layer in enumerate(captured.layers) if layer.name.startswith("decoder.block"))
    assert {edge.shape for edge in captured.crossing(decoder + 1)} >= {("b", 12, 32), (12, 12, 4)}


def test_a_boundary_without_gradient_says_so() -> None:
    captured = captured_case(ZOO["lora"])
    flags = [edge.needs_gradient for edge in captured.edges if edge.producer is not None]
    assert flags == [False, False, True, True, True]
    assert captured.layers[0].trainable_bytes == 0
    assert captured.layers[0].parameter_bytes == (8 * 8 + 8) * 4


def test_structure_tells_models_apart() -> None:
    digests = {captured_case(ZOO[name]).structure for name in ("gpt2", "gpt2_labels", "gpt2_untied", "sequential")}
    assert len(digests) == 4
    assert captured_case(ZOO["gpt2"]).structure == captured_case(ZOO["gpt2"], seed=3, batch=2).structure


def test_transformers_attention_is_that_of_eager_mode() -> None:
    captured = captured_case(ZOO["llama"])
    attention = [n for n in captured.program.operations() if n.target is aten.scaled_dot_product_attention.default]
    assert len(attention) == 4
    for node in attention:
        assert node.kwargs.get("is_causal") or node.args[5]
        assert len(node.args) < 4 or node.args[3] is None


def test_bf16_is_bit_identical() -> None:
    torch.manual_seed(0)
    case = ZOO["llama"]
    model = case.build_model().bfloat16()
    inputs, target = case.example_batch(3)
    captured = capture(model, inputs, loss=lambda output: case.loss_fn(output, target))
    expected = model(**inputs).logits
    (stage,) = build_stages(captured, [])
    assert torch.equal(captured.unflatten(stage(**captured.bind(inputs))).logits, expected)


def test_a_frozen_backbone_under_no_grad_is_cut_like_the_rest() -> None:
    captured = captured_case(ZOO["modes"])
    assert [layer.name for layer in captured.layers][:2] == ["backbone.0", "backbone.2"]
    assert len(legal_cuts(captured)) == 5
    assert {edge.dtype for edge in captured.edges} == {"float32", "bfloat16"}


# ---------------------------------------------------------------------------- inputs and outputs


def test_bind_takes_any_batch_size_and_names_what_does_not_fit() -> None:
    captured = captured_case(ZOO["dict_output"])
    good = {"x": torch.randn(7, 8), "scale": 1.5, "flag": False}
    assert list(captured.bind(good)) == ["x"]
    for bad, message in [
        ({**good, "x": torch.randn(7, 9)}, r"x has shape \(7, 9\), .* with \(4, 8\)"),
        ({**good, "x": torch.randn(7, 8).double()}, "x has dtype torch.float64, .* torch.float32"),
        ({**good, "x": "text"}, "x is a str"),
        ({**good, "scale": 2.0}, "scale is 2.0, .* with 1.5"),
        ({**good, "more": 1}, "nested in another way .*flag, scale, x"),
    ]:
        with pytest.raises(ModelError, match=message):
            captured.bind(bad)
    with pytest.raises(ModelError, match="disagree on the batch size"):
        captured_case(ZOO["two_towers"]).bind((torch.randn(2, 8), torch.randn(3, 8)))


def test_inputs_without_a_common_batch_are_refused() -> None:
    with pytest.raises(ModelError, match="batch"):
        capture(ZOO["two_towers"].build_model(), (torch.randn(2, 8), torch.randn(3, 8)))
    with pytest.raises(ModelError, match="no tensor"):
        capture(sequential(), ())


class Nested(nn.Module):
    """Tensors inside dicts and tuples, a keyword-only scalar, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: dict[str, Any], *, factor: float, kind: str | None = None) -> Output:
        x = batch["pair"][0] - batch["pair"][1]
        for block in self.blocks:
            x = torch.tanh(block(x)) * factor
        return Output(x, kind)


@dataclasses.dataclass
class Output:
    """What Nested returns."""

    hidden: torch.Tensor
    kind: str | None


def test_nested_keyword_inputs_and_dataclass_outputs() -> None:
    case = Case(
        "nested",
        Nested,
        lambda n: (
            {"batch": {"pair": (torch.randn(n, 8), torch.randn(n, 8))}, "factor": 0.5, "kind": "k"},
            torch.randn(n, 8),
        ),
        lambda output, target: F.mse_loss(output.hidden, target),
    )
    captured = captured_case(case)
    assert list(captured.bind(case.example_batch(2)[0])) == ["batch_pair_0", "batch_pair_1"]
    assert_trains_alike(case, captured, [1, 2])
    stages = build_stages(captured, [])
    output = captured.unflatten(stages[0](**captured.bind(case.example_batch(2)[0])))
    assert isinstance(output, Output)
    assert output.kind == "k"


def test_outputs_that_no_loss_reads_are_not_carried_along() -> None:
    case = ZOO["gpt2_labels"]
    model = case.build_model()
    model.config.output_hidden_states = True
    inputs, _ = case.example_batch(4)
    captured = capture(model, inputs, loss=lambda output: output.loss)
    first, last = build_stages(captured, [4])
    assert len(first.sends) == 1
    bound = captured.bind(inputs)
    output = captured.unflatten(last(*first(**bound), **bound))
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert output.loss.dim() == 0
    assert output.logits.shape == (4, 12, 61)
    assert all(hidden is None for hidden in output.hidden_states[:-1])
    everything = capture(model, inputs)
    assert len(everything.crossing(4)) == 3  # without a loss, all outputs count


def test_an_example_of_one_row_serves_all_sizes() -> None:
    case = ZOO["llama"]
    captured = captured_case(case, batch=1)
    assert captured.micro_batch is None
    assert_trains_alike(case, captured, [2], sizes=(1, 5), steps=1)


def test_evaluation_mode_is_its_own_capture() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)).eval()
    inputs, _ = vector_batch(4)
    captured = capture(model, inputs)
    before = copy.deepcopy(model.state_dict())
    first, last = build_stages(captured, [1])
    assert not first.training
    other = torch.randn(3, 8)
    assert torch.equal(last(*first(**captured.bind((other,))))[0], model(other))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert captured.structure != capture(model.train(), inputs).structure


# ---------------------------------------------------------------------------- the model is left alone


class Counting(nn.Module):
    """Keeps a count, a list and the last activation as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.linear(x)
        self.losses.append(self.last.mean())
        return torch.tanh(self.last)


def test_capture_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(Counting(), nn.BatchNorm1d(8), Counting())
    gradient = torch.ones(8, 8)
    model[0].linear.weight.grad = gradient
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    captured = capture(model, (torch.randn(4, 8),))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model[0].linear.weight.grad is gradient
    assert model[2].linear.weight.grad is None
    assert torch.equal(state, torch.get_rng_state()) is False  # torch.randn above drew
    assert model[0].calls == 0
    assert model[0].losses == []
    assert not hasattr(model[0], "last")
    assert captured.notes == (
        "forward changes 0.calls, 0.losses, 2.calls, …: stages do not repeat changes of plain Python attributes",
    )


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet"])
def test_nothing_of_a_model_stays_behind_when_it_is_dropped(name: str) -> None:
    """A hook that holds more than it needs keeps a model's weights for ever: torch's own nodes hide the ring."""
    case = ZOO[name]
    model = case.build_model()
    seen = [weakref.ref(parameter) for parameter in model.parameters()]
    inputs, target = case.example_batch(2)
    captured = capture(model, inputs, loss=lambda output: case.loss_fn(output, target))
    assert len(captured.layers) > 1
    del model, captured
    gc.collect()
    assert not any(one() is not None for one in seen)


def test_capture_draws_no_random_numbers_of_the_user() -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), (torch.randn(4, 8),)
    state = torch.get_rng_state()
    capture(model, inputs)
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------------------- kept whole, refused, checked


@pytest.mark.parametrize("name", [case.name for case in ZOO.values() if case.whole])
def test_what_cannot_be_exported_is_kept_whole(name: str) -> None:
    case = ZOO[name]
    captured = captured_case(case)
    assert f"kept whole: {', '.join(case.whole)} (" in captured.notes[0]
    whole = [layer.name for layer in captured.layers if not layer.can_split_backward]
    assert whole == list(case.whole)


@pytest.mark.parametrize("name", [case.name for case in ZOO.values() if case.refused])
def test_a_refusal_names_file_and_line(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"tests/{ZOO[name].refused}\d+: .* sub-module"):
        captured_case(ZOO[name])


class Doubled(torch.autograd.Function):
    """Passes the doubled gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


class InRoot(nn.Module):
    """A custom function in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Doubled.apply(self.first(x)))


def test_wrong_gradients_are_noticed_and_refused_with_the_place() -> None:
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: .*first.weight has another gradient: off by"):
        capture(InRoot(), (torch.randn(4, 8),))


def test_a_wrong_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(program: Any) -> None:
        for node in program.operations():
            if node.target is aten.batch_norm.default:
                node.args = (*node.args[:6], 0.5, *node.args[7:])

    monkeypatch.setattr(tracing, "clean", spoilt)
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (torch.randn(4, 8),))
    assert "other results: 1.running_mean is another buffer" in captured.notes[0]


class Broken(nn.Module):
    """Raises by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ torch.zeros(9, 9)


def test_a_model_that_fails_by_itself_is_told_with_its_line() -> None:
    with pytest.raises(ModelError, match=r"test_capture.py:\d+: Broken fails on the example: RuntimeError"):
        capture(Broken(), (torch.randn(4, 8),))


def test_a_branch_on_the_batch_size_gives_one_size() -> None:
    captured = captured_case(ZOO["batch_branch"])
    assert captured.micro_batch == 4
    assert captured.notes == ("the model branches on the batch size: captured for micro-batches of 4 only",)
    assert captured.edges[1].shape == (4, 8)


def test_what_the_model_recomputes_stays_recomputed() -> None:
    assert captured_case(ZOO["llama_checkpointed"]).checkpointed == {1, 2, 3, 4}
    for name in ("checkpoint_reentrant", "checkpoint_non_reentrant"):
        captured = captured_case(ZOO[name])
        assert captured.notes == ()
        assert captured.checkpointed == set(range(1, len(captured.layers) - 1))


# ---------------------------------------------------------------------------- parameters without memory


def test_a_model_on_the_meta_device_is_captured_like_a_real_one() -> None:
    case = ZOO["llama"]
    real = captured_case(case)
    model = case.build_model()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"))
    inputs, target = case.example_batch(4)
    captured = capture(model, inputs, loss=lambda output: case.loss_fn(output, target))
    assert captured.structure == real.structure
    assert captured.edges == real.edges
    assert captured.layers == real.layers
    assert "meta device" in captured.notes[0]
    stages = build_stages(captured, [2, 4])
    assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
    assert {id(p) for p in model.parameters()} == {id(p) for stage in stages for p in stage.parameters()}


@pytest.mark.slow
def test_seventy_billion_parameters_are_captured_in_little_memory() -> None:
    import resource

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture(model, {"input_ids": torch.zeros(2, 4096, dtype=torch.long)}, loss=lambda o: o.logits.sum())
    cuts = [len(captured.layers) * n // 8 for n in range(1, 8)]
    assert len(build_stages(captured, cuts)) == 8
    assert sum(layer.parameters for layer in captured.layers) == 70_553_706_496
    assert len({layer.structure for layer in captured.layers}) <= 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20  # KiB


class Branches(nn.Module):
    """Decides by a value: in an if, or in the number of turns of a loop."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "if" and x.sum() > 0:
            x = x * 2
        for _ in range(int(x.abs().max().item()) if self.how == "loop" else 0):
            x = x + 1
        return self.second(x)


@pytest.mark.parametrize("how", ["if", "loop"])
def test_a_decision_by_values_is_told_in_our_words(how: str) -> None:
    words = "an if, a loop or a size depends on the values in a tensor"
    with pytest.raises(CaptureError, match=rf"test_capture\.py:\d+: Branches cannot be captured \({words}\)\. Move"):
        capture(Branches(how), (torch.randn(4, 4),))
    inside = capture(nn.Sequential(nn.Linear(4, 4), Branches(how)), (torch.randn(4, 4),))
    (note,) = inside.notes
    assert note.startswith("kept whole: 1 (")
    assert note.endswith(f"{words})")


def test_sparse_gradients_are_refused_when_a_model_is_planned() -> None:
    with pytest.raises(ModelError, match=r"sparse_embedding: the gradient of embed is sparse.*use sparse=False"):
        capture_checked(opened("sparse_embedding"), 2)
