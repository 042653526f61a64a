"""A model of the zoo twice, one of them captured: kept in a process, and begun anew for every run on it.

Capturing a model takes as long as many steps of it, so ranks that stay alive do it once a model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopipe.core.reduction import Reduction
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.restoring import same_attributes
from autopipe.runtime.checking.reduction import find_reduction
from autopipe.runtime.workload import SEED, Workload
from tests.models import ZOO


def opened(name: str) -> Workload:
    """A model of the zoo, always the same."""
    case = ZOO[name]
    torch.manual_seed(SEED)
    return Workload(name, case.build_model(), case.example_batch, case.loss_fn)


@dataclass(frozen=True)
class Twin:
    """A captured model, its reference for one process, the values that both begin with, and how the loss adds up.

    ``size`` is the micro-batch that it was captured with.
    """

    workload: Workload
    reference: Workload
    captured: Captured
    reduction: Reduction
    size: int
    begun: tuple[torch.Tensor, ...]

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Both as they were built, meanwhile and afterwards: parameters, buffers, gradients, plain attributes."""
        with same_attributes(self.workload.model), same_attributes(self.reference.model):
            self._restore()
            try:
                yield
            finally:
                self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for each in (self.workload, self.reference):
            for tensor, value in zip(_tensors(each), self.begun, strict=True):
                tensor.copy_(value)
            each.model.zero_grad()


@functools.lru_cache(maxsize=1)
def twin(name: str) -> Twin:
    """A model of the zoo and its reference; the last one asked for is kept."""
    size = 4 if ZOO[name].fixed else 2
    workload, reference = opened(name), opened(name)
    inputs, target = workload.batch(size)
    captured = capture(workload.model, inputs, loss=lambda made: workload.loss(made, target))
    reduction, _ = find_reduction(opened(name), captured.dtype)
    begun = tuple(tensor.clone() for tensor in _tensors(workload))
    return Twin(workload, reference, captured, reduction, size, begun)


def _tensors(workload: Workload) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (*workload.model.parameters(), *workload.model.buffers())]
