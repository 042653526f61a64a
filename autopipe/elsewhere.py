"""Profiles that need no measuring here: read from another format, or computed for a device that is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autopipe.core import files
from autopipe.core.errors import UsageError
from autopipe.core.hardware import known
from autopipe.core.profile import Profile
from autopipe.importers import Facts, import_profile


def imported(
    source: str,
    name: str,
    *,
    micro_batches: Sequence[int] | None,
    device: str | None,
    dtype: str | None,
    output: Path | None,
) -> tuple[Profile, Path]:
    """The Profile in a file of format ``name``, and where it was written: beside the file by default.

    Raises FileError for a file that cannot be read so, and UsageError that asks for what it does not say.
    """
    if micro_batches is not None and len(micro_batches) != 1:
        raise UsageError(f"{source} holds the figures of one batch size: use --micro-batch with that number alone")
    size = micro_batches[0] if micro_batches else None
    made = import_profile(source, name, Facts(source, size, device, dtype or "float32"))
    saved = output or Path(source).with_suffix(".profile.json")
    files.write(made, saved)
    return made, saved


def analytic(
    source: str,
    device: str,
    *,
    micro_batches: Sequence[int],
    threads: int,
    optimizer: str,
    output: Path | None,
    progress: Callable[[str], None],
) -> tuple[Profile, Path]:
    """The costs of a model file on a device that need not be here, and where they were written.

    ``cpu`` is this machine's, whose speeds are measured for it. Raises UsageError for a device that is not known.
    """
    hardware = None if device == "cpu" else known(device)
    from autopipe.runtime.measuring.analytic import analytic_profile
    from autopipe.runtime.workload import ModelFile

    if hardware is None:
        from autopipe.runtime.measuring.roofline import own_hardware

        hardware = own_hardware(threads, progress=progress)
    path, _, builder = source.partition(":")
    stem = Path(path).with_suffix("")
    default = stem.with_name(f"{stem.name}{'.' + builder if builder else ''}.{device}.profile.json")
    saved = output or default
    _ = ModelFile.parse(source).digest  # a file that is not there is told before anything else
    made = analytic_profile(source, hardware, micro_batches=micro_batches, optimizer=optimizer, progress=progress)
    files.write(made, saved)
    return made, saved
