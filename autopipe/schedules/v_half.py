"""V-Half (Qi et al., 2024, arXiv 2405.15362): two stages on a rank in a V, in half of 1F1B's memory.

A block of six slots goes down the ranks two slots a hop and up one, both out and back:

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    rank 1   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

Peak (p + 2) // 2 micro-batches' activations of a rank. It idles for about p/2m of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.passes import Slots, block_variants
from autopipe.ordering.presets import fit


@schedule("V-Half", placement="v", stages_per_rank=(2,), looks_at_times=True)
def v_half(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The block, as the values come, in the memory of (p + 2) // 2 micro-batches."""
    return fit(shape, times, (shape.ranks + 2) // 2, block_variants(slots(shape.ranks))).order


def slots(ranks: int) -> list[Slots]:
    """Each rank's slots. Where p is even the way back starts three slots late: else slots would fall together."""
    late = 3 if ranks % 2 == 0 else 0
    return [
        Slots(2 * r, 3 * ranks - 2 - r, 3 * ranks + late + 2 * r - 1, 6 * ranks + late - 2 - r) for r in range(ranks)
    ]
