"""Analytic costs: a model without weights, one unit of each kind run without data, a roofline in the clock's place.

An operation takes the longest of its arithmetic at the part of the peak that its class reaches, its traffic at the part
of the memory's speed, and the time of an empty kernel. Bytes are exact: what autograd keeps is counted on tensors that
have shapes and no memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autopipe.core.errors import UsageError
from autopipe.core.hardware import Hardware
from autopipe.core.optimizer import PASSES
from autopipe.core.profile import OPTIMIZER_STATE, CostTable, Layer, LayerCost, Profile
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.torch_private import fake_mode, tree_map
from autopipe.runtime.capture.weightless import building_weightless, stood_in
from autopipe.runtime.measuring.operations import AsOnCuda, Operations
from autopipe.runtime.measuring.profiling import facts_of
from autopipe.runtime.measuring.sampling import Sampling, sample
from autopipe.runtime.measuring.unit_bytes import UnitBytes, unit_bytes
from autopipe.runtime.stages.chain import Chain
from autopipe.runtime.workload import ModelFile, Workload

BAND = 0.30
"""A measured step is expected within this part of the analytic one; benchmarks/analytic.py measures it."""
INSTANCES = 2
"""How many units of a kind are run: equal ones cost the same here, so no more than it takes to join them."""


def analytic_profile(
    model: str,
    hardware: Hardware,
    *,
    micro_batches: Sequence[int] = (1, 2, 4),
    optimizer: str = "adamw",
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """The Profile of a model file on a device that need not be here.

    Raises ModelError or CaptureError for a model that cannot be captured.
    """
    return analytic_profiles(model, [hardware], micro_batches=micro_batches, optimizer=optimizer, progress=progress)[0]


def analytic_profiles(
    model: str,
    devices: Sequence[Hardware],
    *,
    micro_batches: Sequence[int],
    optimizer: str = "adamw",
    progress: Callable[[str], None] | None = None,
) -> list[Profile]:
    """The same for several devices, all GPUs or none: the operations are counted once."""
    if optimizer not in OPTIMIZER_STATE:
        raise UsageError(f"optimizer {optimizer!r} is not known: use one of {', '.join(OPTIMIZER_STATE)}")
    say = progress or (lambda text: None)
    say("building the model without weights")
    with building_weightless():
        workload = ModelFile.parse(model).open()
    say("capturing the model")
    inputs, target = workload.batch(max(2, min(micro_batches)))
    captured = capture(workload.model, inputs, loss=lambda made: workload.loss(made, target))
    say("counting operations")
    tables = [cost_tables(workload, captured, size, devices, optimizer) for size in sorted(set(micro_batches))]
    facts = [_facts(workload, captured, hardware, optimizer) for hardware in devices]
    return [dataclasses.replace(f, costs=tuple(t)) for f, t in zip(facts, zip(*tables, strict=True), strict=True)]


def _facts(workload: Workload, captured: Captured, hardware: Hardware, optimizer: str) -> Profile:
    reached = ", ".join(f"{kind} {part:.0%}" for kind, part in hardware.reached.items())
    return dataclasses.replace(
        facts_of(workload, captured, "cpu", threads=1, ranks=1, optimizer=optimizer),
        device=hardware.name,
        origin="analytic",
        band=BAND,
        sources=(f"peaks: {hardware.source}", f"part of the peak that is reached: {reached}"),
    )


def cost_tables(
    workload: Workload, captured: Captured, size: int, devices: Sequence[Hardware], optimizer: str
) -> list[CostTable]:
    """The costs of a model that was built without weights at a micro-batch size, for each device."""
    inputs, target = workload.batch(size)
    cuts = [index + 1 for index, layer in enumerate(captured.layers[:-1]) if layer.cut_after]
    sampling = sample(captured, cuts, INSTANCES)
    with _without_data(captured.bind(inputs), target, devices[0]) as (given, goal):
        seconds, sizes = _run(workload, captured, sampling, given, goal, devices)
    found = []
    for number, hardware in enumerate(devices):
        costs: list[LayerCost] = []
        for unit, (start, stop) in enumerate(sampling.ranges):
            place = sampling.instances(unit)[0]
            each = {what: float(row[place][number]) for what, row in seconds.items()}
            costs.append(_cost(each, sizes[place], optimizer_s(captured.layers[start:stop], hardware, optimizer)))
            costs += [NOTHING] * (stop - start - 1)
        found.append(CostTable(size, tuple(costs)))
    return found


NOTHING = LayerCost(0.0, 0.0, 0.0, 0.0, 0, 0, 0)
"""The cost of a layer that no stage can begin with: the layer before it, that can, carries it."""


def _cost(seconds: Mapping[str, float], size: UnitBytes, step_s: float) -> LayerCost:
    return LayerCost(
        forward_s=seconds["forward"],
        backward_s=seconds["backward"],
        input_grad_s=seconds["input_grad"],
        weight_grad_s=seconds["weight_grad"],
        held_after_forward_bytes=size.held_after_forward,
        held_after_input_grad_bytes=size.held_after_input_grad,
        output_bytes=size.output,
        workspace_bytes=size.workspace,
        optimizer_s=step_s,
    )


def optimizer_s(layers: Sequence[Layer], hardware: Hardware, optimizer: str) -> float:
    """Seconds of an optimizer's step on some layers: it only moves memory."""
    traffic = PASSES[optimizer] * sum(layer.gradient_bytes for layer in layers)
    return hardware.seconds("pointwise", 0.0, traffic, "float32")


