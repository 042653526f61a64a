"""This machine's own speeds: a few small programs in place of a data sheet, for analytic costs on a CPU.

All cores are busy meanwhile, as they are when a pipeline runs: processes share the memory's speed and the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from autopipe.core.hardware import Hardware
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import cores, describe, memory_bytes

REPEATS = 15
TIMEOUT_S = 60.0
_LARGE, _SMALL = 1 << 22, 1 << 15
"""Elements of a tensor that no cache holds, and of one that is in the cache when it was just written."""


class Speeds(NamedTuple):
    """FLOP/s of products, attention and convolutions; bytes/s of sums in memory and in the cache, and of functions."""

    matmul: float
    attention: float
    convolution: float
    pointwise: float
    cached: float
    special: float
    kernel_s: float


def own_hardware(threads: int = 1, *, progress: Callable[[str], None] | None = None) -> Hardware:
    """This CPU as a device of ``threads`` threads; takes a few seconds. Raises RankFailed when a process dies."""
    ranks = max(1, cores() // threads)
    found = launch.launch(measure_rank, (), ranks=ranks, timeout_s=TIMEOUT_S, threads=threads, progress=progress)
    return hardware_of(
        Speeds(*(statistics.fmean(values) for values in zip(*found, strict=True))),
        describe("cpu", threads),
        memory_bytes("cpu", ranks),
    )


def hardware_of(speeds: Speeds, name: str, memory: int) -> Hardware:
    """The device that has such speeds."""
    return Hardware(
        name=name,
        flops_per_s={"float32": speeds.matmul},
        bytes_per_s=speeds.pointwise,
        memory_bytes=memory,
        source="measured on this machine with all cores busy",
        reached={
            "matmul": 1.0,
            "attention": speeds.attention / speeds.matmul,
            "convolution": speeds.convolution / speeds.matmul,
            "pointwise": 1.0,
            "special": speeds.special / speeds.pointwise,
        },
        kernel_s=speeds.kernel_s,
        is_gpu=False,
        cache_bytes=8 * _SMALL * 4,
        cached=max(1.0, speeds.cached / speeds.pointwise),
    )


def measure_rank() -> Speeds:
    """One rank's part: medians, with every rank busy."""
    launch.beat.phase("measuring the machine's speeds")
    dist.barrier()
    rows, width, wide = 512, 512, 1024
    a, b = torch.randn(rows, width), torch.randn(width, wide)
    q = torch.randn(2, 4, 256, 64)
    image, kernel = torch.randn(4, 32, 32, 32), torch.randn(64, 32, 3, 3)
    large, small, one = torch.randn(_LARGE), torch.randn(_SMALL), torch.randn(1)
    products_s = statistics.fmean([_median_s(lambda: a @ b), _median_s(lambda: a.t() @ (a @ b)) / 2])
    attention = 4 * 2 * 4 * 256 * 256 * 64
    convolution = 2 * 4 * 64 * 32 * 32 * 32 * 9
    special = [
        _median_s(lambda: functional.gelu(large)),
        _median_s(lambda: torch.softmax(large.view(-1, 512), -1)),
        _median_s(lambda: functional.layer_norm(large.view(-1, 512), (512,))),
    ]
    return Speeds(
        matmul=2 * rows * width * wide / products_s,
        attention=attention / _median_s(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True)),
        convolution=convolution / _median_s(lambda: functional.conv2d(image, kernel, padding=1)),
        pointwise=12 * _LARGE / _median_s(lambda: large + large),
        cached=12 * _SMALL / _median_s(lambda: small + small),
        special=8 * _LARGE / statistics.fmean(special),
        kernel_s=_median_s(lambda: one + one),
    )


def _median_s(run: Callable[[], torch.Tensor]) -> float:
    """Median seconds; the first runs are warm-up."""
    seconds = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])
