"""One rank's row of an action table, action by action: compute, messages, optimizer steps.

The counterpart of torch_ir.TorchRuntime for tables that torch's runtime cannot run. Of an asynchronous table it follows
core/versions.py, which says what weights a micro-batch meets, and notes what each one met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.schedule import Action, Op, Schedule
from autopipe.core.versions import last_uses, uses
from autopipe.runtime.own.messages import Messages, Tensors
from autopipe.runtime.own.norms import Norms
from autopipe.runtime.own.weights import Newest, Versions
from autopipe.runtime.ranks import launch
from autopipe.runtime.tables.recorder import Recorder
from autopipe.runtime.tables.sent import Key
from autopipe.runtime.tables.torch_ir import Runnable

LossFn = Callable[[Any, Any], torch.Tensor]


class Feed(Protocol):
    """Where a stage gets a micro-batch's inputs and target from."""

    def __call__(self, micro_batch: int, /) -> tuple[dict[str, torch.Tensor], Any]:
        """The bound inputs and the target."""


class Met(NamedTuple):
    """What a micro-batch met in a stage: the versions of the weights in its forward and its backward."""

    stage: int
    micro_batch: int
    forward: int
    backward: int


class _Flight(NamedTuple):
    """A micro-batch between forward and backward: what it received, what it made (the loss, in the last stage)."""

    received: Tensors
    made: Tensors
    version: int


