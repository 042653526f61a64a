"""Time every layer as it will run: in a chain, forwards then backwards, on the stages' own graphs, every rank busy.

A rotation times, one after another in one process, the chain of layers, the model as one stage, and the chain with
deferred weight gradients. The chain pays the fixed price of a stage once a layer, the single stage once, so

    price of a stage = (chain − single) / (layers − 1)

which is taken off each layer and becomes the profile's ``overhead_s``. Of equal layers a few are run (see sampling),
and in the place of the single stage as few stages as those can be put together to; where the few differ by more than
their own noise, more are run. Ranks run their rotations at the same time,
because processes share memory bandwidth and clock: a layer timed alone is several per cent too fast.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopipe.core.errors import ModelError
from autopipe.core.profile import Jitter
from autopipe.core.spread import error_of_median, spread
from autopipe.runtime.capture import Captured
from autopipe.runtime.measuring.sampling import INSTANCES, sample
from autopipe.runtime.measuring.unit_bytes import UnitBytes, unit_bytes
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import synchronize
from autopipe.runtime.running.runner import make_optimizer
from autopipe.runtime.stages.chain import Chain
from autopipe.runtime.workload import Inputs, to_device

FEWEST_ROUNDS = 3
"""However small the budget: with fewer nobody could say how much the timings vary."""
MIN_ROUNDS = 5
MAX_ROUNDS = 40
SMALL_ERROR = 0.005
"""Rotations end when the median of the whole model's time is known to this part of itself."""
TOLD_S = 10.0
"""How often the user is told how far it is."""


_PIECE = 0.05
_PARTS = 20
"""Quantiles that are kept of how much equal work varied."""

ALIKE = 0.05
"""Units of a kind whose medians differ by more than this part, and by more than their noise, are not taken as one."""


@dataclass
class Samples:
    """Seconds of each unit that was run, a list a rotation, by what was timed (forward, backward, …).

    ``places`` are for each unit of the model those of its kind among the units that were run. ``single`` are the
    seconds of the same layers in ``stages`` stages, a sum a rotation. ``bytes`` are those of the units that were run.
    """

    places: list[list[int]]
    stages: int = 1
    units: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    single: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: list[UnitBytes] = field(default_factory=list)

    def median(self, what: str) -> list[float]:
        """The median of each unit of the model: of all rotations of its kind."""
        columns = np.asarray(self.units[what])
        return [float(np.median(columns[:, places])) for places in self.places]

    def run_median(self, what: str) -> list[float]:
        """The median of each unit that was run."""
        return [float(value) for value in np.median(np.asarray(self.units[what]), axis=0)]

    def spreads(self) -> list[float]:
        """The spread of forward + backward of each unit of the model, over the rotations of its kind."""
        both = np.asarray(self.units["forward"]) + np.asarray(self.units["backward"])
        return [spread(list(both[:, places].ravel())) for places in self.places]

    def totals(self) -> list[float]:
        """Forward and backward of all that was run, in as few stages as can be, a value a rotation."""
        return [f + b for f, b in zip(self.single["forward"], self.single["backward"], strict=True)]

    def bytes_of(self, unit: int) -> UnitBytes:
        """The bytes of a unit of the model."""
        return self.bytes[self.places[unit][0]]

    def alike(self) -> bool:
        """Whether the units of each kind that were run take the same time, as far as their noise can tell."""
        both = np.asarray(self.units["forward"]) + np.asarray(self.units["backward"])
        for places in {tuple(places) for places in self.places if len(places) > 1}:
            medians = np.median(both[:, places], axis=0)
            noise = max(error_of_median(list(both[:, place])) for place in places)
            if (medians.max() - medians.min()) / np.median(medians) > max(ALIKE, 4 * noise):
                return False
        return True


