"""One rank's share of a plan: its stages on torch's runtime, the sums of its gradients, its optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.optimizer import Optimizer, optimizer_of
from autopipe.core.reduction import MEAN, Reduction
from autopipe.core.schedule import Action, Op, Schedule, stages_on
from autopipe.runtime.capture import Captured
from autopipe.runtime.own.executor import Executor
from autopipe.runtime.own.runtime import OwnRuntime
from autopipe.runtime.running.batches import Part, Weighed, check_size, divide
from autopipe.runtime.running.in_turn import check_in_turn
from autopipe.runtime.running.joining import Output
from autopipe.runtime.running.piecewise import planned_optimizer
from autopipe.runtime.running.replicas import GradientSums, Replica, same_state
from autopipe.runtime.stages.modules import StageModule, build_stages
from autopipe.runtime.stages.shared import holders
from autopipe.runtime.tables.recorder import Recorder
from autopipe.runtime.tables.torch_ir import TorchRuntime
from autopipe.runtime.workload import Inputs, batch_size, to_device

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Runner:
    """Builds this rank's stages and runs steps; what a step leaves in ``.grad`` is one process's gradient.

    ``loss_fn(output, target)`` sees what the model returns. The loss of a step is the sum of share × loss over the
    micro-batches of all replicas (see shares.py). ``fill`` is given the stages before they run, to make the
    values of parameters that have none.
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
        replica: Replica | None = None,
        reduction: Reduction = MEAN,
        fill: Callable[[Sequence[StageModule]], None] = lambda modules: None,
    ) -> None:
        check_in_turn(captured, schedule, cuts)
        self.replica = replica or Replica.join(schedule.ranks, 1)
        self.device = device
        self.micro_batch = micro_batch
        self.schedule = schedule
        self.reduction = reduction
        self.rank = self.replica.rank
        self.recorder = Recorder(dist.get_rank(), device)
        self.captured, self._loss_fn, self._training = captured, loss_fn, training
        mine = stages_on(schedule.placement, self.rank)
        parts = {schedule.part_of[stage]: stage for stage in mine}
        self.modules: list[StageModule] = build_stages(
            captured, cuts, only=parts, recompute=recompute, deferred=training and schedule.splits_backward
        )
        fill(self.modules)
        self.stages = {parts[module.index]: module for module in self.modules}
        self._runtimes: dict[tuple[int, int, bool], TorchRuntime | OwnRuntime] = {}
        self._holders = holders_of(captured, schedule, cuts, self.modules)
        shared = [holders(captured, schedule, cuts, name) for name, _ in captured.model.named_parameters()]
        self._sums = GradientSums(self.replica, self._holders, shared) if training else None

    def _runtime(self, rows: int, count: int, *, loss: bool) -> TorchRuntime | OwnRuntime:
        """The runtime for so many micro-batches of a size; those that were made share the stages."""
        key = rows, count, loss
        if key not in self._runtimes:
            self._runtimes[key] = self._made_runtime(rows, count, loss=loss)
        return self._runtimes[key]

    def _made_runtime(self, rows: int, count: int, *, loss: bool) -> TorchRuntime | OwnRuntime:
        schedule, training = self.schedule.first(count), self._training
        group = self.replica.group
        if schedule.executor == "own":
            given = (schedule, self.stages, rows, self.device, self._weighed_loss, self.recorder)
            return OwnRuntime(*given, training=training, group=group)
        loss_fn = self._recorded_loss if loss else None
        runtime = TorchRuntime(schedule, self.modules, rows, self.device, loss_fn, training=training, group=group)
        for stage in runtime.stages:
            self.recorder.watch(stage)
        return runtime

    def own_executor(self) -> Executor:
        """What runs an asynchronous schedule: of one replica, without weights that ranks share. Else UsageError."""
        runtime = self._runtime(self.micro_batch, self.schedule.per_update, loss=True)
        if not self.schedule.asynchronous or not isinstance(runtime, OwnRuntime):
            raise UsageError(f"{self.schedule.name} flushes after every update: take steps, and step your optimizer")
        if self.replica.count > 1:
            raise UsageError(f"{self.schedule.name} runs on 1 replica, not {self.replica.count}: plan with one")
        if any(len(ranks) > 1 for ranks in self._holders.values()):
            raise UsageError(f"{self.schedule.name}: a tied parameter is on several ranks, which would step together")
        return runtime.executor

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once."""
        return list({id(p): p for module in self.modules for p in module.parameters()}.values())

    def known_tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and gradients of this rank: what is there between steps."""
        tensors: list[torch.Tensor | None] = [*self.parameters, *(p.grad for p in self.parameters)]
        for module in self.modules:
            tensors += module.buffers()
        return [tensor for tensor in tensors if tensor is not None]

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this is the first of the ranks that hold a parameter."""
        return self._holders.get(parameter, (self.rank,))[0] == self.rank

    def _weighed_loss(self, outputs: Any, target: Any) -> torch.Tensor:
        """Share × loss; a target without a share is that of one of an update's equal micro-batches."""
        weighed = target if isinstance(target, Weighed) else Weighed(target, 1 / self.schedule.per_update)
        flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
        loss = self._loss_fn(self.captured.unflatten(flat), weighed.target) if weighed.share else nothing(flat)
        return loss * (weighed.share or 1.0)

    def _recorded_loss(self, outputs: Any, target: Any) -> torch.Tensor:
        return self.recorder.loss(lambda: self._weighed_loss(outputs, target))

    def split(self, inputs: Inputs, target: Any) -> list[Part]:
        """This replica's micro-batches of a batch. Raises UsageError for a size that the plan does not take."""
        size = batch_size(inputs)
        fixed = self.captured.micro_batch is not None
        check_size(size, self.micro_batch, self.schedule.per_update, self.replica.count, fixed=fixed)
        return divide(
            to_device(self.captured.bind(inputs), self.device),
            inputs,
            to_device(target, self.device),
            size,
            micro_batch=self.micro_batch,
            reduction=self.reduction,
            replica=self.replica.index,
            replicas=self.replica.count,
        )

    def whole(self, inputs: Inputs, target: Any) -> tuple[list[dict[str, torch.Tensor]], list[Weighed]]:
        """Inputs and targets of one update of an asynchronous schedule. Raises UsageError for a short batch."""
        parts = self.split(inputs, target)
        if len(parts) != 1 or (len(parts[0].inputs), parts[0].rows) != (self.schedule.per_update, self.micro_batch):
            raise UsageError(
                f"the batch has {batch_size(inputs)} rows, {self.schedule.name} takes whole batches of "
                f"{self.micro_batch * self.schedule.per_update}"
            )
        return parts[0].inputs, parts[0].targets

    def backward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches, gradients summed over who shares them; accumulates.

        The losses, on ranks with a last stage only, have been multiplied by their shares: their sum over all replicas
        is the step's loss.
        """
        if self._sums is not None:
            self._sums.prepare()
        losses = [
            loss
            for part in parts
            for loss in self._runtime(part.rows, len(part.inputs), loss=True).step(part.inputs, part.targets)
        ]
        if self._sums is not None:
            self._sums.run()
            same_state(self.replica, changed_state(self.captured, self.modules))
        return losses

    def outputs(self, parts: Sequence[Part]) -> list[Output]:
        """Forward only, without the loss: the output of each micro-batch, on the last stage's rank only."""
        made = []
        for part in parts:
            runtime = self._runtime(part.rows, len(part.inputs), loss=False)
            if isinstance(runtime, OwnRuntime):
                raise UsageError(f"{self.schedule.name} runs without outputs: predict with a plan of another schedule")
            runtime.step(part.inputs, part.targets, keep=True)
            flat = [each if isinstance(each, tuple | list) else (each,) for each in runtime.outputs()]
            made += [Output(part.rows, self.captured.output_leaves(each)) for each in flat]
        return made

    def timed_step(self, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> None:
        """One recorded training step from a common start: backward, optimizer, gradients dropped."""
        dist.barrier()
        self.recorder.restart()
        self.backward(parts)
        self.recorder.timed(Action(self.modules[0].index, Op.O, 0), lambda: _update(optimizer))


def nothing(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss of 0 that depends on the outputs, for a micro-batch in which nothing counts: its own would be 0 / 0."""
    known = [output for output in outputs if output.is_floating_point()]
    large = [output for output in known if output.dim()] or known
    return torch.stack([output.nan_to_num().float().sum() for output in large]).sum() * 0.0


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_optimizer(
    update: str | Optimizer, parameters: Sequence[nn.Parameter], lr: float, peers: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """An optimizer by the name that plans use, or as a plan has it; ``peers`` are the same rank of all replicas."""
    wanted = optimizer_of(update)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    given = trainable or [nn.Parameter(torch.zeros(0))]
    return planned_optimizer(wanted, given, OPTIMIZERS[wanted.name], {"lr": lr}, peers)


def holders_of(
    captured: Captured, schedule: Schedule, cuts: Sequence[int], modules: Sequence[StageModule]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """The ranks that hold each trained parameter of these stages, ascending; parameters in the model's order.

    Gradients are summed several at a time, so all ranks must take them in one order, whichever stage has them first.
    """
    held = {name: p for module in modules for name, p in module.named_parameters(remove_duplicate=False)}
    known: dict[int, int] = {}
    named = captured.model.named_parameters(remove_duplicate=False)
    order = {name: known.setdefault(id(p), number) for number, (name, p) in enumerate(named)}
    ordered = sorted((name for name, p in held.items() if p.requires_grad), key=lambda name: order[name])
    return {held[name]: holders(captured, schedule, cuts, name) for name in ordered}


def changed_state(captured: Captured, modules: Sequence[StageModule]) -> list[torch.Tensor]:
    """This rank's buffers and parameters that a forward may change, in one order on all replicas."""
    names = captured.changed_state()
    held = ((name, t) for module in modules for name, t in (*module.named_buffers(), *module.named_parameters()))
    return [tensor.detach() for name, tensor in held if name in names]
