"""A two-way table, step by step, with the interface of torch_ir.TorchRuntime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Schedule
from autopipe.runtime.own.executor import Executor, LossFn
from autopipe.runtime.tables.recorder import Recorder
from autopipe.runtime.tables.torch_ir import Runnable


class OwnRuntime:
    """This rank's stages, by number, on our own runtime.

    ``loss_fn(flat outputs, target) -> scalar`` runs in the last stage of each replica, once a micro-batch. Without
    ``training`` only the forwards of the table run.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, Runnable],
        micro_batch: int,
        device: torch.device,
        loss_fn: LossFn,
        recorder: Recorder,
        *,
        training: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.schedule = schedule if training else schedule.forward_only()
        self.executor = Executor(modules, micro_batch, device, loss_fn, recorder, training=training, group=group)

    def step(self, inputs: Sequence[dict[str, torch.Tensor]], targets: Sequence[Any]) -> list[torch.Tensor]:
        """Run the table over the micro-batches; the losses, on ranks with a last stage."""
        if self.schedule.asynchronous:
            raise UsageError(f"{self.schedule.name} has no single steps: it updates while it runs; use train()")
        losses = self.executor.run(self.schedule, lambda batch: (inputs[batch], targets[batch]))
        return list(losses.values())

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return self.executor.parameters()
