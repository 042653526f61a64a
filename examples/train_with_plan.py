"""Your own training loop, on the stages of a plan.

autopipe plan examples/gpt2.py --devices 2 --global-batch 8 -o plan.json
torchrun --nproc-per-node 2 examples/train_with_plan.py plan.json
"""

from __future__ import annotations

import sys

import torch
from gpt2 import build_model, example_batch, loss_fn

import autopipe

STEPS = 5


def main(path: str) -> None:
    plan = autopipe.load(path)
    torch.manual_seed(0)  # every rank builds the same model, and trains its own stages of it
    inputs, target = example_batch(plan.global_batch)
    pipeline = plan.build(build_model(), loss_fn, example_inputs=inputs, example_target=target)
    torch.manual_seed(1 + torch.distributed.get_rank())  # every rank draws its own dropout
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = pipeline.step(**inputs, target=target)  # the mean loss, on every rank
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}   loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
