"""Layers as the planner sees them: which parameters and buffers each holds, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn

from autopipe.core.profile import Layer, Tie
from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.demand import demand
from autopipe.runtime.capture.hashing import structure
from autopipe.runtime.capture.layers import Group
from autopipe.runtime.capture.opaque import calls_in
from autopipe.runtime.capture.program import Program


def read_tensors(program: Program, layout: Layout, groups: Sequence[Group]) -> list[Set[int]]:
    """For each layer, the ids of the parameters and buffers that it reads, also through views and free operations."""
    found: list[Set[int]] = []
    for number, part in enumerate(groups):
        sources = demand(program, layout, number, part.operations).sources
        ids = {id(program.state[node].tensor) for node in sources if node in program.state}
        whole = [call.module for node in part.operations for call in calls_in(node)]
        found.append(ids | {id(t) for module in whole for t in (*module.parameters(), *module.buffers())})
    return found


def owned_names(
    tensors: Mapping[str, torch.Tensor], groups: Sequence[Group], reads: Sequence[Set[int]]
) -> tuple[tuple[str, ...], ...]:
    """For each layer, the names of the parameters and buffers that it holds.

    Those that no layer reads go where their module runs, for the checkpoint's sake.
    """
    owned: list[list[str]] = [[] for _ in groups]
    for name, tensor in tensors.items():
        readers = [number for number, ids in enumerate(reads) if id(tensor) in ids]
        for number in readers or [_home(name, groups)]:
            owned[number].append(name)
    return tuple(map(tuple, owned))


def _home(name: str, groups: Sequence[Group]) -> int:
    """The first layer in which the longest leading part of a name runs."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length])
        for number, part in enumerate(groups):
            if prefix in part.modules:
                return number
    return 0


def make_layers(
    program: Program,
    layout: Layout,
    groups: Sequence[Group],
    tensors: Mapping[str, torch.Tensor],
    owned: Sequence[Sequence[str]],
) -> tuple[Layer, ...]:
    """The layers with their bytes and structural hashes."""
    return tuple(
        _layer(program, layout, number, part, {id(tensors[name]): tensors[name] for name in owned[number]})
        for number, part in enumerate(groups)
    )


def _layer(program: Program, layout: Layout, number: int, part: Group, held: Mapping[int, torch.Tensor]) -> Layer:
    parameters = [tensor for tensor in held.values() if isinstance(tensor, nn.Parameter)]
    buffers = [tensor for tensor in held.values() if not isinstance(tensor, nn.Parameter)]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    whole = any(calls_in(node) for node in part.operations)
    return Layer(
        name=part.name,
        parameter_bytes=_bytes(parameters),
        parameters=sum(parameter.numel() for parameter in parameters),
        modules=part.modules,
        trainable_bytes=_bytes(trained),
        buffer_bytes=_bytes(buffers),
        can_split_backward=not (whole and trained),
        cut_after=number + 1 not in layout.barred,
        structure=structure(program, layout, part.operations),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_ties(model: nn.Module, owned: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """The parameters that several layers hold."""
    found = []
    for name, parameter in model.named_parameters():
        layers = tuple(number for number, names in enumerate(owned) if name in names)
        if len(layers) > 1:
            found.append(Tie(name, layers, _bytes([parameter]), parameter.requires_grad))
    return tuple(found)
