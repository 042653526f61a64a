"""An unmodified module becomes layers and edges: export, clean, find what is free, group, check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from autopipe.core.errors import CaptureError
from autopipe.core.profile import content_digest
from autopipe.runtime.capture.blame import user_errors
from autopipe.runtime.capture.boundary import lay_out
from autopipe.runtime.capture.captured import Captured, dominating_dtype
from autopipe.runtime.capture.describing import make_layers, make_ties, owned_names, read_tensors
from autopipe.runtime.capture.free import free_nodes
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.layers import Group, group
from autopipe.runtime.capture.observing import Reference, observe
from autopipe.runtime.capture.program import Program, named_tensors
from autopipe.runtime.capture.tracing import trace

__all__ = ["Captured", "capture"]


def capture(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Captured:
    """Capture a model, in its present mode, from one example micro-batch (two rows or more are best).

    A tuple of inputs is positional, a mapping is by keyword; dimension 0 of every tensor is the batch, other leaves
    are constants. ``loss`` maps the model's output to a scalar; without it the gradients are checked on a weighted
    sum of the outputs. The model is run a few times and left as it was. Raises CaptureError that names the line.
    """
    _check_modules(model)
    signature = Signature.of(model, inputs)
    tensors = signature.flatten(inputs)
    with user_errors(model):
        reference = observe(model, signature, tensors, loss)
    program, findings, attempt = trace(model, signature, tensors, loss, reference)
    for node, dtype in findings.dtypes.items():
        node.meta["dtype"] = dtype
    free = free_nodes(program)
    groups = group(model, [node for node in program.operations() if node not in free])
    _drop_early_outputs(program, groups, free, reference)
    layout = lay_out(program, groups, free, findings.gradients)
    named = named_tensors(model)
    owned = owned_names(named, groups, read_tensors(program, layout, groups))
    layers = make_layers(program, layout, groups, named, owned)
    ties = make_ties(model, owned)
    return Captured(
        model=model,
        layers=layers,
        edges=layout.edges,
        ties=ties,
        structure=content_digest([[[layer.name, layer.structure] for layer in layers], [tie.layers for tie in ties]]),
        dtype=dominating_dtype(model),
        micro_batch=None if attempt.dynamic else signature.batch,
        notes=(*attempt.all_notes(), *_notes(reference, attempt.whole)),
        signature=signature,
        program=program,
        layout=layout,
        owned=owned,
        checkpointed=frozenset(n for n, part in enumerate(groups) if reference.checkpointed & set(part.modules)),
    )


def _check_modules(model: nn.Module) -> None:
    """Raises CaptureError for modules that have no Python forward, or no shapes yet."""
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is compiled by torch.jit, which hides what it does: use the module itself")
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise CaptureError(f"{where} has parameters without shapes: run the model once before it is captured")


def _drop_early_outputs(program: Program, groups: Sequence[Group], free: Set[fx.Node], reference: Reference) -> None:
    """Outputs that the loss does not read are returned only when the last layer has them anyway."""
    last = set(groups[-1].operations) | free | set(program.inputs)
    program.outputs = [
        output if not isinstance(output, fx.Node) or n in reference.read or output in last else None
        for n, output in enumerate(program.outputs)
    ]


def _notes(reference: Reference, whole: Sequence[str]) -> list[str]:
    if reference.weightless:
        return ["the parameters are on the meta device: gradients were not compared with the model's own"]
    changed = [name for name in reference.changed if not name.startswith(tuple(f"{path}." for path in whole))]
    notes = []
    if changed:
        notes.append(f"forward changes {_few(changed)}: stages do not repeat changes of plain Python attributes")
    if reference.again:
        notes.append(f"{_few(reference.again)} change in the forward only, not again when a checkpoint repeats it")
    return notes


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
