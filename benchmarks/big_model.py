"""A model larger than any process: captured without memory for its weights, and its stages built.

    python benchmarks/big_model.py [--layers 80] [--stages 8] [--hidden 8192]

The defaults are Llama 3 70B's. Wall and processor seconds, and the most memory that the process ever took.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopipe
from autopipe.core.units import format_bytes, format_count
from autopipe.runtime.capture import capture
from autopipe.runtime.stages.modules import build_stages

T = TypeVar("T")
HEAD, KV_HEADS, VOCABULARY, TOKENS = 128, 8, 128256, 32


def llama(hidden: int, layers: int) -> Any:
    """Builds a model with Llama 3's proportions."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=min(KV_HEADS, hidden // HEAD),
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def told(what: str, function: Callable[[], T]) -> T:
    """Run, and print what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{what:34} {wall:8.1f} s wall {cpu:8.1f} s processor   {format_bytes(peak):>9} at most", flush=True)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wall = time.perf_counter()
    model = told("build without weights", lambda: autopipe.without_weights(llama, options.hidden, options.layers))
    inputs = {"input_ids": torch.zeros(2, TOKENS, dtype=torch.long)}
    captured = told("capture", lambda: capture(model, inputs))
    cuts = [round(n * len(captured.layers) / options.stages) for n in range(1, options.stages)]
    stages = told(f"build {options.stages} stages", lambda: build_stages(captured, cuts))
    count = sum(parameter.numel() for parameter in model.parameters())
    held = max(sum(p.numel() for p in stage.parameters()) for stage in stages)
    print(f"{'all of it':34} {time.perf_counter() - wall:8.1f} s wall")
    print(f"{format_count(count)} parameters in {len(captured.layers)} layers, at most {format_count(held)} in a stage")
    for note in captured.notes:
        print(f"note  {note}")


if __name__ == "__main__":
    main()
