"""V-Min (Qi et al., 2024, arXiv 2405.15362): two stages on a rank in a V, in a third of 1F1B's memory.

A block of six slots goes down the ranks, up, and back, one slot a hop, so that a micro-batch comes back soonest:

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    rank 1   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

Peak (p + 4) // 3 micro-batches' activations of a rank. It idles for about 2p/3m of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.passes import Slots, block_variants
from autopipe.ordering.presets import fit


@schedule("V-Min", placement="v", stages_per_rank=(2,), looks_at_times=True)
def v_min(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The block, as the values come, in the memory of (p + 4) // 3 micro-batches."""
    return fit(shape, times, (shape.ranks + 4) // 3, block_variants(slots(shape.ranks))).order


def slots(ranks: int) -> list[Slots]:
    """Each rank's slots. Where 3 divides p the way back starts two slots late: else slots would fall together."""
    late = 2 if ranks % 3 == 0 else 0
    return [Slots(r, 2 * ranks - 1 - r, 2 * ranks + late + r, 4 * ranks + late - 1 - r) for r in range(ranks)]
