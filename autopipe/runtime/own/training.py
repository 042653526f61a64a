"""Training without a flush: batches go in, the optimizer steps while other batches are under way, losses come out.

A run fills the pipeline, goes on for a number of updates, and drains it. Before and after a run a stage has one version
of its weights, the model's own parameters; so that is where a checkpoint is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopipe.core.errors import UsageError
from autopipe.core.periodic import for_updates
from autopipe.core.schedule import Action, Schedule
from autopipe.core.versions import delays
from autopipe.runtime.own.executor import Executor
from autopipe.runtime.own.norms import Norms
from autopipe.runtime.own.pipemare import Correction, PipeMare, scaled_lr
from autopipe.runtime.own.weights import Newest, Versions

Split = tuple[Sequence[dict[str, torch.Tensor]], Sequence[Any]]
"""The bound inputs and the targets of one update, a micro-batch each."""


class Scheduler(Protocol):
    """A learning-rate scheduler, as torch has them."""

    def step(self) -> None:
        """The optimizer has stepped."""


class Training:
    """This rank's stage, the versions of its weights, and how many updates it has made."""

    def __init__(self, schedule: Schedule, executor: Executor, mitigation: PipeMare | None = None) -> None:
        if not schedule.asynchronous:
            raise UsageError(f"{schedule.name} flushes after every update: use step() and your optimizer")
        self.schedule, self.executor = schedule, executor
        self.mitigation = (mitigation or PipeMare()) if schedule.weights == "latest" else None
        if mitigation and self.mitigation is None:
            raise UsageError(f"{schedule.name} has each micro-batch's weights: PipeMare's corrections do not apply")
        self.updates = 0
        (self.stage,) = executor.modules
        self.delay = delays(schedule)[self.stage]
        self.weights = (Newest if schedule.weights == "latest" else Versions)(executor.modules[self.stage])
        self.correction = self._made_correction()
        self._norms: Norms | None = None

    def _made_correction(self) -> Correction | None:
        if self.mitigation is None or self.mitigation.decay is None or not self.delay:
            return None
        assert isinstance(self.weights, Newest)
        return Correction(self.weights, self.delay, self.mitigation.decay)

    def run(
        self,
        batches: Iterator[Split],
        updates: int,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | None = None,
        max_norm: float | None = None,
        flush: bool = False,
    ) -> list[float]:
        """That many updates; the mean loss of each, on every rank. With ``flush`` each waits for the one before."""
        if max_norm is None:
            self._norms = None
        elif self._norms is None or self._norms.max_norm != max_norm:
            self._norms = Norms(self.schedule.stages, max_norm)
        warm = updates if flush else min(updates, max(0, self._warm_up - self.updates))
        losses: list[float] = []
        for _ in range(warm):
            losses += self._run(batches, 1, optimizer, scheduler, flushed=True)
        if updates > warm:
            losses += self._run(batches, updates - warm, optimizer, scheduler, flushed=False)
        return losses

    @property
    def _warm_up(self) -> int:
        return self.mitigation.warm_up if self.mitigation else 0

    def _run(
        self,
        batches: Iterator[Split],
        updates: int,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        *,
        flushed: bool,
    ) -> list[float]:
        table = for_updates(self.schedule, updates)
        feed = _Feed(batches, table.per_update)
        if isinstance(self.weights, Newest):
            self.weights.backward = None if flushed else self.correction
        if self._norms:
            self._norms.restart()

        def step(action: Action) -> None:
            self._step(optimizer, scheduler, flushed=flushed)

        found = self.executor.run(table, feed, versions={self.stage: self.weights}, step=step, norms=self._norms)
        return _shared_losses(table, found)

    def _step(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, *, flushed: bool) -> None:
        if self._norms:
            self._norms.clip(self.weights, flushed=flushed)
        with ExitStack() as around:
            if self.correction:
                around.enter_context(self.correction.following())
            if self.mitigation and not flushed:
                factor = self.mitigation.factor(self.delay, self.updates - self._warm_up)
                around.enter_context(scaled_lr(optimizer, factor))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler:
            scheduler.step()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizer: the updates made, and PipeMare's average changes."""
        change = self.correction.change if self.correction else {}
        return {"updates": self.updates, "change": {name: value.clone() for name, value in change.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; of the average changes this rank's are taken.

        A layer has none that was in a stage without delay, as the last one is: its average begins at 0, as in a new
        run.
        """
        self.updates = int(state["updates"])
        for name, value in (self.correction.change if self.correction else {}).items():
            if name in state["change"]:
                value.copy_(state["change"][name])


class _Feed:
    """Batches in order, each kept as long as a forward may ask for it."""

    def __init__(self, batches: Iterator[Split], per_update: int) -> None:
        self._batches, self._size, self._update = batches, per_update, -1
        self._current: Split | None = None

    def __call__(self, micro_batch: int) -> tuple[dict[str, torch.Tensor], Any]:
        update, within = divmod(micro_batch, self._size)
        while self._update < update:
            try:
                self._current = next(self._batches)
            except StopIteration:
                raise UsageError(f"the batches end after {self._update + 1} of this run, more were asked for") from None
            self._update += 1
        assert self._current is not None
        inputs, targets = self._current
        return inputs[within], targets[within]


def _shared_losses(table: Schedule, found: Mapping[int, torch.Tensor]) -> list[float]:
    """The loss of each update, on every rank; the last stage's rank has those of the micro-batches."""
    losses = torch.zeros(table.updates, dtype=torch.float64)
    for batch, loss in found.items():
        losses[batch // table.per_update] += loss.double().cpu()
    dist.broadcast(losses, table.placement[-1])
    return losses.tolist()
