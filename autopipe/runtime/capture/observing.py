"""One eager forward and backward: what the graph must reproduce, and what only a real run can tell."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopipe.runtime.capture import attention
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.torch_private import TreeSpec, noted_checkpoints, tree_flatten, tree_leaves
from autopipe.runtime.capture.weightless import is_weightless, runnable

Loss = Callable[[Any], torch.Tensor]
_SEED = 0


@dataclass(frozen=True)
class Reference:
    """What an eager run gave.

    ``outputs`` are the leaves of the model's output. ``read`` are the positions of those that the loss reads.
    ``gradients`` and ``buffers`` go by the model's names; the buffers are those after the forward. ``packed`` are
    the answers for attention.replayed. ``checkpointed`` are the paths of modules that ran in a checkpoint.
    A ``weightless`` run gave shapes only. ``changed`` are plain attributes that the forward changes.
    """

    spec: TreeSpec
    outputs: tuple[Any, ...]
    read: frozenset[int]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    packed: tuple[bool, ...]
    checkpointed: frozenset[str]
    weightless: bool
    changed: tuple[str, ...]


def observe(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None) -> Reference:
    """Run the model and its backward once, and leave it as it was: buffers, gradients and random state."""
    packed: list[bool] = []
    inside: set[str] = set()
    before = _plain_state(model)
    weightless = is_weightless(model)
    answers = attention.replayed([]) if weightless else attention.recorded(packed)
    with undisturbed(model, tensors) as given, answers, _noting_checkpoints(model, inside):
        args, kwargs = signature.call_form(given)
        output = model(*args, **kwargs)
        leaves, spec = flatten_output(output)
        after = _plain_state(model)
        value, read = scalar(leaves, loss, output)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        if value.requires_grad and not weightless:
            value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
    return Reference(
        spec=spec,
        outputs=tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        read=read,
        loss=value.detach(),
        gradients=gradients,
        buffers=buffers,
        packed=tuple(packed),
        checkpointed=frozenset(inside),
        weightless=weightless,
        changed=tuple(sorted(name for name in after if before.get(name, after[name]) != after[name])),
    )


@contextlib.contextmanager
def undisturbed(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Run the model under one fixed seed and leave it as it was: buffers, gradients, attributes, random state.

    Gives the inputs to run it with (see weightless.runnable).
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(owner, name, b, b.detach().clone()) for owner, name, b in _buffers(model)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), same_attributes(model):
            torch.manual_seed(_SEED)
            for parameter, _ in gradients:
                parameter.grad = None
            with runnable(model, tensors) as given:
                yield given
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for owner, name, buffer, content in buffers:
            with torch.no_grad():
                buffer.detach().copy_(content)
            owner._buffers[name] = buffer


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what a forward sets on its modules: plain attributes, the content of collections, hooks."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, known in attributes
        for name, value in known.items()
        if isinstance(value, list | dict | set) and name not in ("_parameters", "_buffers", "_modules")
    ]
    try:
        yield
    finally:
        for module, known in attributes:
            module.__dict__.clear()
            module.__dict__.update(known)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def flatten_output(output: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of an output, those of dataclasses too, which torch's pytree only opens once they are registered."""
    leaves, spec = tree_flatten(output)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return flatten_output(output)


def scalar(leaves: Sequence[Any], loss: Loss | None, output: Any) -> tuple[torch.Tensor, frozenset[int]]:
    """The loss of an output and the leaves that it reads; without a loss, a weighted sum of all float leaves.

    The weights differ from element to element, since the plain sum of a softmax or a normalisation is constant.
    """
    if loss is not None:
        with _Reads() as reads:
            value = loss(output)
        seen = {n for n, leaf in enumerate(leaves) if id(leaf) in reads.seen or leaf is value}
        return value, frozenset(seen)
    terms = [_weighted(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    total = torch.stack(terms).sum() if terms else torch.zeros(())
    return total, frozenset(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))


def _weighted(leaf: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device)
    total = (leaf.double().reshape(-1) * torch.cos(positions)).sum().cpu()
    return torch.div(total, max(leaf.numel(), 1) ** 0.5)


class _Reads(TorchFunctionMode):
    """Notes every tensor that any torch function or tensor method is given."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _noting_checkpoints(model: nn.Module, found: set[str]) -> Iterator[None]:
    """Add to ``found`` the paths of the modules whose forward runs in a checkpoint."""
    with noted_checkpoints() as inside:

        def hook(path: str) -> Callable[..., None]:
            def note(module: nn.Module, args: Any) -> None:
                if inside():
                    found.add(path)

            return note

        handles = [module.register_forward_pre_hook(hook(path)) for path, module in model.named_modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _plain_state(model: nn.Module) -> dict[str, Any]:
    """Numbers, texts and lengths of collections in the model's modules: what a forward may change beside tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            key = f"{path}.{name}".lstrip(".")
            if isinstance(value, bool | int | float | str):
                found[key] = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                found[key] = len(value)
    return found
