"""CPU seconds of the solvers at size, best of three.

    python benchmarks/solvers.py

Layers are random, 10 % to either side of equal, always the same. Nothing else should run on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autopipe.solvers import balance, chain_dp, device_dp, ilp, recomputation, replicas
from autopipe.solvers.chain_dp import Floats

LAYERS, STAGES = 128, 32


def sums(layers: int, seed: int) -> Floats:
    """The work of layers up to each position."""
    return np.concatenate([[0.0], np.cumsum(np.random.default_rng(seed).uniform(0.9, 1.1, layers))])


def ranges(values: Floats) -> Floats:
    """What lies between positions; infinite where nothing does."""
    inside = np.triu(np.ones((len(values), len(values))), 1) > 0
    return np.where(inside, values[None, :] - values[:, None], np.inf)


def classes() -> list[device_dp.Option]:
    """Two classes of devices, one 1.7 times as fast with 0.7 of the memory; what does not fit recomputes.

    Stage s holds STAGES − s micro-batches. A layer holds 1 for each and 2 always, its forward is a third of its work,
    and recomputing frees 0.9. The memory is 60 % of what the first stages of equal splits need without recomputation.
    """
    work, forward = sums(LAYERS, 0), sums(LAYERS, 0) / 3
    count = ranges(np.arange(LAYERS + 1.0))
    flights = np.arange(STAGES, 0, -1.0)[:, None, None]
    memory = 0.6 * (flights + 2) * LAYERS / STAGES
    found = []
    for speed, part in ((1.0, 1.0), (1.7, 0.7)):
        missing = np.where(np.isfinite(count), ((flights + 2) * count - part * memory.max()) / flights, np.inf)
        extra = recomputation.least_seconds(np.diff(forward), np.full(LAYERS, 0.9), missing)
        found.append(device_dp.Option(len(found), (ranges(work) + extra) / speed))
    return found


def best_of_three(call: Callable[[], object]) -> float:
    """CPU seconds."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def show(what: str, call: Callable[[], object]) -> None:
    """Time and print."""
    print(f"{what:86}{best_of_three(call):9.4f} s", flush=True)


def main() -> None:
    """All rows."""
    work, reduced = ranges(sums(200, 1)), ranges(sums(200, 2) / 60)
    stages = np.broadcast_to(work, (64, *work.shape))
    hops = np.full_like(stages, 0.02)
    scaling = replicas.Ring(work, reduced, range(1, 1025))
    options, half = classes(), [STAGES // 2] * 2
    small = [device_dp.Option(c, np.stack([ranges(sums(64, 3)) / speed] * 8)) for c, speed in enumerate((1.0, 1.7))]
    known = device_dp.smallest_step(small, [4, 4], 31)
    assert known is not None
    show(
        "longest stage, 200 layers, 64 stages, bisection",
        lambda: balance.smallest_longest([*np.diff(sums(200, 1))], 64),
    )
    show("longest stage, 200 layers, 64 stages, any costs", lambda: chain_dp.smallest_maximum(stages))
    show("step, 200 layers, 64 stages, 256 micro-batches", lambda: chain_dp.smallest_step(stages, hops, 255))
    show("end, 200 layers, 64 stages, 256 micro-batches", lambda: chain_dp.smallest_end(stages, 256 * stages))
    show("replicas, 200 layers, 1,024 devices", lambda: replicas.smallest_longest(scaling, 1024))
    show(f"recomputation of all ranges, {LAYERS} layers, {STAGES} stages, 2 classes", classes)
    show(
        f"step, {LAYERS} layers, {STAGES} stages on 2 classes, 128 micro-batches, recomputing",
        lambda: device_dp.smallest_step(options, half, 127),
    )
    show(
        "the same by integer programming, 64 layers, 8 stages on 2 classes, 32 micro-batches",
        lambda: ilp.smallest_step(small, [4, 4], 31, cutoff=known.value),
    )


if __name__ == "__main__":
    main()
