"""Analytic against measured: forward and backward of ten models in one process on this CPU, and their steps.

    python benchmarks/analytic.py [--rounds 7]

The machine's own speeds (runtime/measuring/roofline.py) take the place of a data sheet. In each round the speeds and
every model are measured, so that both see the same machine; medians are compared. The band is the one that plans print.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from autopipe.core.spread import error_of_median
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.weightless import building_weightless
from autopipe.runtime.measuring.analytic import BAND, cost_tables
from autopipe.runtime.measuring.roofline import Speeds, hardware_of, measure_rank
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import cores, memory_bytes
from autopipe.runtime.stages.chain import Chain
from autopipe.runtime.workload import InMemory, Inputs, Workload, batch_size

VOCABULARY, TOKENS, ROWS = 4096, 128, 4


class Row(NamedTuple):
    """A model: seconds of forward and backward, analytic and measured, and how well the medians are known."""

    name: str
    analytic_s: float
    measured_s: float
    noise: float


def tokens() -> torch.Tensor:
    """Some sequences."""
    return torch.randint(VOCABULARY, (ROWS, TOKENS))


def squared(output: Any, _: Any) -> torch.Tensor:
    """A loss for any model: of its first output."""
    first = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
    return first.float().square().mean()


def models() -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    """Ten models of different kinds and sizes, each with one batch."""
    import transformers as hf

    def shape(layers: int, width: int, heads: int = 4) -> dict[str, int]:
        return {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
        }

    def gpt2(layers: int, width: int) -> tuple[nn.Module, Inputs]:
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=width, n_layer=layers, n_head=4, use_cache=False, **ids
        )
        return hf.GPT2LMHeadModel(config), {"input_ids": tokens()}

    def llama(layers: int, width: int) -> tuple[nn.Module, Inputs]:
        config = hf.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **shape(layers, width))
        return hf.LlamaForCausalLM(config), {"input_ids": tokens()}

    def bert() -> tuple[nn.Module, Inputs]:
        config = hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **shape(4, 256))
        return hf.BertForMaskedLM(config), {"input_ids": tokens()}

    def vit() -> tuple[nn.Module, Inputs]:
        config = hf.ViTConfig(image_size=64, patch_size=8, **shape(4, 256))
        return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(2 * ROWS, 3, 64, 64)}

    def perceptron(width: int) -> tuple[nn.Module, Inputs]:
        layers = [
            part for _ in range(4) for part in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
        return nn.Sequential(*layers), (torch.randn(256, width),)

    def convolutions() -> tuple[nn.Module, Inputs]:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        return nn.Sequential(*layers), (torch.randn(ROWS, 3, 32, 32),)

    def encoder() -> tuple[nn.Module, Inputs]:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (torch.randn(ROWS, TOKENS, 256),)

    return {
        "GPT-2 4 × 256": lambda: gpt2(4, 256),
        "GPT-2 8 × 128": lambda: gpt2(8, 128),
        "GPT-2 2 × 512": lambda: gpt2(2, 512),
        "Llama 4 × 256": lambda: llama(4, 256),
        "Llama 2 × 512": lambda: llama(2, 512),
        "BERT 4 × 256": bert,
        "ViT 4 × 256": vit,
        "perceptron 4 × 512": lambda: perceptron(512),
        "convolutions 5 × 32": convolutions,
        "encoder 3 × 256": encoder,
    }


def measure(rounds: int) -> tuple[list[Speeds], dict[str, list[float]], dict[str, Any]]:
    """On each rank: rounds of speeds and of every model; then the analytic costs, from the same captures."""
    speeds: list[Speeds] = []
    seconds: dict[str, list[float]] = {}
    made = {}
    for name, build in models().items():
        launch.beat.phase(f"capturing {name}")
        workload, captured, inputs = captured_model(build)
        chain = Chain(captured, [(0, len(captured.layers))], workload.loss, torch.device("cpu"))
        made[name] = (chain, captured.bind(inputs))
    for index in range(rounds + 1):
        launch.beat.phase(f"round {index} of {rounds}")
        speeds.append(measure_rank())
        for name, (chain, bound) in made.items():
            times = chain.run(bound, None)
            if index:
                seconds.setdefault(name, []).append(times["forward"][0] + times["backward"][0])
    usual = Speeds(*(statistics.median(values) for values in zip(*speeds[1:], strict=True)))
    hardware = hardware_of(usual, "this CPU", memory_bytes("cpu", 1))
    analytic = {}
    for name, build in models().items():
        launch.beat.phase(f"counting {name}")
        with building_weightless():
            workload, captured, inputs = captured_model(build)
        (table,) = cost_tables(workload, captured, batch_size(inputs), [hardware], "sgd")
        analytic[name] = sum(cost.forward_s + cost.backward_s for cost in table.layers)
    return speeds, seconds, analytic


def captured_model(build: Callable[[], tuple[nn.Module, Inputs]]) -> tuple[Workload, Captured, Inputs]:
    """A model, captured, with its batch."""
    torch.manual_seed(0)
    model, inputs = build()
    workload = InMemory(model, inputs, None, squared).open()
    return workload, capture(workload.model, inputs, loss=lambda output: squared(output, None)), inputs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    speeds, seconds, analytic = launch.launch(measure, (rounds,), ranks=cores(), timeout_s=300)[0]
    usual = Speeds(*(statistics.median(values) for values in zip(*speeds[1:], strict=True)))
    print(
        f"products {usual.matmul / 1e9:.1f} GFLOP/s, memory {usual.pointwise / 1e9:.1f} GB/s on each of {cores()} ranks"
    )
    rows = [
        Row(name, analytic[name], statistics.median(values), error_of_median(values))
        for name, values in seconds.items()
    ]
    print(f"{'model':22} {'analytic':>10} {'measured':>10} {'error':>8} {'noise':>7}  band ± {format_percent(BAND)}")
    for row in rows:
        error = row.measured_s / row.analytic_s - 1
        inside = "inside" if abs(error) <= BAND else "OUTSIDE"
        times = f"{format_duration(row.analytic_s):>10} {format_duration(row.measured_s):>10}"
        print(f"{row.name:22} {times} {format_percent(error, sign=True):>8} {format_percent(row.noise):>7}  {inside}")
    errors = [row.measured_s / row.analytic_s - 1 for row in rows]
    within = sum(abs(error) <= BAND for error in errors)
    worst = max(errors, key=abs)
    print(f"{within} of {len(rows)} inside the band, worst {format_percent(worst, sign=True)}")


if __name__ == "__main__":
    main()
