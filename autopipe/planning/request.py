"""What a caller of the search may ask for, checked: depths, replicas, micro-batch sizes, schedules and pins."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import autopipe.synthesis  # noqa: F401  registers the schedules
from autopipe.core.cluster import Cluster
from autopipe.core.errors import UsageError
from autopipe.core.profile import Profile
from autopipe.core.schedule import Kind, kind, kinds
from autopipe.core.units import many


def wanted_depths(
    profile: Profile,
    cluster: Cluster,
    pins: Mapping[int, int],
    depths: Sequence[int] | None,
    stages_per_rank: int | None = None,
) -> tuple[int, ...]:
    """The depths to try, ascending: those asked for, or all that devices, cuts and pins allow.

    Pins number the stages of all ranks: of one a rank, or of ``stages_per_rank``.
    """
    if depths is not None and not depths:
        raise UsageError(f"no depth is left to try: use --depth 1…{len(cluster)}")
    for depth in depths or ():
        _check_depth(profile, cluster, depth)
    possible = possible_depths(profile, cluster, pins, stages_per_rank or 1)
    wanted = possible if depths is None else tuple(depth for depth in sorted(set(depths)) if depth in possible)
    if not wanted:
        said = ", ".join(f"{profile.layers[layer].name}={stage}" for layer, stage in pins.items())
        raise UsageError(
            f"pin {said} cannot hold with {_either(depths or range(1, len(cluster) + 1))} stages: stages follow the "
            f"order of the layers and each needs a layer of its own; change a pin or the depth"
        )
    return wanted


def wanted_replicas(cluster: Cluster, global_batch: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of replicas to try, ascending: those asked for, by default all, that divide the global batch."""
    asked = sorted(set(range(1, len(cluster) + 1) if replicas is None else replicas))
    if not asked:
        raise UsageError(f"no number of replicas is left to try: use --replicas 1…{len(cluster)}")
    for count in asked:
        if not 1 <= count <= len(cluster):
            devices = many(len(cluster), "device")
            raise UsageError(f"{many(count, 'replica')} cannot run on {devices}: use --replicas 1…{len(cluster)}")
    fitting = tuple(count for count in asked if global_batch % count == 0)
    if not fitting:
        raise UsageError(
            f"global batch {global_batch} cannot be shared out to {_either(asked)} replicas: use numbers that divide it"
        )
    return fitting


def possible_depths(
    profile: Profile, cluster: Cluster, pins: Mapping[int, int], stages_per_rank: int = 1
) -> tuple[int, ...]:
    """All depths that the devices, the legal cuts and the pins allow."""
    most = min(len(cluster), len(profile.legal_cuts()) + 1)
    counts = _counts(profile, pins)
    return tuple(depth for depth in range(1, most + 1) if depth * stages_per_rank in counts)


DEFAULT_SCHEDULES = ("1F1B", "GPipe")
"""What is tried where no schedule is asked for."""


def wanted_kinds(names: Sequence[str] | None, *, allow_stale: bool = False) -> tuple[Kind, ...]:
    """The schedules to try, by name; ``all`` means every one.

    Asynchronous ones train on stale weights: they are tried only with ``allow_stale``, and then all of them where no
    names are given. Raises UsageError for one that is unknown, or that is not allowed.
    """
    if names is not None and [name.lower() for name in names] == ["all"]:
        return tuple(k for k in kinds() if allow_stale or not k.asynchronous)
    wanted = {k.name: k for k in map(kind, DEFAULT_SCHEDULES if names is None else names)}
    if not wanted:
        raise UsageError(f"no schedule is left to try: use all, or some of {_names(kinds())}")
    refused = next((k.name for k in wanted.values() if k.asynchronous and not allow_stale), None)
    if refused:
        raise UsageError(
            f"{refused} trains on weights that are some updates old: autopipe plan --allow-stale allows that"
        )
    if allow_stale and names is None:
        wanted |= {k.name: k for k in kinds() if k.asynchronous}
    return tuple(wanted[name] for name in sorted(wanted))


def _names(known: Sequence[Kind]) -> str:
    return ", ".join(k.name for k in known)


def _check_depth(profile: Profile, cluster: Cluster, depth: int) -> None:
    layers, stages = len(profile.layers), len(profile.legal_cuts()) + 1
    if depth < 1:
        raise UsageError(f"depth {depth} is not possible: it is a number of stages, at least 1")
    if depth > layers:
        raise UsageError(f"depth {depth} is more than the model's {many(layers, 'layer')}: use --depth 1…{stages}")
    if depth > stages:
        pieces = many(stages, "stage")
        raise UsageError(f"depth {depth}: the model's {many(layers, 'layer')} can be cut into {pieces} at most")
    if depth > len(cluster):
        raise UsageError(f"depth {depth} is more than the {many(len(cluster), 'device')}: use --depth 1…{len(cluster)}")


def wanted_micro_batches(profile: Profile, global_batch: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batch sizes to try, ascending: those asked for that were measured and divide the global batch."""
    if global_batch < 1:
        raise UsageError(f"global batch {global_batch} is not possible: it must be at least 1")
    asked = sorted(set(profile.micro_batches if sizes is None else sizes))
    if not asked:
        raise UsageError(f"no micro-batch size is left to try: the profile has {list(profile.micro_batches)}")
    for size in asked:
        profile.at(size)
    fitting = tuple(size for size in asked if global_batch % size == 0)
    if not fitting:
        measured = [size for size in profile.micro_batches if global_batch % size == 0]
        help_ = f"use --micro-batch {','.join(map(str, measured))}" if measured else _near(global_batch, asked)
        raise UsageError(f"global batch {global_batch} is not divisible by micro-batch {_either(asked)}: {help_}")
    return fitting


def _either(sizes: Sequence[int]) -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last


def _near(global_batch: int, sizes: Sequence[int]) -> str:
    """The nearest global batches that one of the sizes divides."""
    near = {size * max(1, global_batch // size + up) for size in sizes for up in (0, 1)}
    below = [batch for batch in near if batch < global_batch]
    above = [batch for batch in near if batch > global_batch]
    return f"use --global-batch {_either([*([max(below)] if below else []), min(above)])}, or profile another size"


def pinned_stages(profile: Profile, pins: Mapping[str, int]) -> dict[int, int]:
    """The stage of each pinned layer, by the layer's number. Raises UsageError for an unknown name."""
    numbers = {layer.name: number for number, layer in enumerate(profile.layers)}
    for name, stage in pins.items():
        if name not in numbers:
            close = difflib.get_close_matches(name, numbers, n=3) or list(numbers)[:3]
            raise UsageError(f"pin {name}={stage}: no layer has that name; there are {', '.join(close)}, …")
        if stage < 0:
            raise UsageError(f"pin {name}={stage}: stages are numbered from 0")
    return {numbers[name]: stage for name, stage in sorted(pins.items(), key=lambda pin: numbers[pin[0]])}


def _counts(profile: Profile, pins: Mapping[int, int]) -> set[int]:
    """The numbers of stages that the layers can be cut into with every pin kept."""
    last, cuts = {0}, set(profile.legal_cuts())
    for layer in range(len(profile.layers)):
        if layer in cuts:
            last |= {stage + 1 for stage in last}
        if layer in pins:
            last &= {pins[layer]}
    return {stage + 1 for stage in last}
