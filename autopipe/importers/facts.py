"""What a file of per-layer figures does not say, and how its sizes become shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.core.errors import UsageError
from autopipe.core.hardware import full_name
from autopipe.core.profile import DTYPE_BYTES


@dataclass(frozen=True)
class Facts:
    """What the user adds to a file; None where nothing was said. ``path`` is what messages call the file."""

    path: str
    micro_batch: int | None = None
    device: str | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"--dtype {self.dtype!r} is not known: use one of {', '.join(DTYPE_BYTES)}")

    def needed_micro_batch(self) -> int:
        """The batch size of the figures. Raises UsageError that asks for it."""
        if self.micro_batch is None:
            raise UsageError(
                f"{self.path} does not say for how many samples its figures are: add --micro-batch N, "
                f"the batch size of the run that was measured"
            )
        return self.micro_batch

    def needed_device(self) -> str:
        """The full name of the device that was measured. Raises UsageError that asks for it."""
        if self.device is None:
            raise UsageError(f"{self.path} does not say on which device it was measured: add --device NAME")
        return full_name(self.device)


def shape_of(sizes: Mapping[int, int], dtype: str) -> tuple[tuple[int | str, ...], str] | None:
    """A flat shape and dtype that give these bytes at these micro-batch sizes; None where no shape can.

    ``sizes`` maps a micro-batch size to bytes.
    """
    for kind in (dtype, "uint8"):
        elements = {batch: divmod(size, DTYPE_BYTES[kind]) for batch, size in sizes.items()}
        if any(rest for _, rest in elements.values()):
            continue
        if all(count % batch == 0 for batch, (count, _) in elements.items()):
            each = {count // batch for batch, (count, _) in elements.items()}
            if len(each) == 1:
                return (f"{each.pop()}*b",), kind
        if len(set(elements.values())) == 1:
            return (next(iter(elements.values()))[0],), kind
    return None
