"""An action table in, torch's runtime out. With torch_stage.py, and torch_facts.py, which checks them, the only user of
private names.

Facts that the code relies on (each has a test in tests/runtime/test_torch_ir.py):
- compute actions alone are handed over; torch adds the messages, without deadlock;
- metadata is static, so that no stage runs on uninitialised memory and no flag is guessed;
- ``scale_grads`` stays off and the loss is divided instead: it would scale a tied parameter on one rank twice;
- losses are appended in the order in which the last stage runs its forwards, which must be 0 … m−1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from autopipe.core.schedule import Action, Schedule
from autopipe.runtime.tables.sent import Sent
from autopipe.runtime.tables.torch_facts import FORWARD_TYPES, TYPES, check_torch
from autopipe.runtime.tables.torch_stage import Stage


class Runnable(Protocol):
    """What the runtime needs of a stage's module, an nn.Module that takes micro-batches; see StageModule."""

    index: int
    deferred: bool

    def input_args(self, micro_batch: int, /) -> tuple[torch.Tensor, ...]:
        """Meta tensors like those it receives."""

    def output_args(self, micro_batch: int, /) -> tuple[torch.Tensor, ...]:
        """Meta tensors like those it returns."""

    def weight_backward(self) -> Callable[[], None]:
        """Take the weight gradients that the last backward put off."""


def to_torch(action: Action) -> Any:
    """torch's action for one of ours."""
    kind = torch_schedules._ComputationType[TYPES[action.op.value]]
    return torch_schedules._Action(action.stage, kind, action.micro_batch)


def make_stage(
    module: Runnable, stages: int, micro_batch: int, device: torch.device, *, group: dist.ProcessGroup | None = None
) -> Stage:
    """torch's stage around ours, with static metadata."""
    return Stage(
        submodule=cast(torch.nn.Module, module),
        stage_index=module.index,
        num_stages=stages,
        device=device,
        input_args=module.input_args(micro_batch),
        output_args=module.output_args(micro_batch),
        group=group,
        dw_builder=module.weight_backward if module.deferred else None,
    )


class TorchRuntime:
    """An action table on torch's pipeline runtime: this rank's stages, one step at a time.

    ``loss_fn(flat outputs, target) -> scalar`` runs on the rank of the last stage, once a micro-batch. Without
    ``training`` only the forwards of the table run.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Sequence[Runnable],
        micro_batch: int,
        device: torch.device,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        *,
        training: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_torch()
        self._training, self._computes_loss = training, loss_fn is not None
        self.schedule = schedule
        self.stages = [make_stage(m, schedule.stages, micro_batch, device, group=group) for m in modules]
        self._sent = Sent(schedule)
        for stage in self.stages:
            stage.sent = self._sent
        self._runtime = torch_schedules._PipelineScheduleRuntime(
            list(self.stages), schedule.micro_batches, loss_fn=loss_fn, scale_grads=False
        )
        table = {rank: [to_torch(action) for action in row] for rank, row in enumerate(schedule.order)}
        self._runtime._prepare_schedule_with_comms(table)
        if not training:
            self._leave_out_backwards()

    def _leave_out_backwards(self) -> None:
        """Keep the forwards and their messages, in their order: torch validates whole tables only, and its backwards
        of an evaluation still ask for gradients where two neighbouring stages share a rank.
        """
        kept = {torch_schedules._ComputationType[name] for name in FORWARD_TYPES}
        table = self._runtime.pipeline_order_with_comms
        self._runtime.pipeline_order_with_comms = {
            rank: [action for action in row if action.computation_type in kept] for rank, row in table.items()
        }

    def step(
        self, inputs: Sequence[dict[str, torch.Tensor]], targets: Sequence[Any], *, keep: bool = False
    ) -> list[Any]:
        """Run the table over the micro-batches; the losses, on the rank of the last stage only.

        ``keep`` keeps the last stage's outputs for ``outputs``; they cost memory.
        """
        losses: list[Any] | None = [] if self._computes_loss else None
        self._runtime._has_backward = self._training
        for stage in self.stages:
            stage.has_backward = self._training
            stage.clear_runtime_states()
        positional = [()] * len(inputs)
        self._runtime._step_microbatches(positional, list(inputs), list(targets), losses, return_outputs=keep)
        self._sent.finish()
        return losses or []

    def outputs(self) -> list[Any]:
        """The last stage's flat outputs of the step that kept them, a micro-batch each."""
        return [output for stage in self.stages if stage.is_last for output in stage.output_chunks]
