"""Arguments that several verbs of the command line share, and how the text of an argument is read."""

from __future__ import annotations

from typing import Annotated

import typer

from autopipe.core.errors import UsageError


def seconds(text: str) -> float:
    """``30s``, or a plain number of seconds; what is neither is wrong usage."""
    from autopipe.core.units import parse_duration

    try:
        return parse_duration(f"{text}s" if text.replace(".", "", 1).isdecimal() else text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


GlobalBatch = Annotated[int, typer.Option(min=1, help="Samples of one optimizer step, over all devices.")]
Devices = Annotated[int | None, typer.Option(min=1, help="How many devices; with --cluster its first N.")]
Cluster = Annotated[str | None, typer.Option(metavar="FILE", help="Devices and links; else local ones.")]
Memory = Annotated[str | None, typer.Option(metavar="8GiB", help="Memory of each device.")]
MicroBatch = Annotated[str | None, typer.Option(metavar="1,2,4", help="Micro-batch sizes to try.")]
Schedules = Annotated[str | None, typer.Option(metavar="1F1B,ZB-V", help="Schedules to try, or all.")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, momentum, adam or adamw (default).")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of one device, where a device is a process on a CPU.")]
Budget = Annotated[
    float | None, typer.Option(parser=seconds, metavar="30s", help="Stop measuring layers after this time.")
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback where there would be one line.")]


def names(text: str | None) -> tuple[str, ...] | None:
    """``1F1B,GPipe`` as names; None stays None."""
    return None if text is None else tuple(item.strip() for item in text.split(","))


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """``1,2,4`` as numbers from 1; None stays None. Raises UsageError that names the option."""
    listed = names(text)
    if listed is None:
        return None
    if not all(name.isdecimal() and int(name) for name in listed):
        raise UsageError(f"{option} {text!r} is not a list of numbers from 1: write it as 1,2,4")
    return tuple(map(int, listed))


def pinned(text: str) -> tuple[str, int]:
    """``LAYER=STAGE`` as the layer and its stage. Raises UsageError."""
    layer, sign, stage = text.rpartition("=")
    if not (sign and layer and stage.isdecimal()):
        raise UsageError(f"--pin {text!r} is not LAYER=STAGE: write it as transformer.h.3=1")
    return layer, int(stage)
