"""Time every layer as it will run: in a chain, forwards then backwards, on the stages' own graphs, every rank busy.

A rotation times, one after another in one process, the chain of layers, the model as one stage, and the chain with
deferred weight gradients. The chain pays the fixed price of a stage once a layer, the single stage once, so

    price of a stage = (chain − single) / (layers − 1)

which is taken off each layer and becomes the profile's ``overhead_s``. Ranks run their rotations at the same time,
because processes share memory bandwidth and clock: a layer timed alone is several per cent too fast.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopipe.runtime import launch
from autopipe.runtime.capture import Captured
from autopipe.runtime.chain import Chain
from autopipe.runtime.devices import synchronize
from autopipe.runtime.runner import make_optimizer
from autopipe.runtime.unit_bytes import UnitBytes, unit_bytes
from autopipe.runtime.workload import Inputs, to_device

FEWEST_ROUNDS = 3
"""However small the budget: with fewer nobody could say how much the timings vary."""
MIN_ROUNDS = 5
MAX_ROUNDS = 40
SMALL_ERROR = 0.005
"""Rotations end when the median of the whole model's time is known to this part of itself."""


@dataclass
class Samples:
    """Seconds of each unit of the chain, a list a rotation, by what was timed (forward, backward, …)."""

    units: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    single: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: list[UnitBytes] = field(default_factory=list)

    def median(self, what: str) -> list[float]:
        """The median of each unit."""
        return [float(value) for value in np.median(np.asarray(self.units[what]), axis=0)]

    def pairs(self) -> list[tuple[list[float], list[float]]]:
        """Each unit's forwards and backwards, a value a rotation."""
        forward, backward = np.asarray(self.units["forward"]), np.asarray(self.units["backward"])
        return [(list(forward[:, unit]), list(backward[:, unit])) for unit in range(forward.shape[1])]

    def totals(self) -> list[float]:
        """Forward and backward of the whole model as one stage, a value a rotation."""
        return [f + b for f, b in zip(self.single["forward"], self.single["backward"], strict=True)]


class LayerTimer:
    """Takes samples of every unit between ``cuts`` at several micro-batch sizes, a rotation at a time.

    ``batches`` maps a size to one example (inputs, target). All ranks must rotate together.
    """

    def __init__(
        self,
        captured: Captured,
        cuts: Sequence[int],
        batches: Mapping[int, tuple[Inputs, Any]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: str,
        device: torch.device,
    ) -> None:
        self.samples = {size: Samples() for size in batches}
        ranges = list(pairwise([0, *cuts, len(captured.layers)]))
        self._chain = Chain(captured, ranges, loss_fn, device)
        self._deferred = Chain(captured, ranges, loss_fn, device, deferred=True)
        self._single = Chain(captured, [(0, len(captured.layers))], loss_fn, device)
        self._steppers = [make_optimizer(optimizer, list(unit.parameters()), lr=0.0) for unit in self._chain.units]
        self._whole_stepper = make_optimizer(optimizer, list(self._single.units[0].parameters()), lr=0.0)
        self._ready = {
            size: (to_device(captured.bind(inputs), device), to_device(target, device))
            for size, (inputs, target) in batches.items()
        }

    def warm_up(self) -> None:
        """Run everything once, as the first run of a layer may take twice its time, and count bytes."""
        for size, (inputs, target) in self._ready.items():
            launch.beat.phase(f"warm-up at micro-batch {size}")
            for each in (self._chain, self._deferred, self._single):
                each.run(inputs, target)
            self.samples[size].bytes = unit_bytes(self._chain, self._deferred, inputs, target)
        for stepper in (*self._steppers, self._whole_stepper):
            stepper.step()

    def rotate(self) -> None:
        """One sample of everything."""
        self._keep_gradients()
        for size, (inputs, target) in self._ready.items():
            dist.barrier()
            samples = self.samples[size]
            for what, seconds in self._chain.run(inputs, target).items():
                samples.units[what].append(seconds)
            for what, seconds in self._deferred.run(inputs, target).items():
                if what != "forward":
                    samples.units[what].append(seconds)
            for what, seconds in self._single.run(inputs, target).items():
                samples.single[what].append(seconds[0])
            samples.units["optimizer"].append([self._step_s(stepper) for stepper in self._steppers])
            samples.single["optimizer"].append(self._step_s(self._whole_stepper))

    def _keep_gradients(self) -> None:
        """Backwards add to gradients that are there, as all but the first of a step do."""
        for parameter in self._single.units[0].parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _step_s(self, stepper: torch.optim.Optimizer) -> float:
        """Seconds of one optimizer step with a learning rate of 0: all the work, and the model stays as it is."""
        clock = self._chain.clock
        start = clock.mark()
        stepper.step()
        end = clock.mark()
        synchronize(clock.device)
        return clock.seconds(start, end)


def measure(timer: LayerTimer, budget_s: float, device: torch.device) -> dict[int, Samples]:
    """Rotate in step with the other ranks until the medians are known well enough or the budget ends."""
    timer.warm_up()
    begun, done, spent = time.monotonic(), 0, 0.0
    while True:
        launch.beat.phase(f"layers timed {done} times, {spent:.0f} of at most {budget_s:.0f} s")
        timer.rotate()
        done += 1
        spent = time.monotonic() - begun
        over = done >= FEWEST_ROUNDS and spent + spent / done > budget_s
        if _all_agree(_enough(timer.samples, done) or over, device):
            return timer.samples


def _enough(samples: Mapping[int, Samples], done: int) -> bool:
    """Whether the whole model's median is known well enough at every size, or enough was tried."""
    if done < MIN_ROUNDS:
        return False
    return done >= MAX_ROUNDS or all(error_of_median(each.totals()) <= SMALL_ERROR for each in samples.values())


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median, as a part of it: 1.253 σ/√n with σ = (q75 − q25)/1.349."""
    return 1.253 * spread(values) / 1.349 / math.sqrt(len(values))


def spread(values: Sequence[float]) -> float:
    """(q75 − q25) / median."""
    low, middle, high = (float(q) for q in np.quantile(np.asarray(values), [0.25, 0.5, 0.75]))
    return (high - low) / middle if middle else 0.0


def _all_agree(flag: bool, device: torch.device) -> bool:
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes)
    return int(votes.item()) == dist.get_world_size()


def pooled(parts: Sequence[Samples]) -> Samples:
    """The samples of several ranks as one."""
    result = Samples(bytes=parts[0].bytes)
    for part in parts:
        for what, rows in part.units.items():
            result.units[what].extend(rows)
        for what, values in part.single.items():
            result.single[what].extend(values)
    return result


def stage_price_s(samples: Samples, what: str) -> float:
    """Seconds that a stage costs beyond its layers, from the chain against the single stage.

    No more than the cheapest unit took: that unit paid it too.
    """
    units = samples.median(what)
    if len(units) < 2:
        return 0.0
    chain = statistics.median(sum(row) for row in samples.units[what])
    price = (chain - statistics.median(samples.single[what])) / (len(units) - 1)
    return max(0.0, min(price, *units))