class Executor:
    """This rank's stages, by number, and what runs them.

    ``loss_fn(flat outputs, target) -> scalar`` runs in the last stage of a replica.
    """

    def __init__(
        self,
        modules: Mapping[int, Runnable],
        micro_batch: int,
        device: torch.device,
        loss_fn: LossFn,
        recorder: Recorder,
        *,
        training: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.modules = {stage: _module(module) for stage, module in modules.items()}
        self.recorder = recorder
        self.training = training
        self.met: list[Met] = []
        self._runnable = modules
        self._device, self._loss_fn, self._group = device, loss_fn, group
        self.receives = {stage: module.input_args(micro_batch) for stage, module in modules.items()}
        self._sends = {stage: module.output_args(micro_batch) for stage, module in modules.items()}
        self._run: _Run | None = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        seen: dict[int, nn.Parameter] = {}
        for module in self.modules.values():
            for parameter in module.parameters():
                seen.setdefault(id(parameter), parameter)
        return seen.values()

    def run(
        self,
        schedule: Schedule,
        feed: Feed,
        *,
        versions: Mapping[int, Versions] | None = None,
        step: Callable[[Action], None] | None = None,
        norms: Norms | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run a table; the losses by micro-batch, on ranks with a last stage.

        Where the table is asynchronous, ``versions`` are those of each stage's weights, and ``step`` the optimizer's.
        """
        more = norms.like() if norms else ()
        receives = {s: (*received, *more) for s, received in self.receives.items()}
        returns = {s: (*(t for t in sent if t.requires_grad), *more) for s, sent in self._sends.items()}
        messages = Messages(schedule, self.rank, receives, returns, self._device, self._group)
        self._run = _Run(self, schedule, messages, feed, versions or {}, step, norms)
        try:
            return self._run.row()
        finally:
            self._run = None

    def forward(
        self, stage: int, received: Tensors, inputs: dict[str, torch.Tensor], weights: Versions | None, number: int
    ) -> Tensors:
        """A stage's outputs, with a version of its weights in the place of its parameters."""
        module = self.modules[stage]
        if weights is None:
            return _tensors(module(*received, **inputs))
        if isinstance(weights, Newest):
            with weights.by_name():
                return _tensors(torch.func.functional_call(module, weights[number], received, inputs))
        return _tensors(torch.func.functional_call(module, weights[number], received, inputs))

    def loss(self, outputs: Tensors, target: Any, weights: Versions | None) -> torch.Tensor:
        """The loss of a last stage's outputs."""
        if isinstance(weights, Newest):
            with weights.by_name():
                return self._loss_fn(outputs, target)
        return self._loss_fn(outputs, target)

    def puts_off(self, stage: int) -> bool:
        """Whether the stage's backwards put weight gradients off."""
        return self._runnable[stage].deferred

    def put_off(self, stage: int) -> Callable[[], None]:
        """The weight gradients that the stage's last backward put off."""
        return self._runnable[stage].weight_backward()


class _Run:
    """One run of a table."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        messages: Messages,
        feed: Feed,
        versions: Mapping[int, Versions],
        step: Callable[[Action], None] | None,
        norms: Norms | None,
    ) -> None:
        self.executor, self.schedule, self.messages = executor, schedule, messages
        self.feed, self.versions, self.step, self.norms = feed, versions, step, norms
        self.uses = uses(schedule) if schedule.asynchronous else {}
        self.last = last_uses(schedule, executor.rank) if schedule.asynchronous else {}
        self.first = {stage: held.newest for stage, held in versions.items()}
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.later: dict[tuple[int, int], Callable[[], None]] = {}
        self.losses: dict[int, torch.Tensor] = {}

    def row(self) -> dict[int, torch.Tensor]:
        """Every action of this rank."""
        for place, action in enumerate(self.schedule.order[self.executor.rank]):
            if action.op is Op.F:
                self._forward(action)
            elif action.op is Op.W:
                self._weight(action)
            elif action.op is Op.O:
                self._step(action, place)
            else:
                self._backward(action)
        self.messages.finish()
        return self.losses

    def _take(self, key: Key) -> Tensors:
        taken = self.messages.take(key)
        if self.norms is None:
            return taken
        self.norms.hear(taken[-1])
        return taken[:-1]

    def _send(self, key: Key, tensors: Tensors) -> None:
        self.messages.send(key, (*tensors, self.norms.told()) if self.norms else tensors)

    def _timed(self, action: Action, work: Callable[[], None]) -> None:
        self.executor.recorder.timed(action, work)
        launch.beat(f"a wait after {action}", waiting=True)

    def _forward(self, action: Action) -> None:
        stage, _, batch = action
        first, last = self.schedule.is_first(stage), self.schedule.is_last(stage)
        received = () if first else self._received(stage, batch)
        inputs, target = self.feed(batch)
        weights = self.versions.get(stage)
        number = self.first.get(stage, 0) + (self.uses[stage, batch].forward if self.uses else 0)
        made: list[torch.Tensor] = []

        def work() -> None:
            outputs = self.executor.forward(stage, received, inputs, weights, number)
            made.extend((self.executor.loss(outputs, target, weights),) if last else outputs)

        self._timed(action, work)
        if last:
            self.losses[batch] = made[0].detach()
        else:
            self._send(Key(stage + 1, Op.F, batch), tuple(value.detach() for value in made))
        if self.executor.training:
            number = weights.newest if isinstance(weights, Newest) else number
            self.flights[stage, batch] = _Flight(received, tuple(made), number)

    def _received(self, stage: int, batch: int) -> Tensors:
        """What has come for a stage, as leaves of its own graph."""
        like = self.executor.receives[stage]
        taken = self._take(Key(stage, Op.F, batch))
        needs = self.executor.training
        return tuple(t.requires_grad_(needs and meta.requires_grad) for t, meta in zip(taken, like, strict=True))

    def _backward(self, action: Action) -> None:
        stage, _, batch = action
        last = self.schedule.is_last(stage)
        given = () if last else self._take(Key(stage, Op.B, batch))
        flight = self.flights.pop((stage, batch))
        values = [value for value in flight.made if value.requires_grad]
        gradients = [None] if last else list(given)
        weights = self.versions.get(stage)

        def work() -> None:
            if values:
                torch.autograd.backward(values, gradients)
            if action.op is Op.B and self.executor.puts_off(stage):
                self.executor.put_off(stage)()

        self._timed(action, work)
        if action.op is Op.I:
            self.later[stage, batch] = self.executor.put_off(stage)
        if weights is not None:
            weights.gather(flight.version)
            self._note(action, flight, weights)
            if self.norms and (batch + 1) % self.schedule.per_update == 0:
                self.norms.note(stage, batch // self.schedule.per_update, weights)
        if not self.schedule.is_first(stage):
            self._send(Key(stage - 1, Op.B, batch), _gradients(flight.received))

    def _note(self, action: Action, flight: _Flight, weights: Versions) -> None:
        backward = weights.newest if isinstance(weights, Newest) else flight.version
        first = self.first[action.stage]
        met = Met(action.stage, action.micro_batch, flight.version - first, backward - first)
        self.executor.met.append(met)

    def _weight(self, action: Action) -> None:
        self._timed(action, self.later.pop((action.stage, action.micro_batch)))
        weights = self.versions.get(action.stage)
        if weights is not None:
            weights.gather(self.first[action.stage] + self.uses[action.stage, action.micro_batch].backward)

    def _step(self, action: Action, place: int) -> None:
        assert self.step is not None, "an asynchronous table needs its optimizer's step"
        stage, first, step = action.stage, self.first[action.stage], self.step
        needed = {first + n for (where, n), at in self.last.items() if where == stage and at > place}
        self._timed(action, lambda: self.versions[stage].update(lambda: step(action), needed))


def _gradients(received: Tensors) -> Tensors:
    """The gradients to send back; zeros where the stage did not use a value."""
    return tuple(torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in received if t.requires_grad)


def _tensors(value: Any) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def _module(module: Runnable) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module
