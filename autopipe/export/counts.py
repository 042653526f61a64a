"""How many blocks each stage has: ``18,15,15,13``, as people write a split of a transformer.

The embeddings are on the first stage, the final norm and the head on the last.
"""

from __future__ import annotations

from autopipe.core.errors import CannotExport, UsageError
from autopipe.core.plan import Plan
from autopipe.export.names import is_block
from autopipe.export.text import comment
from autopipe.export.trainer import Files, Heading, exporter


@exporter("counts", target="any trainer", split_only=True)
def counts(plan: Plan, heading: Heading) -> Files:
    """``counts.txt``: one line. Raises CannotExport when layers beside the blocks are not at the two ends."""
    numbers = [sum(map(is_block, stage.layers)) for stage in plan.stages]
    layers = tuple(name for stage in plan.stages for name in stage.layers)
    if not all(numbers) or cuts_of_counts(tuple(numbers), layers) != plan.cuts:
        raise CannotExport(
            f"counts of blocks say {','.join(map(str, numbers))}, with what comes before the first block on the first "
            f"stage and what follows the last on the last; the plan cuts elsewhere too: use device-map"
        )
    return {"counts.txt": comment(heading) + ",".join(map(str, numbers)) + "\n"}


def cuts_of_counts(numbers: tuple[int, ...], layers: tuple[str, ...]) -> tuple[int, ...]:
    """The first layer of every stage but the first, from blocks a stage. Raises UsageError where they do not fit."""
    blocks = [index for index, layer in enumerate(layers) if is_block(layer)]
    if sum(numbers) != len(blocks) or not all(numbers):
        raise UsageError(
            f"the counts {','.join(map(str, numbers))} are {sum(numbers)} blocks, the model has {len(blocks)}: "
            f"give each stage at least one, and all of them"
        )
    ends = [sum(numbers[: stage + 1]) for stage in range(len(numbers) - 1)]
    return tuple(blocks[end] for end in ends)
