"""A plan in a user's own training loop, under torchrun:

pipeline = autopipe.load("plan.json").build(model, loss_fn, example_inputs=inputs, example_target=target)
optimizer = torch.optim.AdamW(pipeline.parameters())
for inputs, target in batches:
    loss = pipeline.step(*inputs, target=target)     # every rank gets the batch's loss
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.plan import Plan
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.torch_private import tree_unflatten
from autopipe.runtime.capture.weightless import is_weightless
from autopipe.runtime.own.checkpoint import merged
from autopipe.runtime.own.pipemare import PipeMare
from autopipe.runtime.own.training import Scheduler, Training
from autopipe.runtime.ranks.devices import device_for, own_device
from autopipe.runtime.ranks.host import keep_freed_memory
from autopipe.runtime.running import optimizer_state
from autopipe.runtime.running.batches import check_size
from autopipe.runtime.running.forms import Agreement, form_of, repeated
from autopipe.runtime.running.joining import join
from autopipe.runtime.running.piecewise import planned_optimizer
from autopipe.runtime.running.replicas import Replica, require_equal
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.stages.filling import Filling
from autopipe.runtime.workload import Inputs, batch_size, check_loss, check_model, to_device

MOST_FORMS = 8
"""Graphs that are kept, each for one form of batch (a sequence length) in one mode."""
_NOT_GIVEN: Any = object()


class _Key(NamedTuple):
    """What a graph is for: training or evaluation, autocast's dtype or nothing, and the form of the batch."""

    training: bool
    autocast: torch.dtype | None
    form: str


