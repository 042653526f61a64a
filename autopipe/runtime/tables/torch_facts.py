"""Whether the installed torch does what torch_ir.py and torch_stage.py rely on.

Private names may change with any release. Nothing is refused by its number: each fact is looked up, or tried on a table
of two ranks. The facts that need a process group have tests on real ranks instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from autopipe.core.errors import AutopipeError

TRIED = ("2.13", "2.14")
"""The releases on which these facts were tried; all tests ran on the first."""

TYPES = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}
"""torch's names of the operations."""

FORWARD_TYPES = ("FORWARD", "SEND_F", "RECV_F")
"""What an evaluation runs."""

_NAMES = (
    "_Action.from_str",
    "_add_send_recv",
    "_PipelineScheduleRuntime._prepare_schedule_with_comms",
    "_PipelineScheduleRuntime._initialize_stages",
    *(f"_ComputationType.{name}" for name in sorted({*TYPES.values(), *FORWARD_TYPES})),
)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "_PipelineScheduleRuntime._step_microbatches": ("arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"),
    "PipelineScheduleMulti.__init__": ("stages", "n_microbatches", "loss_fn", "scale_grads"),
}
_STAGE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "__init__": (
        "submodule", "stage_index", "num_stages", "device", "input_args", "output_args", "group", "dw_builder",
    ),
    "forward_one_chunk": (),
    "backward_one_chunk": ("full_backward",),
    "backward_weight_one_chunk": (),
    "clear_runtime_states": (),
    "set_local_bwd_input": (),
    **{f"get_{way}_{what}_ops": () for way in ("fwd", "bwd") for what in ("recv", "send")},
    "_prepare_forward_infra": ("num_microbatches",),
    "_prepare_backward_infra": ("num_microbatches",),
}  # fmt: skip

_TABLE = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}
_LOWERED = {
    0: "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    1: "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
}
"""1F1B on two ranks with the messages that torch puts in: each receive where its sender comes to its send."""


def check_torch() -> None:
    """Raise AutopipeError, with torch's version and what it does otherwise, unless it is as torch_ir.py needs it."""
    for problem in problems():
        raise AutopipeError(
            f"torch {torch.__version__} {problem}: this autopipe runs pipelines on torch {' and '.join(TRIED)}; "
            f"install one of them"
        )


def problems() -> Iterator[str]:
    """What the installed torch does otherwise, in words that follow its name."""
    for names in (_missing, _changed, _otherwise_written, _otherwise_lowered):
        yield from names()


def _missing() -> Iterator[str]:
    for path in (*_NAMES, *_ARGUMENTS):
        if _found(path) is None:
            yield f"has no torch.distributed.pipelining.schedules.{path}"


def _found(path: str) -> Any:
    found: Any = torch_schedules
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _changed() -> Iterator[str]:
    stage = {f"PipelineStage.{name}": (getattr(PipelineStage, name, None), a) for name, a in _STAGE_ARGUMENTS.items()}
    for path, (function, wanted) in ({path: (_found(path), a) for path, a in _ARGUMENTS.items()} | stage).items():
        if function is None:
            yield f"has no {path}"
            continue
        lacks = [name for name in wanted if name not in inspect.signature(function).parameters]
        if lacks:
            yield f"has no argument {', '.join(lacks)} in {path}"


def _otherwise_written() -> Iterator[str]:
    for letter, name in TYPES.items():
        action = torch_schedules._Action(2, torch_schedules._ComputationType[name], 10)
        if str(action) != f"2{letter}10" or torch_schedules._Action.from_str(str(action)) != action:
            yield f"writes {action} for 2{letter}10"


def _otherwise_lowered() -> Iterator[str]:
    try:
        lowered = _lowered()
    except Exception as error:
        yield f"does not lower 1F1B ({type(error).__name__}: {error})"
        return
    for rank, wanted in _LOWERED.items():
        found = " ".join(map(str, lowered[rank]))
        if found != wanted:
            yield f"lowers rank {rank} of 1F1B to {found!r}, not {wanted!r}"


def _lowered() -> Any:
    read: Callable[[str], Any] = torch_schedules._Action.from_str
    table = {rank: [read(text) for text in row.split()] for rank, row in _TABLE.items()}
    return torch_schedules._add_send_recv(table, lambda stage: stage, 2)
