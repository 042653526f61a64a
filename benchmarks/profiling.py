"""What profiling costs as a model gets deeper: a GPT of 96 blocks against one of 12, capture apart.

    python benchmarks/profiling.py [--rounds 5] [--steps 10]

Processor time of warming up, counting bytes and a fixed number of rotations in one process of one thread; the ratio,
with all layers run and with equal ones sampled. Then the steps of plans of the deep one, predicted from the sampled
layers, against measured ones, as in prediction.py; that part needs two free cores, 0 steps leave it out.
"""

from __future__ import annotations

import argparse
import time

import deep_gpt
import prediction
import torch

from autopipe.core.units import format_duration
from autopipe.runtime.capture import capture
from autopipe.runtime.measuring.measure import LayerTimer
from autopipe.runtime.measuring.sampling import INSTANCES
from autopipe.runtime.ranks import launch
from autopipe.runtime.workload import InMemory

MICRO_BATCH = 2
BLOCKS = (12, deep_gpt.BLOCKS)


def cost_s(blocks: int, instances: int | None, rounds: int) -> tuple[float, int]:
    """Processor seconds to time the layers, and how many units were run."""
    torch.manual_seed(0)
    workload = InMemory(deep_gpt.gpt(blocks), *deep_gpt.example_batch(MICRO_BATCH), deep_gpt.loss_fn).open()
    batch = workload.batch(MICRO_BATCH)
    launch.beat.phase(f"capturing {blocks} blocks")
    captured = capture(workload.model, batch[0])
    cuts = [index + 1 for index, layer in enumerate(captured.layers[:-1]) if layer.cut_after]
    begun = time.process_time()
    timer = LayerTimer(
        captured, cuts, {MICRO_BATCH: batch}, workload.loss, "adamw", torch.device("cpu"), instances=instances
    )
    timer.warm_up()
    for _ in range(rounds):
        timer.rotate()
    return time.process_time() - begun, len(timer.sampling.run)


def compare(rounds: int) -> list[tuple[str, list[tuple[float, int]]]]:
    """For each way of choosing units the costs at both depths; one unmeasured run first."""
    cost_s(BLOCKS[0], INSTANCES, 1)
    ways = {"equal layers sampled": INSTANCES, "all layers": None}
    return [(name, [cost_s(blocks, number, rounds) for blocks in BLOCKS]) for name, number in ways.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    (rows,) = launch.launch(compare, (asked.rounds,), ranks=1, timeout_s=300)
    print(f"{'units run':22} {f'{BLOCKS[0]} blocks':>20} {f'{BLOCKS[1]} blocks':>20} {'ratio':>7}")
    for name, ((few_s, few), (many_s, many)) in rows:
        cells = [f"{format_duration(s)} ({count} units)" for s, count in ((few_s, few), (many_s, many))]
        print(f"{name:22} {cells[0]:>20} {cells[1]:>20} {many_s / few_s:7.2f}")
    if asked.steps:
        prediction.show(prediction.rows(deep_gpt.__file__, MICRO_BATCH, asked.steps, prediction.link()))


if __name__ == "__main__":
    main()
