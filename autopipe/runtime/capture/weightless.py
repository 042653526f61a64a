"""Models whose parameters are on the meta device: captured without memory for them.

While the model runs or is exported, each such parameter is replaced by a fake tensor on the device of the inputs:
a meta tensor would not mix with inputs and buffers that are real. Nothing is computed then, only shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from autopipe.runtime.capture.torch_private import fake_mode


def is_weightless(model: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextlib.contextmanager
def stood_in(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While active, fake tensors on the device take the place of meta parameters and buffers; ties stay ties."""
    if not is_weightless(model):
        yield
        return
    made: dict[int, torch.Tensor] = {}
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    old = [(table, dict(table)) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    made.setdefault(id(tensor), _fake(tensor, device))
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for table, content in old:
            table.clear()
            table.update(content)  # type: ignore[arg-type]


@contextlib.contextmanager
def building_weightless() -> Iterator[None]:
    """While active, the parameters that modules register go to the meta device: no memory, no time to fill them.

    Buffers stay as they are, for graphs may compute with them. A tensor that is allocated and not yet written to takes
    no memory, so that a module's parameter costs nothing before it is registered either.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with fake_mode():
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


@contextlib.contextmanager
def runnable(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The inputs with which the model can be run: as they are, or fake where its parameters are."""
    if not is_weightless(model):
        yield list(tensors)
        return
    with stood_in(model, tensors[0].device), fake_mode() as mode:
        yield [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
