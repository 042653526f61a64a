"""Eager forwards and backwards: what the graph must reproduce, and what only a real run can tell."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopipe.runtime.capture import attention
from autopipe.runtime.capture.attributes import numbers
from autopipe.runtime.capture.comparing import Outcome, differences, named_leaves
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.restoring import SEED, undisturbed
from autopipe.runtime.capture.rewriting import Buffers, parameter_versions
from autopipe.runtime.capture.torch_private import TreeSpec, noted_checkpoints, tree_flatten, tree_leaves
from autopipe.runtime.capture.weightless import is_weightless

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """What eager runs gave.

    ``alone`` is the outcome of one micro-batch. ``pair``, of a model whose forward leaves something for the next one,
    are those of two in turn: forward and backward of the first, then of the second. ``read`` are the positions of
    those leaves of the output that the loss reads. ``packed`` are the answers for attention.replayed.
    ``checkpointed`` are the paths of modules that ran in a checkpoint. A ``weightless`` run gave shapes only.
    ``changed`` are plain attributes that the forward changes. ``again`` are buffers that the backward changes, as a
    checkpoint does that runs a norm once more; outcomes and what follows are without that.
    """

    spec: TreeSpec
    alone: Outcome
    pair: tuple[Outcome, Outcome] | None
    read: frozenset[int]
    packed: tuple[bool, ...]
    checkpointed: frozenset[str]
    weightless: bool
    changed: tuple[str, ...]
    again: tuple[str, ...]


def observe(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None) -> Reference:
    """Run the model and its backward, and leave it as it was: parameters, buffers, gradients and random state."""
    packed: list[bool] = []
    inside: set[str] = set()
    before, held, buffers = numbers(model), parameter_versions(model), Buffers(model)
    weightless = is_weightless(model)
    answers = attention.replayed([]) if weightless else attention.recorded(packed)
    with undisturbed(model, tensors) as given, answers:
        with _noting_checkpoints(model, inside):
            output = _called(model, signature, given)
        leaves, spec = flatten_output(output)
        after = numbers(model)
        value, read = scalar(leaves, loss, output)
        written = bool(buffers.changed()) or held != parameter_versions(model)
        buffers = Buffers(model)
        alone = finished(model, leaves, value, buffers.values, backward=not weightless)
        again = buffers.changed()
        asked = len(packed)
        carries = not weightless and (written or _differs_again(model, signature, given, loss, alone))
    return Reference(
        spec=spec,
        alone=alone,
        pair=_two(model, signature, tensors, loss) if carries else None,
        read=read,
        packed=tuple(packed[:asked]),
        checkpointed=frozenset(inside),
        weightless=weightless,
        changed=tuple(sorted(name for name in after if before.get(name, after[name]) != after[name])),
        again=again,
    )


def _called(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]) -> Any:
    args, kwargs = signature.call_form(tensors)
    return model(*args, **kwargs)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def finished(
    model: nn.Module,
    leaves: Sequence[Any],
    value: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
    *,
    backward: bool = True,
) -> Outcome:
    """Run the backward of a forward whose loss and buffers are known; the model has no gradients afterwards."""
    if value.requires_grad and backward:
        value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return Outcome(named_leaves(leaves), value.detach(), gradients, buffers)


def _differs_again(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None, before: Outcome
) -> bool:
    """Whether a second forward on the same inputs and random numbers gives another loss: something was left behind."""
    torch.manual_seed(SEED)
    output = _called(model, signature, tensors)
    value, _ = scalar(flatten_output(output)[0], loss, output)
    return bool(differences(before, dataclasses.replace(before, loss=value.detach())))


def _two(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None
) -> tuple[Outcome, Outcome]:
    """Two micro-batches in turn, as one process runs them."""
    with undisturbed(model, tensors) as given:
        first, second = (
            _one(model, signature, rows, loss, number) for number, rows in enumerate((given, other_rows(given)))
        )
    return first, second


def _one(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None, seed: int
) -> Outcome:
    torch.manual_seed(seed)
    output = _called(model, signature, tensors)
    leaves, _ = flatten_output(output)
    value, _ = scalar(leaves, loss, output)
    buffers = buffers_of(model)
    outcome = finished(model, leaves, value, buffers)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])  # a checkpoint may have changed it again
    return outcome


def other_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Another micro-batch as good as the example: its first row twice, the last one left out; the order is kept."""
    return [torch.cat([t[:1], t[:-1]]) if t.dim() else t for t in tensors]


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