class Pipeline:
    """This rank's part of a planned model.

    The model is the whole one, as its author wrote it, built alike on every rank; the stages hold its own
    parameters under its own names. It may be without memory, on the meta device or from ``autopipe.without_weights``:
    then only this rank's tensors are made, from ``checkpoint`` (safetensors: a file or a folder) or as the model
    would. A checkpoint is loaded into a model with memory too.

    It is captured from ``example_inputs`` (a tuple or a dict; with ``example_target``, outputs that the loss does not
    read are not computed), or at the first step, and once more for each other form of batch. Every rank is given the
    whole global batch; each replica runs its part. Gradients accumulate over steps until the optimizer clears them.
    Random numbers, dropout's, are drawn from each rank's own generator.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        example_inputs: Inputs | None = None,
        example_target: Any = _NOT_GIVEN,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.plan = require_equal(plan)
        self._group_made = _join(plan)
        self.device = own_device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self.model = _placed(check_model(model, type(model).__name__, "the model"), self.device)
        self._replica = Replica.join(plan.depth, plan.replicas)
        self._agreement = Agreement()
        self._loss_fn = loss_fn
        self._filling = Filling(self.model, checkpoint, self.device)
        self._names = _first_names(self.model)
        self._runners: dict[_Key, Runner] = {}
        self._trained: Runner | None = None
        self._training: Training | None = None
        self._resumed: Mapping[str, Any] = {}
        if example_inputs is not None:
            self._runner(example_inputs, example_target, training=True)

    def step(self, *inputs: Any, target: Any = None, **keywords: Any) -> torch.Tensor:
        """Forward and backward of one global batch, or a short one; gradients are added to ``.grad``.

        The batch's loss, on every rank. Raises UsageError when the batch has more rows than the plan's, or differs
        between ranks; ModelError when the model does not take it.
        """
        return self._run(_given(inputs, keywords), target, training=True)

    def train(
        self,
        batches: Iterable[tuple[Inputs, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        updates: int | None = None,
        scheduler: Scheduler | None = None,
        max_norm: float | None = None,
        flush: bool = False,
        mitigation: PipeMare | None = None,
    ) -> list[float]:
        """Updates without a flush, by an asynchronous plan: the mean loss of each, on every rank.

        Each of the ``batches``, an (inputs, target) of the global batch's size, is one update; ``updates`` is their
        number where they have no length. The pipeline is filled at the beginning and drained at the end: then all
        ranks hold the newest weights, to be saved. ``optimizer`` takes this rank's parameters; ``scheduler`` steps
        after each update. ``max_norm`` clips gradients by the norm that is known without a flush (own/norms.py). With
        ``flush`` each update waits for the one before, as in a synchronous pipeline. ``mitigation`` is PipeMare's, and
        counts from the first call, of a resumed run too. Raises UsageError where the plan is not asynchronous,
        or has replicas, and for a short batch.
        """
        count = len(batches) if updates is None and isinstance(batches, Sized) else updates
        if count is None:
            raise UsageError("how many updates? Give train(…, updates=N): the batches do not tell their number")
        feed = iter(batches)
        first = next(feed)
        runner = self._runner(*first, training=True)
        if self._training is None:
            self._training = Training(runner.schedule, runner.own_executor(), mitigation)
            if self._resumed:
                self._training.load_state_dict(self._resumed)
        begun = runner.whole(*first)  # here, so that every rank refuses a wrong one
        split = chain([begun], (runner.whole(*each) for each in feed))
        return self._training.run(split, count, optimizer, scheduler=scheduler, max_norm=max_norm, flush=flush)

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """All that a resumed run needs, by the model's own names, on rank 0; empty on other ranks. All ranks call it.

        Of an asynchronous plan to be taken between two calls of ``train``, when the pipeline is drained.
        """
        parts = self._gathered(self._training.state_dict() if self._training else dict(self._resumed))
        state = {"model": self.full_state_dict(), "optimizer": self.full_optimizer_state_dict(optimizer)}
        return {**state, "training": merged(parts)} if parts else {}

    def resume(self, optimizer: torch.optim.Optimizer, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a whole checkpoint; the plan may have other cuts. Raises ModelError or UsageError."""
        self.load_state_dict(checkpoint["model"])
        self.load_optimizer_state_dict(optimizer, checkpoint["optimizer"])
        self._training, self._resumed = None, checkpoint["training"]

    def evaluate(self, *inputs: Any, target: Any = None, **keywords: Any) -> torch.Tensor:
        """The loss of one global batch, or a short one, with the model in eval mode, no gradients; on every rank."""
        with torch.no_grad():
            return self._run(_given(inputs, keywords), target, training=False)

    def predict(self, *inputs: Any, **keywords: Any) -> Any:
        """What the model returns in eval mode for one global batch, or a short one: on rank 0, on the CPU; else None.

        Tensors with a row for each sample are put together; a loss in the output becomes the mean over rows.
        """
        given = _given(inputs, keywords)
        with torch.no_grad():
            runner = self._runner(given, _NOT_GIVEN, training=False)
            made = runner.outputs(runner.split(given, None))
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(to_device(made, torch.device("cpu")), parts)
        if parts is None:
            return None
        leaves = join([output for part in parts for output in part], runner.captured.growing_outputs())
        return tree_unflatten(leaves, runner.captured.program.spec)

    def _run(self, given: Inputs, target: Any, *, training: bool) -> torch.Tensor:
        runner = self._runner(given, target, training=training)
        losses = runner.backward(runner.split(given, target))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total)
        return total if self.plan.dtype == "float64" else total.float()

    def _runner(self, given: Inputs, target: Any, *, training: bool) -> Runner:
        """The stages for a form of batch, made once each: a graph holds its mode and its shapes."""
        size, plan = batch_size(given), self.plan
        check_size(size, plan.micro_batch, plan.micro_batches, plan.replicas, fixed=False)
        key = _Key(training, _autocast(self.device), form_of(given))
        self._agreement.on(f"{size} rows of {key.form}, {'training' if training else 'evaluation'}")
        if key not in self._runners:
            if len(self._runners) == MOST_FORMS:
                known = "; ".join(sorted({known.form for known in self._runners}))
                raise UsageError(
                    f"this is the form of batch number {MOST_FORMS + 1} ({key.form}): pad to one of {known}"
                )
            self._runners[key] = self._made(given, target, size, training=training)
        if training:
            self._trained = self._trained or self._runners[key]
        return self._runners[key]

    def _made(self, given: Inputs, target: Any, size: int, *, training: bool) -> Runner:
        captured = self._captured(given, target, size, training=training)
        layers = [layer for stage in self.plan.parts for layer in stage.layers]
        found = [layer.name for layer in captured.layers]
        if training and found != layers:
            raise ModelError(f"the model has {len(found)} layers {found[:3]} …, the plan is for {layers[:3]} …")
        return Runner(
            captured,
            self.plan.schedule.parsed(),
            self._cuts(found, layers),
            micro_batch=self.plan.micro_batch,
            loss_fn=lambda output, target: check_loss(self._loss_fn(output, target), "the model"),
            device=self.device,
            recompute=self.plan.recompute if training else (),
            training=training,
            replica=self._replica,
            reduction=self.plan.reduction,
            fill=self._filling,
        )

    def _captured(self, given: Inputs, target: Any, size: int, *, training: bool) -> Captured:
        rows = max(self.plan.micro_batch, min(2, self.plan.global_batch))
        example, wanted = (to_device(repeated(value, size, rows), self.device) for value in (given, target))
        reads_loss = training and target is not _NOT_GIVEN
        with _mode(self.model, training):
            return capture(self.model, example, loss=(lambda made: self._loss_fn(made, wanted)) if reads_loss else None)

    def _cuts(self, found: list[str], planned: list[str]) -> list[int]:
        """The plan's cuts in a graph that may lack layers (dropout in eval mode): before the next layer that it has."""
        starts = []
        for cut in self.plan.cuts:
            following = [name for name in planned[cut:] if name in found]
            starts.append(found.index(following[0]) if following else len(found))
        return starts

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, each once; a tied one under its first name."""
        seen: set[int] = set()
        for module in self._trained_runner().modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._names.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer. The model must have been captured: see ``example_inputs``."""
        return (parameter for _, parameter in self.named_parameters())

    def _trained_runner(self) -> Runner:
        if self._trained is None:
            raise UsageError(
                "the pipeline has no stages yet: give build(…, example_inputs=…) or take a step before its parameters"
            )
        return self._trained

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part of the model's state_dict, under the model's own names."""
        return {name: value for module in self._trained_runner().modules for name, value in module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part from a whole model's state_dict, or any that holds it. Raises ModelError if not."""
        for module in self._trained_runner().modules:
            own = module.state_dict()
            missing = [name for name in own if self._known(name, state) not in state]
            if missing:
                raise ModelError(
                    f"the state_dict lacks {len(missing)} of this rank's {len(own)} tensors: {missing[:3]} …"
                )
            module.load_state_dict({name: state[self._known(name, state)] for name in own})

    def _known(self, name: str, state: Mapping[str, torch.Tensor]) -> str:
        """The name of a tensor in a state, which may hold a tied one under one of its names only."""
        if name in state:
            return name
        same = [name, *(other for other, first in self._names.items() if first == self._names.get(name, name))]
        return next((other for other in same if other in state), name)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state_dict on rank 0, in the model's order; empty on other ranks. All ranks call it."""
        parts = self._gathered(self.state_dict())
        merged = {name: value for part in parts for name, value in part.items()}
        return {name: merged[self._known(name, merged)] for name in self.model.state_dict()} if parts else {}

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], parameters: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """``make(parameters, **options)``, its state kept as the plan says: with master weights, shared by replicas.

        By default of all of this rank's parameters; else of these, or of groups of them. Where the state is kept
        otherwise than by ``make`` itself, that must treat every element alike, as SGD, Adam and AdamW do.
        """
        held = self.parameters() if parameters is None else parameters
        return planned_optimizer(self.plan.update, held, make, options, self._replica.peers)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> optimizer_state.State:
        """This rank's part of the optimizer's state, by the model's own names; see runtime/running/optimizer_state.py.

        Where replicas share it out it is put together: all ranks call it.
        """
        return optimizer_state.named_state(optimizer, {p: name for name, p in self.named_parameters()})

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> optimizer_state.State:
        """The optimizer's state of the whole model on rank 0; empty on other ranks. All ranks call it."""
        parts = self._gathered(self.optimizer_state_dict(optimizer))
        return optimizer_state.merged(parts, [name for name, _ in self.model.named_parameters()]) if parts else {}

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: optimizer_state.State) -> None:
        """Take this rank's part of a whole state, of any cuts or of one process. Raises ModelError if it has none."""
        optimizer_state.load_named_state(optimizer, state, {p: name for name, p in self.named_parameters()})

    def _gathered(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """What the ranks of replica 0 have, on rank 0 and on its CPU; empty elsewhere."""
        if self._replica.index:
            return []
        parts: list[Any] | None = [None] * self._replica.depth if dist.get_rank() == 0 else None
        dist.gather_object(to_device(own, torch.device("cpu")), parts, group=self._replica.group)
        return parts or []

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; the norm before."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.parameters():
            if parameter.grad is not None and self._trained_runner().counts_here(parameter):
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        dist.all_reduce(total, group=self._replica.group)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm.float()

    def close(self) -> None:
        """Leave the process group, if it was made here."""
        if self._group_made:
            dist.destroy_process_group()


def _given(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Inputs:
    if inputs and keywords:
        raise UsageError("give the inputs by position or by keyword, as example_batch does, not both")
    return keywords or inputs


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that is on, if any: it changes those of the boundaries."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or eval mode. Modules that a training model keeps in eval mode stay so."""
    modes = [(module, module.training) for module in model.modules()]
    if model.training is not training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, as far as it has memory."""
    if not is_weightless(model):
        return model.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, under each of its names."""
    first: dict[int, str] = {}
    values = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(value), name) for name, value in values}


def _join(plan: Plan) -> bool:
    """Make the default process group where there is none; the number of processes must be the plan's."""
    made = not dist.is_initialized()
    if made:
        if "RANK" not in os.environ:
            ranks = plan.depth * plan.replicas
            raise UsageError(f"no process group: start the script with torchrun --nproc-per-node {ranks}")
        on_gpu = device_for(plan.device) == "cuda"
        if on_gpu:
            torch.cuda.set_device(own_device("cuda"))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    keep_freed_memory()
    return made
