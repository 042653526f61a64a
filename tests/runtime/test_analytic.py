"""Analytic costs: their arithmetic, their bytes against real tensors, and what a command makes of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from autopipe.core import files
from autopipe.core.errors import UsageError
from autopipe.core.hardware import GPU_REACHED, HARDWARE, known
from autopipe.core.profile import Profile
from autopipe.runtime.capture import capture
from autopipe.runtime.capture.weightless import building_weightless
from autopipe.runtime.measuring.analytic import analytic_profile, cost_tables
from autopipe.runtime.measuring.operations import AsOnCuda, Operations
from autopipe.runtime.measuring.roofline import Speeds, hardware_of
from autopipe.runtime.measuring.sampling import chosen
from autopipe.runtime.measuring.unit_bytes import unit_bytes
from autopipe.runtime.stages.chain import Chain
from autopipe.runtime.workload import InMemory, ModelFile
from autopipe.workflow import get_profile

ROOT = Path(__file__).parents[2]
CPU = hardware_of(Speeds(1e9, 5e8, 5e8, 1e9, 1e9, 5e8, 1e-6), "cpu", 2**30)


def test_the_work_of_a_linear_layer_by_hand() -> None:
    layer, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)
    with Operations() as operations:
        output = layer(x)
        forward = operations.take()
        output.sum().backward()
    (product,) = [work for work in forward if work.kind == "matmul"]
    assert product.flops == 2 * 32 * 64 * 128
    assert product.bytes == 4 * (32 * 64 + 64 * 128 + 32 * 128)
    assert product.dtype == "float32"
    assert sum(work.flops for work in operations.take()) == product.flops  # the input needs no gradient


def test_views_cost_nothing_and_a_lookup_what_it_takes() -> None:
    table, rows = torch.randn(1000, 8), torch.tensor([1, 2])
    with Operations() as operations:
        table.t().view(8, 1000)[:4]
        assert operations.take() == []
        nn.functional.embedding(rows, table)
        (work,) = operations.take()
    assert work.bytes == 2 * 2 * 8 * 4


def test_attention_and_dropout_keep_what_they_keep_on_a_gpu() -> None:
    q = torch.randn(2, 4, 128, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with AsOnCuda():
        attended = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1)
        dropped = nn.functional.dropout(q, 0.1)
    assert "FlashAttention" in type(attended.grad_fn.next_functions[0][0] or attended.grad_fn).__name__ or (
        "FlashAttention" in type(attended.grad_fn).__name__
    )
    assert "NativeDropout" in type(dropped.grad_fn).__name__


def test_an_operation_takes_the_longest_of_arithmetic_traffic_and_kernel() -> None:
    gpu = HARDWARE["h100"]
    flops = 1e12
    assert gpu.seconds("matmul", flops, 8, "bfloat16") == pytest.approx(flops / (989.4e12 * GPU_REACHED["matmul"]))
    assert gpu.seconds("pointwise", 0, 3_350_000_000, "bfloat16") == pytest.approx(1e-3 / GPU_REACHED["pointwise"])
    assert gpu.seconds("special", 0, 8, "bfloat16") == gpu.kernel_s
    assert known("H100") is gpu
    assert known(gpu.name) is gpu
    with pytest.raises(UsageError, match=r"'h10' is not known.* use one of h200, h100"):
        known("h10")


@pytest.mark.parametrize("path", ["examples/gpt2.py", "examples/mlp.py"])
def test_bytes_are_those_of_real_tensors(path: str) -> None:
    source = ModelFile(str(ROOT / path))
    real = source.open()
    captured = capture(real.model, real.batch(2)[0])
    ranges = [(n, n + 1) for n in range(len(captured.layers))]
    chains = [Chain(captured, ranges, real.loss, torch.device("cpu"), deferred=later) for later in (False, True)]
    inputs, target = captured.bind(real.batch(2)[0]), real.batch(2)[1]
    for chain in chains:
        chain.run(inputs, target)
    measured = unit_bytes(chains[0], chains[1], inputs, target)
    with building_weightless():
        bare = source.open()
    assert all(parameter.is_meta for parameter in bare.model.parameters())
    weightless = capture(bare.model, bare.batch(2)[0])
    assert weightless.structure == captured.structure
    (table,) = cost_tables(bare, weightless, 2, [CPU], "adamw")
    for cost, unit in zip(table.layers, measured, strict=True):
        assert cost.held_after_forward_bytes == unit.held_after_forward
        # but for the gradient of a layer's input, which the layer before may keep
        assert cost.held_after_input_grad_bytes == pytest.approx(unit.held_after_input_grad, abs=unit.output)
        assert cost.workspace_bytes == pytest.approx(unit.workspace, abs=unit.output)
        assert cost.output_bytes == unit.output
        assert cost.forward_s > 0


def test_a_profile_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    made = analytic_profile(str(ROOT / "examples" / "gpt2.py"), HARDWARE["h100"], micro_batches=(1, 4))
    assert (made.origin, made.device, made.micro_batches) == ("analytic", "NVIDIA H100 SXM", (1, 4))
    blocks = [cost for layer, cost in zip(made.layers, made.at(4), strict=True) if ".h." in layer.name]
    assert len(set(blocks)) == 1
    assert made.band > 0
    assert files.from_json(files.to_json(made), Profile) == made


def test_the_command_imports_by_ending_and_asks_for_what_is_missing(tmp_path: Path) -> None:
    table = tmp_path / "layers.csv"
    table.write_text("layer,forward_ms,backward_ms,output_MB,parameters\na,1,2,3,4\nb,1,2,3,4\n")
    options = {
        "origin": None, "dtype": None, "devices": 1, "threads": 1, "optimizer": "adamw", "budget_s": None,
        "output": None, "progress": print,
    }  # fmt: skip
    with pytest.raises(UsageError, match="add --micro-batch N"):
        get_profile(str(table), device="l4", micro_batches=None, **options)
    made, saved = get_profile(str(table), device="l4", micro_batches=(16,), **options)
    assert saved == tmp_path / "layers.profile.json"
    assert json.loads(saved.read_text())["device"] == made.device == "NVIDIA L4"


def test_units_that_are_run_join_like_to_like() -> None:
    def joined(kinds: str, instances: int) -> str:
        run = chosen(kinds, instances)
        assert run[0] == 0
        assert run[-1] == len(kinds) - 1
        assert set(kinds) == {kinds[unit] for unit in run}
        assert all(b == a + 1 or kinds[b - 1] == kinds[a] for a, b in pairwise(run))
        return "".join(kinds[unit] for unit in run)

    assert joined("EAAAAAAANH", 4) == "EAAAANH"
    assert joined("EABABABABANH", 2) == "EABABANH"
    assert joined("ABC", 4) == "ABC"
    assert joined("A", 4) == "A"
    assert len(chosen("E" + "AAAAAB" * 16 + "N", 4)) < 40


def test_a_model_in_memory_without_weights_has_its_costs() -> None:
    with building_weightless():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(4, 8)
    workload = InMemory(model, (x,), None, lambda output, _: output.square().mean()).open()
    captured = capture(workload.model, (x,), loss=lambda output: output.square().mean())
    (table,) = cost_tables(workload, captured, 4, [CPU], "sgd")
    assert len(table.layers) == len(captured.layers)
    assert table.layers[0].optimizer_s > 0
