"""What stages cost beside the model itself: one stage with the whole model, against the model as its author wrote it.

    python benchmarks/capture.py [--rounds 15]

Forward and backward of one micro-batch in one process of one thread, in alternation, processor time; the ratio of the
medians with the standard error of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from autopipe.core.spread import error_of_median
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.capture import capture
from autopipe.runtime.stages.modules import build_stages
from autopipe.runtime.workload import call
from tests.models import ResNet

TOKENS = 128
Batch = dict[str, torch.Tensor]


def tokens(vocabulary: int) -> Batch:
    """Two sequences."""
    return {"input_ids": torch.randint(vocabulary, (2, TOKENS))}


def pixels(size: int, rows: int) -> torch.Tensor:
    """Some images."""
    return torch.randn(rows, 3, size, size)


def models() -> dict[str, tuple[nn.Module, Any]]:
    """The models with one batch each."""
    import transformers as hf

    shape = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    gpt2 = hf.GPT2Config(
        vocab_size=4096, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    llama = hf.LlamaConfig(vocab_size=4096, max_position_embeddings=TOKENS, use_cache=False, **shape)
    bert = hf.BertConfig(vocab_size=4096, max_position_embeddings=TOKENS, **shape)
    vit = hf.ViTConfig(image_size=64, patch_size=8, **shape)
    return {
        "GPT-2": (hf.GPT2LMHeadModel(gpt2), tokens(4096)),
        "Llama": (hf.LlamaForCausalLM(llama), tokens(4096)),
        "BERT": (hf.BertModel(bert), tokens(4096)),
        "ViT": (hf.ViTForImageClassification(vit), {"pixel_values": pixels(64, 4)}),
        "ResNet": (ResNet(), (pixels(64, 8),)),
    }


def loss_of(output: Any) -> torch.Tensor:
    """A scalar of the first floating-point output."""
    first = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
    return first.float().square().mean()


def timed_s(step: Callable[[], torch.Tensor]) -> float:
    """Processor seconds of a forward and backward."""
    start = time.thread_time()
    step().backward()
    return time.thread_time() - start


def compare(model: nn.Module, batch: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the model and of its one stage, in alternation."""
    captured = capture(model, batch, loss=loss_of)
    (stage,) = build_stages(captured, ())
    bound = captured.bind(batch)
    eager, staged = [], []
    for index in range(rounds + 2):
        eager.append(timed_s(lambda: loss_of(call(model, batch))))
        staged.append(timed_s(lambda: loss_of(captured.unflatten(stage(**bound)))))
        if index < 2:  # warm-up
            eager.clear()
            staged.clear()
    return eager, staged


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'model':8} {'eager':>10} {'stage':>10} {'ratio':>7} {'noise':>7}")
    for name, (model, batch) in models().items():
        torch.manual_seed(0)
        eager, staged = compare(model, batch, rounds)
        ratio = statistics.median(staged) / statistics.median(eager)
        noise = error_of_median(eager) + error_of_median(staged)
        times = f"{format_duration(statistics.median(eager)):>10} {format_duration(statistics.median(staged)):>10}"
        print(f"{name:8} {times} {ratio:7.3f} {format_percent(noise):>7}")


if __name__ == "__main__":
    main()
