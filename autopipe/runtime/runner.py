"""One rank's share of a plan: its stages on torch's runtime, its tied parameters, its optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Action, Op, Schedule
from autopipe.core.units import many
from autopipe.runtime.capture import Captured
from autopipe.runtime.memory import unique_bytes
from autopipe.runtime.own.runtime import OwnRuntime
from autopipe.runtime.recorder import Recorder
from autopipe.runtime.shared import shared_gradients
from autopipe.runtime.stages import StageModule, build_stages
from autopipe.runtime.torch_ir import TorchRuntime
from autopipe.runtime.workload import Inputs, batch_size, rows, to_device

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Runner:
    """Builds this rank's stages and runs steps; what a step leaves in ``.grad`` is one process's gradient.

    ``loss_fn(output, target)`` sees what the model returns. The loss of a step is the mean over its micro-batches.
    """

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        cuts: Sequence[int],
        *,
        micro_batch: int,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        device: torch.device,
        recompute: Collection[int] = (),
        training: bool = True,
    ) -> None:
        self.rank = dist.get_rank()
        self.device = device
        self.micro_batch = micro_batch
        self.schedule = schedule
        self.recorder = Recorder(self.rank, device)
        self._captured = captured
        self._loss_fn = loss_fn
        mine = [stage for stage, rank in enumerate(schedule.placement) if rank == self.rank]
        parts = {schedule.part_of[stage]: stage for stage in mine}
        self.modules: list[StageModule] = build_stages(
            captured, cuts, only=parts, recompute=recompute, deferred=training and schedule.splits_backward
        )
        self.stages = {parts[module.index]: module for module in self.modules}
        self._runtime = self._made_runtime(training)
        self._shared = shared_gradients(captured, schedule, cuts) if training else []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once."""
        return list(self._runtime.parameters())

    def _made_runtime(self, training: bool) -> TorchRuntime | OwnRuntime:
        given = (self.schedule, self.stages, self.micro_batch, self.device)
        if self.schedule.executor == "own":
            return OwnRuntime(*given, self._scaled_loss, self.recorder, training=training)
        runtime = TorchRuntime(
            self.schedule, self.modules, self.micro_batch, self.device, self._recorded_loss, training=training
        )
        for stage in runtime.stages:
            self.recorder.watch(stage)
        return runtime

    @property
    def own(self) -> OwnRuntime:
        """Our own runtime, where the schedule runs on it."""
        assert isinstance(self._runtime, OwnRuntime)
        return self._runtime

    def known_bytes(self) -> int:
        """Bytes that are there between steps: parameters, buffers, gradients, receive buffers."""
        return unique_bytes(self.known_tensors())

    def known_tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, gradients and receive buffers of this rank."""
        tensors: list[torch.Tensor | None] = [*self.parameters, *(p.grad for p in self.parameters)]
        for module in self.modules:
            tensors += module.buffers()
        tensors += self._runtime.receive_buffers()
        return [tensor for tensor in tensors if tensor is not None]

    def _scaled_loss(self, outputs: Any, target: Any) -> torch.Tensor:
        flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return self._loss_fn(self._captured.unflatten(flat), target) / self.schedule.per_update

    def _recorded_loss(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = self._scaled_loss(outputs, target)
        self.recorder.extend()
        return loss

    def split(self, inputs: Inputs, target: Any) -> tuple[list[dict[str, torch.Tensor]], list[Any]]:
        """Bound inputs and targets, one each micro-batch. Raises UsageError when the batch has another size."""
        size, wanted = batch_size(inputs), self.micro_batch * self.schedule.per_update
        if size != wanted:
            raise UsageError(
                f"the batch has {size} rows, the plan takes {wanted} "
                f"({many(self.schedule.per_update, 'micro-batch')} of {self.micro_batch})"
            )
        bound = to_device(self._captured.bind(inputs), self.device)
        target = to_device(target, self.device)
        starts = range(0, size, self.micro_batch)
        return (
            [rows(bound, start, start + self.micro_batch) for start in starts],
            [rows(target, start, start + self.micro_batch) for start in starts],
        )

    def backward(self, inputs: Sequence[dict[str, torch.Tensor]], targets: Sequence[Any]) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches, shared gradients summed. Losses on ranks with a last stage only.

        The losses are already divided by the number of micro-batches: their sum is the step's loss.
        """
        losses = self._runtime.step(inputs, targets)
        for shared in self._shared:
            shared.sum()
        return losses

    def timed_step(
        self, inputs: Sequence[dict[str, torch.Tensor]], targets: Sequence[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        """One recorded training step from a common start: backward, optimizer, gradients dropped."""
        dist.barrier()
        self.recorder.restart()
        self.backward(inputs, targets)
        self.recorder.timed(Action(self.modules[0].index, Op.O, 0), lambda: _update(optimizer))


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_optimizer(name: str, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """An optimizer by the name that plans use."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return OPTIMIZERS[name](trainable or [nn.Parameter(torch.zeros(0))], lr=lr)
