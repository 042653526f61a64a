"""A plan in a user's own training loop, under torchrun:

pipeline = autopipe.load("plan.json").build(model, loss_fn)
optimizer = torch.optim.AdamW(pipeline.parameters())
for inputs, target in batches:
    loss = pipeline.step(inputs, target=target)     # every rank gets the mean loss
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.plan import Plan
from autopipe.runtime.capture import capture
from autopipe.runtime.devices import own_device
from autopipe.runtime.host import hurry_messages, keep_freed_memory
from autopipe.runtime.runner import Runner
from autopipe.runtime.workload import Inputs, check_model, rows


class Pipeline:
    """This rank's part of a planned model.

    The model is the whole one, as its author wrote it, built alike on every rank; the stages hold its own
    parameters under its own names. It is captured from ``example_inputs`` (a tuple or a dict, one global batch), or at
    the first step. Gradients accumulate over steps until the optimizer clears them. Random numbers, dropout's, are
    drawn from each rank's own generator: seed it per rank where runs must repeat.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        example_inputs: Inputs | None = None,
    ) -> None:
        self.plan = plan
        self._group_made = _join(plan)
        self.device = own_device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self.model = check_model(model, type(model).__name__, "the model").to(self.device)
        self._loss_fn = loss_fn
        self._runners: dict[bool, Runner] = {}
        if example_inputs is not None:
            self._runner(example_inputs, training=True)

    def step(self, *inputs: Any, target: Any = None, **keywords: Any) -> torch.Tensor:
        """Forward and backward of one global batch; gradients are left in ``.grad``. The mean loss, on every rank.

        Raises UsageError when the batch is not the plan's size, ModelError when its shapes are others.
        """
        return self._run(inputs, keywords, target, training=True)

    def evaluate(self, *inputs: Any, target: Any = None, **keywords: Any) -> torch.Tensor:
        """The mean loss of one global batch with the model in eval mode, no gradients; on every rank."""
        with torch.no_grad():
            return self._run(inputs, keywords, target, training=False)

    def _run(self, inputs: tuple[Any, ...], keywords: dict[str, Any], target: Any, *, training: bool) -> torch.Tensor:
        if inputs and keywords:
            raise UsageError("give the inputs by position or by keyword, as example_batch does, not both")
        given: Inputs = keywords or inputs
        runner = self._runner(given, training=training)
        losses = runner.backward(*runner.split(given, target))
        loss = (
            torch.stack([value.detach() for value in losses]).sum() if losses else torch.zeros((), device=self.device)
        )
        dist.all_reduce(loss)  # of a two-way pipeline two ranks have a part, else one has it all
        return loss

    def _runner(self, inputs: Inputs, *, training: bool) -> Runner:
        """The stages for training or for evaluation, captured once each: a graph holds its mode."""
        if training in self._runners:
            return self._runners[training]
        was_training = self.model.training
        self.model.train(training)
        example = rows(inputs, 0, max(self.plan.micro_batch, min(2, self.plan.global_batch)))
        captured = capture(self.model, example)
        self.model.train(was_training)
        layers = [layer for stage in self.plan.parts for layer in stage.layers]
        found = [layer.name for layer in captured.layers]
        if training and found != layers:
            raise ModelError(f"the model has {len(found)} layers {found[:3]} …, the plan is for {layers[:3]} …")
        recompute = [found.index(name) for stage in self.plan.parts for name in stage.recompute if training]
        self._runners[training] = Runner(
            captured,
            self.plan.schedule.parsed(),
            self._cuts(found, layers),
            micro_batch=self.plan.micro_batch,
            loss_fn=self._loss_fn,
            device=self.device,
            recompute=recompute,
            training=training,
        )
        return self._runners[training]

    def _cuts(self, found: list[str], planned: list[str]) -> list[int]:
        """The plan's cuts in a graph that may lack layers (dropout in eval mode): before the next layer that it has."""
        starts = []
        for cut in self.plan.cuts:
            following = [name for name in planned[cut:] if name in found]
            starts.append(found.index(following[0]) if following else len(found))
        return starts

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, each once."""
        seen: set[int] = set()
        for module in self._stages():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer. The model must have been captured: see ``example_inputs``."""
        return (parameter for _, parameter in self.named_parameters())

    def _stages(self) -> list[nn.Module]:
        if True not in self._runners:
            raise UsageError(
                "the pipeline has no stages yet: give build(…, example_inputs=…) or take a step before its parameters"
            )
        return list(self._runners[True].modules)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part of the model's state_dict, under the model's own names."""
        return {name: value for module in self._stages() for name, value in module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part from a whole model's state_dict, or any that holds it. Raises ModelError if not."""
        for module in self._stages():
            own = module.state_dict()
            missing = [name for name in own if name not in state]
            if missing:
                raise ModelError(
                    f"the state_dict lacks {len(missing)} of this rank's {len(own)} tensors: {missing[:3]} …"
                )
            module.load_state_dict({name: state[name] for name in own})

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state_dict on rank 0, in the model's order; empty on other ranks. All ranks call it."""
        own = {name: value.cpu() for name, value in self.state_dict().items()}
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, parts)
        if parts is None:
            return {}
        merged = {name: value for part in parts for name, value in part.items()}
        names = self._canonical_names()
        return {name: merged[names.get(name, name)] for name in self.model.state_dict()}

    def _canonical_names(self) -> dict[str, str]:
        """The other names of tied parameters -> the name that the stages use."""
        first: dict[int, str] = {}
        values = self.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(value), name) for name, value in values}

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; the norm before."""
        counted = [p for name, p in self.named_parameters() if p.grad is not None and self._counts_here(name)]
        squares = torch.stack([p.grad.double().square().sum() for p in counted if p.grad is not None] or [_zero(self)])
        total = squares.sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm.float()

    def _counts_here(self, name: str) -> bool:
        """A parameter that several ranks hold counts on the first of them."""
        for tie in self.plan.ties:
            if tie.name == name:
                return dist.get_rank() == min(self.plan.schedule.placement[stage] for stage in tie.stages)
        return True

    def close(self) -> None:
        """Leave the process group, if it was made here."""
        if self._group_made:
            dist.destroy_process_group()


def _zero(pipeline: Pipeline) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=pipeline.device)


def _join(plan: Plan) -> bool:
    """Make the default process group where there is none; the number of processes must be the plan's."""
    made = not dist.is_initialized()
    if made:
        if "RANK" not in os.environ:
            ranks = plan.depth * plan.replicas
            raise UsageError(f"no process group: start the script with torchrun --nproc-per-node {ranks}")
        on_gpu = torch.cuda.is_available() and not plan.device.startswith("cpu")
        if on_gpu:
            torch.cuda.set_device(own_device("cuda"))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    keep_freed_memory()
    hurry_messages()
    found, wanted = dist.get_world_size(), plan.depth * plan.replicas
    if found != wanted:
        raise UsageError(
            f"{found} processes were started, the plan is for {wanted}: torchrun --nproc-per-node {wanted}"
        )
    return made
