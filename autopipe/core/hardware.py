"""Devices as their vendors describe them: what analytic costs are computed from, and what names mean.

Figures are for dense matrices and the clock of the data sheet; what part of them programs reach is Hardware.reached.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.core.errors import UsageError

MEMORY_CLASSES = ("pointwise", "special")
"""The classes of operations that memory limits: sums and products of elements; softmax, norms, activation functions."""

GPU_REACHED = {"matmul": 0.65, "attention": 0.40, "convolution": 0.50, "pointwise": 0.80, "special": 0.65}
"""What part of the peak programs on a GPU reach, by class of operation.

Sources: large bfloat16 products reach 0.6 to 0.7 of the dense peak (the model FLOP utilisation that Megatron-LM reports
for whole steps, arXiv:2104.04473, is 0.44 to 0.52 with all else included), FlashAttention-2 0.5 of it forward and 0.4
backward on an A100 (arXiv:2307.08691) and 0.35 to 0.4 on an H100, STREAM-like kernels 0.8 to 0.9 of the memory's.
"""


@dataclass(frozen=True)
class Hardware:
    """One device.

    ``flops_per_s`` is by dtype, for matrices; a dtype that is not there runs at float32's. ``reached`` is the part of
    the peak that each class of operations reaches: of the arithmetic for ``matmul``, ``attention`` and
    ``convolution``, of the memory's for MEMORY_CLASSES. ``kernel_s`` is what an operation takes at least. What
    is no larger than ``cache_bytes`` moves ``cached`` times as fast.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    source: str
    reached: Mapping[str, float]
    kernel_s: float
    is_gpu: bool = True
    cache_bytes: int = 0
    cached: float = 1.0

    def seconds(self, kind: str, flops: float, size: int, dtype: str) -> float:
        """What an operation of a class takes: the longest of its arithmetic, its traffic, and an empty kernel."""
        peak = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        memory = self.reached[kind] if kind in MEMORY_CLASSES else self.reached["pointwise"]
        if size <= self.cache_bytes:
            memory *= self.cached
        arithmetic_s = flops / (peak * self.reached[kind]) if flops else 0.0
        return max(arithmetic_s, size / (self.bytes_per_s * memory), self.kernel_s)


def _gpu(
    name: str,
    memory_gb: int,
    bandwidth: float,
    half: float,
    single: float,
    double: float,
    source: str,
    *,
    bfloat16: bool = True,
) -> Hardware:
    """A GPU: memory in 10⁹ bytes, bandwidth in 10⁹ bytes/s, dense 10¹² FLOP/s for 16-, 32- and 64-bit floats.

    Without ``bfloat16`` its matrix units do not take that, and it runs at float32's rate.
    """
    flops = {"bfloat16": half if bfloat16 else single, "float16": half, "float32": single, "float64": double}
    return Hardware(
        name=name,
        flops_per_s={dtype: figure * 1e12 for dtype, figure in flops.items()},
        bytes_per_s=bandwidth * 1e9,
        memory_bytes=memory_gb * 10**9,
        source=source,
        reached=GPU_REACHED,
        kernel_s=4e-6,
    )


HARDWARE: dict[str, Hardware] = {
    "h200": _gpu("NVIDIA H200 SXM", 141, 4800, 989.4, 66.9, 66.9, "NVIDIA H200 data sheet, sparse figures halved"),
    "h100": _gpu("NVIDIA H100 SXM", 80, 3350, 989.4, 66.9, 66.9, "NVIDIA H100 data sheet, sparse figures halved"),
    "a100": _gpu("NVIDIA A100 SXM 80GB", 80, 2039, 312, 19.5, 19.5, "NVIDIA A100 80GB data sheet"),
    "v100": _gpu("NVIDIA V100 SXM2", 16, 900, 125, 15.7, 7.8, "NVIDIA V100 data sheet", bfloat16=False),
    "l4": _gpu("NVIDIA L4", 24, 300, 121, 30.3, 0.49, "NVIDIA L4 data sheet, sparse figures halved"),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 24, 1008, 165.2, 82.6, 1.29, "NVIDIA Ada GPU architecture white paper"),
}
"""The devices that are known, by the name that ``--device`` takes."""


def known(name: str) -> Hardware:
    """A device by its short or full name. Raises UsageError that lists those there are."""
    found = HARDWARE.get(name.lower().replace("-", "")) or next((h for h in HARDWARE.values() if h.name == name), None)
    if found is None:
        close = difflib.get_close_matches(name.lower(), HARDWARE, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"--device {name!r} is not known{hint}: use one of {', '.join(HARDWARE)}, cpu")
    return found


def full_name(name: str) -> str:
    """The full name of a device that is known by a short one; any other name as it is."""
    found = HARDWARE.get(name.lower())
    return found.name if found else name