class LayerTimer:
    """Takes samples of the units between ``cuts`` at several micro-batch sizes, a rotation at a time.

    ``batches`` maps a size to one example (inputs, target). ``instances`` units of a kind are run, None for all. All
    ranks must rotate together. Sizes for which the device has too little memory are dropped, and are ``too_large``.
    """

    def __init__(
        self,
        captured: Captured,
        cuts: Sequence[int],
        batches: Mapping[int, tuple[Inputs, Any]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: str,
        device: torch.device,
        instances: int | None = INSTANCES,
    ) -> None:
        self.sampling = sample(captured, cuts, instances)
        ranges, merged = self.sampling.run_ranges, self.sampling.merged_ranges
        places = [self.sampling.instances(unit) for unit in range(len(self.sampling.ranges))]
        self.samples = {size: Samples(places, len(merged)) for size in batches}
        self.too_large: list[int] = []
        self._device = device
        self._chain = Chain(captured, ranges, loss_fn, device)
        self._deferred = Chain(captured, ranges, loss_fn, device, deferred=True)
        self._single = Chain(captured, merged, loss_fn, device)
        self._steppers = [make_optimizer(optimizer, list(unit.parameters()), lr=0.0) for unit in self._chain.units]
        self._whole_steppers = [make_optimizer(optimizer, list(u.parameters()), lr=0.0) for u in self._single.units]
        self._ready = {
            size: (to_device(captured.bind(inputs), device), to_device(target, device))
            for size, (inputs, target) in batches.items()
        }

    def warm_up(self) -> None:
        """Run everything once, as the first run of a layer may take twice its time, and count bytes."""
        for size in sorted(self._ready):
            launch.beat.phase(f"warm-up at micro-batch {size}")
            if not all_agree(self._fits(size), self._device):
                self.too_large.append(size)
                del self._ready[size], self.samples[size]
        if not self._ready:
            raise ModelError(
                f"the device has too little memory for micro-batches of {min(self.too_large)}: profile less"
            )
        for stepper in (*self._steppers, *self._whole_steppers):
            stepper.step()

    def _fits(self, size: int) -> bool:
        """Run a size once and count its bytes; False where the device has too little memory for it."""
        inputs, target = self._ready[size]
        try:
            for each in (self._chain, self._deferred, self._single):
                each.run(inputs, target)
            self.samples[size].bytes = unit_bytes(self._chain, self._deferred, inputs, target)
        except Exception as error:
            if not _lacked_memory(error):
                raise
            return False
        return True

    def rotate(self, sizes: Collection[int] | None = None) -> None:
        """One sample of everything, at some sizes or at all."""
        self._keep_gradients()
        for size, (inputs, target) in self._ready.items():
            if sizes is not None and size not in sizes:
                continue
            dist.barrier()
            samples = self.samples[size]
            for what, seconds in self._chain.run(inputs, target).items():
                samples.units[what].append(seconds)
            for what, seconds in self._deferred.run(inputs, target).items():
                if what != "forward":
                    samples.units[what].append(seconds)
            for what, seconds in self._single.run(inputs, target).items():
                samples.single[what].append(sum(seconds))
            samples.units["optimizer"].append([self._step_s(stepper) for stepper in self._steppers])
            samples.single["optimizer"].append(sum(self._step_s(stepper) for stepper in self._whole_steppers))

    def _keep_gradients(self) -> None:
        """Backwards add to gradients that are there, as all but the first of a step do."""
        for parameter in (p for unit in self._single.units for p in unit.parameters()):
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


def _lacked_memory(error: BaseException) -> bool:
    """Whether an error, or what it came from, is a lack of memory."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def measure(timer: LayerTimer, sizes: Sequence[int], budget_s: float, device: torch.device) -> None:
    """Rotate in step with the other ranks until the medians are known well enough or the budget ends.

    After the first rounds the budget goes to the sizes whose medians are not known well enough yet.
    """
    begun, done, spent, told = time.monotonic(), 0, 0.0, -TOLD_S
    while sizes:
        if spent - told >= TOLD_S:
            told, what = spent, f"timing layers at micro-batch {', '.join(map(str, sizes))}"
            launch.beat.phase(f"{what}: round {done + 1}, at most {max(0.0, budget_s - spent):.0f} s left")
        launch.beat("the timing of layers")
        timer.rotate(sizes)
        done += 1
        spent = time.monotonic() - begun
        if all_agree(done >= FEWEST_ROUNDS and spent + spent / done > budget_s, device):
            break
        sizes = [size for size in sizes if not all_agree(_enough(timer.samples[size]), device)]


def _enough(samples: Samples) -> bool:
    """Whether the median is known well enough, or enough was tried."""
    totals = samples.totals()
    if len(totals) < MIN_ROUNDS:
        return False
    return len(totals) >= MAX_ROUNDS or error_of_median(totals) <= SMALL_ERROR


def all_agree(flag: bool, device: torch.device) -> bool:
    """Whether a flag is set on every rank."""
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes)
    return int(votes.item()) == dist.get_world_size()


def pooled(parts: Sequence[Samples]) -> Samples:
    """The samples of several ranks as one."""
    result = Samples(parts[0].places, parts[0].stages, bytes=parts[0].bytes)
    for part in parts:
        for what, rows in part.units.items():
            result.units[what].extend(rows)
        for what, values in part.single.items():
            result.single[what].extend(values)
    return result


def jitter_of(parts: Collection[Samples]) -> Jitter:
    """How much the seconds of equal work varied over the rotations, at all sizes together.

    Units of less than ``_PIECE`` of the largest are left out: they are too short to be timed one by one.
    """
    ratios, seconds = [], []
    for part in parts:
        for what in ("forward", "backward"):
            columns = np.asarray(part.units[what])
            medians = np.median(columns, axis=0)
            pieces = medians >= _PIECE * medians.max()
            ratios.append((columns[:, pieces] / medians[pieces]).ravel())
            seconds.append(medians[pieces])
    places = (np.arange(_PARTS) + 0.5) / _PARTS
    quantiles = np.quantile(np.concatenate(ratios), places)
    return Jitter(float(np.concatenate(seconds).mean()), tuple(float(value) for value in quantiles))


def stage_price_s(samples: Samples, what: str) -> float:
    """Seconds that a stage costs beyond its layers, from the chain against as few stages as can be.

    No more than the cheapest unit took: that unit paid it too.
    """
    units = samples.run_median(what)
    if len(units) <= samples.stages:
        return 0.0
    chain = statistics.median(sum(row) for row in samples.units[what])
    price = (chain - statistics.median(samples.single[what])) / (len(units) - samples.stages)
    return max(0.0, min(price, *units))
