"""``autopipe.profile``: capture a model, time its layers on every rank at once, keep the result beside the model."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core import files
from autopipe.core.errors import AutopipeError, ModelError, UsageError
from autopipe.core.profile import OPTIMIZER_STATE, CostTable, LayerCost, Profile
from autopipe.core.spread import spread
from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.program import has_sparse_gradient, path_of
from autopipe.runtime.checking.reduction import find_reduction
from autopipe.runtime.measuring.curves import first_sizes, interpolated, straight
from autopipe.runtime.measuring.measure import LayerTimer, Samples, all_agree, jitter_of, measure, pooled, stage_price_s
from autopipe.runtime.measuring.sampling import INSTANCES
from autopipe.runtime.ranks import launch, watching
from autopipe.runtime.ranks.devices import cores, default_device, describe, is_as_fast, own_device
from autopipe.runtime.tables.emulated import runtime_costs
from autopipe.runtime.workload import InMemory, ModelFile, Source, Workload, call, user_code

DEFAULT_BUDGET_S = 60.0
TIMEOUT_S = 300.0
"""How long no rank may move while layers are timed: one layer's run, not the whole."""


def profile(
    model: str | nn.Module,
    batch: tuple[Any, Any] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    devices: int = 1,
    micro_batches: Sequence[int] = (1, 2, 4),
    threads: int = 1,
    optimizer: str = "adamw",
    budget_s: float | None = None,
    save: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measure a model's layers, or reuse what was measured before.

    ``model`` is a model file (``model.py`` or ``model.py:NAME``), or a module with ``batch`` = (inputs, target) and
    ``loss_fn``. As many ranks as there are devices, on a CPU at most as many as its cores carry, time their layers at
    once; what ranks measure that are much slower or faster than rank 0 is left out. The profile is saved to ``save``,
    by default beside the model file or else in the user's cache, and read from there while model, shapes, dtype, torch
    and device are the same; micro-batch sizes that it lacks are added.
    Raises ModelError or CaptureError for a model that cannot be measured.
    """
    source = _source(model, batch, loss_fn)
    if optimizer not in OPTIMIZER_STATE:
        raise UsageError(f"optimizer {optimizer!r} is not known: use one of {', '.join(OPTIMIZER_STATE)}")
    kind = default_device()
    facts = launch.apart(
        first_contact,
        (source, max(2, min(micro_batches)), kind, threads, min(devices, _most_ranks(kind, threads)), optimizer),
        timeout_s=TIMEOUT_S,
        threads=cores(),
        progress=progress,
    )
    path = Path(save) if save is not None else default_path(source)
    known = _reusable(path, facts)
    missing = sorted({*micro_batches} - {*known.micro_batches, *known.out_of_memory})
    if not missing:
        return known
    ranks = launch.launch(
        measure_rank,
        (source, tuple(missing), optimizer, DEFAULT_BUDGET_S if budget_s is None else budget_s, kind),
        ranks=facts.processes,
        timeout_s=TIMEOUT_S,
        threads=threads,
        device=kind,
        progress=progress,
    )
    gap_s = statistics.fmean([part.gap_s for part in ranks][:2])
    like_first = [part for part in ranks if is_as_fast(part.total_s / ranks[0].total_s)]
    samples = {size: pooled([part.samples[size] for part in like_first]) for size in ranks[0].samples}
    too_large = tuple(sorted({*known.out_of_memory, *ranks[0].too_large}))
    measured = dataclasses.replace(with_costs(known, samples, gap_s), out_of_memory=too_large)
    if path is not None:
        files.write(measured, path)
    return measured


def first_contact(source: Source, micro_batch: int, kind: str, threads: int, ranks: int, optimizer: str) -> Profile:
    """Build and capture the model, in a process of its own: a profile without costs, with notes for the user."""
    launch.beat.phase(watching.BUILDING)
    workload = source.open()
    launch.beat.phase(watching.CAPTURING)
    captured = capture_checked(workload, micro_batch)
    facts = facts_of(workload, captured, kind, threads, ranks, optimizer)
    notes, dtype = captured.notes, captured.dtype
    del workload, captured
    reduction, told = find_reduction(source.open(), dtype)
    return dataclasses.replace(facts, notes=(*notes, *filter(None, [told])), reduction=reduction)


def _source(model: str | nn.Module, batch: Any, loss_fn: Any) -> Source:
    if isinstance(model, str):
        file = ModelFile.parse(model)
        _ = file.digest  # one that cannot be read is told before any process starts
        return file
    if batch is None or loss_fn is None:
        raise UsageError("profile(model) of a module needs batch=(inputs, target) and loss_fn too")
    return InMemory(model, batch[0], batch[1], loss_fn)


def _most_ranks(kind: str, threads: int) -> int:
    return torch.cuda.device_count() if kind == "cuda" else max(1, cores() // threads)


def default_path(source: Source) -> Path | None:
    """Beside the model file, or in the user's cache where that folder cannot be written; None without a file."""
    if not isinstance(source, ModelFile):
        return None
    model = Path(source.path)
    stem = model.stem if source.builder == "build_model" else f"{model.stem}.{source.builder}"
    if os.access(model.resolve().parent, os.W_OK):
        return model.with_name(f"{stem}.profile.json")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autopipe"
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"{stem}-{source.digest[:12]}.profile.json"


def capture_checked(workload: Workload, micro_batch: int) -> Captured:
    """Capture on an example micro-batch, gradients checked against the model's own; the loss must be a number."""
    inputs, target = workload.batch(micro_batch)
    with user_code(workload.name, "the model's forward"):
        output = call(workload.model, inputs)
    loss = workload.loss(output, target)
    if not loss.isfinite():
        value = float(loss.detach())
        raise ModelError(f"{workload.name}: the loss of example_batch({micro_batch}) is {value}, a number is needed")
    if not loss.requires_grad:
        raise ModelError(f"{workload.name}: the loss does not depend on any parameter that requires a gradient")
    del output, loss
    captured = capture(workload.model, inputs, loss=lambda made: workload.loss(made, target))
    _check_dense(captured, workload.name)
    return captured


def _check_dense(captured: Captured, name: str) -> None:
    """Raises ModelError for sparse gradients: their bytes are not known beforehand, and few optimizers take them."""
    for node in captured.program.operations():
        if has_sparse_gradient(node):
            where = (path_of(node) or ["the model"])[-1]
            raise ModelError(f"{name}: the gradient of {where} is sparse, which no plan can count: use sparse=False")


def facts_of(workload: Workload, captured: Captured, kind: str, threads: int, ranks: int, optimizer: str) -> Profile:
    """A profile without costs: what a saved one must agree with."""
    return Profile(
        model=workload.name,
        layers=captured.layers,
        edges=captured.edges,
        ties=captured.ties,
        costs=(),
        device=describe(kind, threads),
        dtype=captured.dtype,
        optimizer=optimizer,
        threads=threads,
        processes=ranks,
        structure=captured.structure,
        versions={"torch": torch.__version__},
    )


def _reusable(path: Path | None, facts: Profile) -> Profile:
    """The saved profile where it is of the same thing, else the facts alone."""
    if path is None or not path.exists():
        return facts
    try:
        saved = files.read(path, Profile)
    except AutopipeError:
        return facts  # it is about to be written anew
    bare = dataclasses.replace(saved, costs=(), overhead_s=0.0, noise=0.0, out_of_memory=(), jitter=None)
    return saved if bare == facts else facts


@dataclasses.dataclass
class RankSamples:
    """What one rank measured: samples by micro-batch size, and seconds between two actions of the runtime.

    Sizes that are to be interpolated have bytes and no seconds; ``too_large`` are those that ran out of memory.
    """

    samples: dict[int, Samples]
    too_large: tuple[int, ...]
    gap_s: float

    @property
    def total_s(self) -> float:
        """The median seconds of all that was run, all sizes together."""
        return sum(statistics.median(each.totals()) for each in self.samples.values() if each.units)


def measure_rank(
    source: Source, micro_batches: Sequence[int], optimizer: str, budget_s: float, kind: str
) -> RankSamples:
    """One rank's part: its layers, and what the runtime costs."""
    device = own_device(kind)
    launch.beat.phase(watching.BUILDING)
    begun = time.monotonic()
    workload = source.open()
    workload.model.to(device)
    launch.beat.phase(watching.CAPTURING)
    inputs, target = workload.batch(max(2, min(micro_batches)))
    captured = capture(workload.model, inputs, loss=lambda made: workload.loss(made, target))
    cuts = [index + 1 for index, layer in enumerate(captured.layers[:-1]) if layer.cut_after]
    batches = {size: workload.batch(size) for size in micro_batches}
    instances = INSTANCES
    while True:
        timer = LayerTimer(captured, cuts, batches, workload.loss, optimizer, device, instances)
        timer.warm_up()
        _time_sizes(timer, begun + budget_s, device)
        if timer.sampling.whole or all_agree(all(s.alike() for s in timer.samples.values() if s.units), device):
            return RankSamples(timer.samples, tuple(timer.too_large), runtime_gap_s(device))
        instances *= 4  # layers that should be equal are not: run more of them


def _time_sizes(timer: LayerTimer, until: float, device: torch.device) -> None:
    """Measure the sizes that must be; the others too, unless they lie on the line between those."""
    sizes = sorted(timer.samples)
    first = first_sizes(sizes)
    measure(timer, first, max(0.0, until - time.monotonic()), device)
    others = [size for size in sizes if size not in first]
    if others and not all_agree(straight(timer.samples, first), device):
        measure(timer, others, max(0.0, until - time.monotonic()), device)


def runtime_gap_s(device: torch.device) -> float:
    """Seconds that the runtime takes between two actions, measured between ranks 0 and 1; 0 on the others."""
    if dist.get_world_size() < 2:
        return 0.0
    launch.beat.phase("measuring the runtime")
    pair = dist.new_group([0, 1])
    return runtime_costs(device, pair)[0] if dist.get_rank() < 2 else 0.0


def with_costs(known: Profile, samples: dict[int, Samples], gap_s: float) -> Profile:
    """The profile with the cost tables of more micro-batch sizes.

    An action costs, beyond its layers, the price of its stage and the runtime's ``gap_s`` between two actions.
    """
    timed = {size: each for size, each in samples.items() if each.units}
    tables = [CostTable(size, _layer_costs(known, each)) for size, each in timed.items()]
    prices = [stage_price_s(each, what) for each in timed.values() for what in ("forward", "backward")]
    overhead_s = statistics.fmean([*(price + gap_s for price in prices), *[known.overhead_s] * (2 * len(known.costs))])
    noise = max(known.noise, *(spread(each.totals()) for each in timed.values()))
    starts = [0, *known.legal_cuts()]
    for size in samples.keys() - timed.keys():
        counted = {layer: samples[size].bytes_of(unit) for unit, layer in enumerate(starts)}
        tables.append(interpolated(size, [t for t in tables if not t.interpolated], counted))
    costs = tuple(sorted((*known.costs, *tables), key=lambda table: table.micro_batch))
    jitter = jitter_of(timed.values())
    return dataclasses.replace(known, costs=costs, overhead_s=overhead_s, noise=noise, jitter=jitter)


def _layer_costs(known: Profile, samples: Samples) -> tuple[LayerCost, ...]:
    """The units' medians as the layers' costs, the price of a stage taken off.

    A unit is the layers between two legal cuts. Its first layer carries its cost: no stage can begin inside it.
    """
    starts = [0, *known.legal_cuts()]
    unit_of = {layer: unit for unit, layer in enumerate(starts)}
    price = {what: stage_price_s(samples, what) for what in ("forward", "backward", "optimizer")}
    price["input_grad"] = price["backward"]
    seconds = {
        what: [max(0.0, value - price.get(what, 0.0)) for value in samples.median(what)] for what in samples.units
    }
    totals = samples.spreads()
    costs = []
    for layer in range(len(known.layers)):
        unit = unit_of.get(layer)
        costs.append(_NOTHING if unit is None else _unit_cost(samples, seconds, unit, totals[unit]))
    return tuple(costs)


_NOTHING = LayerCost(0.0, 0.0, 0.0, 0.0, 0, 0, 0)


def _unit_cost(samples: Samples, seconds: dict[str, list[float]], unit: int, variation: float) -> LayerCost:
    size = samples.bytes_of(unit)
    return LayerCost(
        forward_s=seconds["forward"][unit],
        backward_s=seconds["backward"][unit],
        input_grad_s=seconds["input_grad"][unit],
        weight_grad_s=seconds["weight_grad"][unit],
        held_after_forward_bytes=size.held_after_forward,
        held_after_input_grad_bytes=size.held_after_input_grad,
        output_bytes=size.output,
        workspace_bytes=size.workspace,
        optimizer_s=seconds["optimizer"][unit],
        spread=variation,
    )
