"""Export, clean and check a model, keeping whole what cannot be exported, until the graph is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from autopipe.core.errors import CaptureError
from autopipe.runtime.capture.blame import Place, alike, all_units, blame, own_doing, parent_of, suspects, user_source
from autopipe.runtime.capture.calls import CannotKeepWhole
from autopipe.runtime.capture.checking import Findings, run_and_compare
from autopipe.runtime.capture.cleaning import clean, drop_dead, live_nodes, return_outputs
from autopipe.runtime.capture.exporting import export_program
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.observing import Loss, Reference
from autopipe.runtime.capture.opaque import attach_calls, kept_whole
from autopipe.runtime.capture.program import Program, values
from autopipe.runtime.capture.words import reason

_ATTEMPTS = 16


@dataclass
class Attempt:
    """What is tried next: the modules kept whole, and whether one graph serves every micro-batch size."""

    whole: list[str] = field(default_factory=list)
    dynamic: bool = True
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    place: Place | None = None

    def keep_whole(self, path: str, why: str) -> None:
        """Keep one more module whole, and drop those inside it."""
        self.whole = [other for other in self.whole if not other.startswith(f"{path}.")] + [path]
        self.reasons[path] = why

    def fix_batch(self, batch: int, why: str) -> None:
        """Try with the example's micro-batch size only."""
        self.dynamic = False
        self.notes.append(f"{why}: captured for micro-batches of {batch} only")

    def keep_all_whole(self, model: nn.Module, why: str) -> bool:
        """As a last resort, keep every block whole; False when they are already."""
        missing = [path for path in all_units(model) if path not in self.whole]
        for path in missing:
            self.keep_whole(path, why)
        return bool(missing)

    def all_notes(self) -> list[str]:
        """What the user should know: modules that share a reason share a line."""
        why: dict[str, list[str]] = {}
        for path in self.whole:
            why.setdefault(self.reasons[path], []).append(path)
        return [*self.notes, *(f"kept whole: {', '.join(paths)} ({reason})" for reason, paths in why.items())]


def trace(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], loss: Loss | None, reference: Reference
) -> tuple[Program, Findings, Attempt]:
    """A program that computes what the model computes. Raises CaptureError when there is none."""
    attempt = Attempt()
    if reference.weightless:  # nothing will tell that gradients differ
        _keep_suspects_whole(model, signature, tensors, attempt)
    for _ in range(_ATTEMPTS):
        program = _try(model, signature, tensors, reference, attempt)
        if program is None:
            continue
        findings = run_and_compare(model, program, tensors, loss, reference)
        if not findings.differences:
            drop_dead(program)  # only now: what is dead may draw random numbers, as the model does
            return program, findings, attempt
        _suspect(model, signature, tensors, findings, attempt)
    raise CaptureError(f"{type(model).__name__} could not be captured in {_ATTEMPTS} attempts: {attempt.all_notes()}")


def _try(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], reference: Reference, attempt: Attempt
) -> Program | None:
    """One export, cleaned; None when the next attempt may do better."""
    try:
        with kept_whole(model, attempt.whole, signature, tensors):
            program = export_program(model, signature, tensors, reference.packed, dynamic=attempt.dynamic)
            attach_calls(program)
        clean(program)
    except Exception as error:
        _learn(model, error, attempt, signature.batch)
        return None
    _keep_outputs(program, reference)
    return program


def _keep_outputs(program: Program, reference: Reference) -> None:
    """Drop the outputs that the loss does not read and that need operations of their own."""
    read = [output for n, output in enumerate(program.outputs) if n in reference.read]
    live = live_nodes(program, read)
    program.outputs = [
        output
        if not isinstance(output, fx.Node) or output in live or n in reference.read or not values(output)
        else None
        for n, output in enumerate(program.outputs)
    ]
    return_outputs(program)


def _learn(model: nn.Module, error: Exception, attempt: Attempt, batch: int) -> None:
    """Change the next attempt by what went wrong, or refuse."""
    said = " ".join(str(error).split())
    if attempt.dynamic and "Constraints violated" in said:
        attempt.fix_batch(batch, "the model branches on the batch size")
        return
    attempt.place = place = blame(model, error) or attempt.place
    why = said[:120] if isinstance(error, CannotKeepWhole) else reason(error)
    path = place.path if place else ""
    if isinstance(error, CannotKeepWhole):
        path = parent_of(model, error.path)
    if path and path in attempt.whole:
        path = parent_of(model, path)
    where = f"{place or user_source(model)}: "
    if isinstance(error, CannotKeepWhole):
        where = f"{user_source(model, error.path)}: "
    if path:
        for other in alike(model, path):
            attempt.keep_whole(other, f"{where}{why}")
    elif place is not None and attempt.dynamic:
        attempt.fix_batch(batch, f"{where}{why}")
    elif place is not None or not attempt.keep_all_whole(model, f"{where}{why}"):
        raise CaptureError(
            f"{where}{type(model).__name__} cannot be captured ({why}). "
            f"Move what this line does into a sub-module's forward: a sub-module is kept whole when need be"
        ) from error


def _suspect(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], findings: Findings, attempt: Attempt
) -> None:
    """Keep whole whatever may be the cause of wrong gradients, or refuse."""
    if _keep_suspects_whole(model, signature, tensors, attempt, later=findings.later):
        return
    if not attempt.keep_all_whole(model, f"the exported graph gives other results: {findings.differences[0]}"):
        doing = own_doing(model, signature, tensors) or "its own forward does something"
        raise CaptureError(
            f"{user_source(model)}: the captured graph of {type(model).__name__} does not give the model's own results "
            f"({findings.differences[0]}): {doing}, which torch.export drops silently. "
            f"Move that into a sub-module's forward: a sub-module is kept whole when need be"
        )


def _keep_suspects_whole(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], attempt: Attempt, *, later: bool = False
) -> bool:
    """Keep whole what uses something that an export drops; False when there is no more of it."""
    hidden = suspects(model, signature, tensors, later=later)
    found = {path: why for path, why in hidden.items() if path not in attempt.whole}
    for path, why in found.items():
        attempt.keep_whole(path, f"it uses {why}, which torch.export drops silently")
    return bool(found)
