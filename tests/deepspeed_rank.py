"""One rank of a DeepSpeed run on an exported PipelineModule: its bounds and losses, as JSON in a file a rank.

python -m torch.distributed.run --nproc-per-node 2 tests/deepspeed_rank.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, STEPS = 16, 3


def layers() -> list[Any]:
    """Nine layers with the same weights in every run."""
    import torch

    made = []
    for seed in range(9):
        torch.manual_seed(seed)
        made.append(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
    return made


def batches(micro_batch: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(micro_batch, WIDTH, generator=generator), torch.randn(micro_batch, WIDTH, generator=generator)


def main() -> None:
    import deepspeed
    import torch

    sys.path.insert(0, str(Path.cwd()))
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(Path("ds_config.json").read_text())
    from deepspeed_pipeline import PlannedPipeline

    model = PlannedPipeline(layers(), loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    data = batches(config["train_micro_batch_size_per_gpu"])
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(STEPS)]
    found = {"parts": list(model.parts), "own": [model._local_start, model._local_stop], "losses": losses}
    Path(f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