@contextlib.contextmanager
def _without_data(
    inputs: Mapping[str, torch.Tensor], target: Any, hardware: Hardware
) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
    """While active tensors have shapes only; gives such inputs and target. A GPU's operations where it is for one."""
    with fake_mode() as mode, AsOnCuda() if hardware.is_gpu else contextlib.nullcontext():

        def stand_in(value: Any) -> Any:
            return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

        yield {name: stand_in(value) for name, value in inputs.items()}, tree_map(stand_in, target)


def _run(
    workload: Workload,
    captured: Captured,
    sampling: Sampling,
    inputs: Mapping[str, torch.Tensor],
    target: Any,
    devices: Sequence[Hardware],
) -> tuple[dict[str, list[Any]], list[UnitBytes]]:
    """Seconds by what runs (an array with a value a device), and bytes, of the units that are run."""
    device = torch.device("cpu")
    chains = [Chain(captured, sampling.run_ranges, workload.loss, device, deferred=later) for later in (False, True)]
    with contextlib.ExitStack() as stack:
        for chain in chains:
            for unit in chain.units:
                stack.enter_context(stood_in(unit, device))
        for chain in chains:
            chain.run(inputs, target)  # the gradients are there from now on, as in the middle of a step
        sizes = unit_bytes(chains[0], chains[1], inputs, target)
        operations = stack.enter_context(Operations())
        seconds: dict[str, list[Any]] = {}
        for chain in chains:
            chain.clock = Roofline(devices, operations)
            seconds = chain.run(inputs, target) | seconds  # the forward of the first: nothing is put off in it
    return seconds, sizes


class Roofline:
    """A clock for several devices at once, which every operation advances by what it would take on each."""

    def __init__(self, devices: Sequence[Hardware], operations: Operations) -> None:
        self.device = torch.device("cpu")
        self._devices, self._operations, self._now = devices, operations, np.zeros(len(devices))

    def mark(self) -> Any:
        """This moment: the seconds of all operations so far, a value a device."""
        for work in self._operations.take():
            self._now = self._now + [each.seconds(*work) for each in self._devices]
        return self._now

    def seconds(self, first: Any, second: Any) -> Any:
        """Seconds between two moments."""
        return second - first
