"""Seconds of each stage, as a file that is written by hand: what ``autopipe schedule --costs`` reads.

{"format": "autopipe.costs", "version": 1,
 "forward_s": [0.01, 0.02], "input_grad_s": [0.01, 0.02], "weight_grad_s": [0.007, 0.01], "transfer_s": [0.0005]}
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.core.errors import UsageError
from autopipe.core.schedule import StageTimes


@dataclass(frozen=True)
class StageSeconds:
    """One number a stage, and one a hop between neighbouring stages.

    ``backward_s`` is by default I and W together, ``transfer_s`` nothing. Raises UsageError where the lists are not
    equally long.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()
    transfer_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        lengths = [len(self.input_grad_s), len(self.weight_grad_s), len(self.backward_s) or stages]
        if not stages or set(lengths) != {stages} or len(self.transfer_s) not in (0, stages - 1):
            raise UsageError(
                f"forward_s has {stages} stages, input_grad_s {lengths[0]}, weight_grad_s {lengths[1]}, backward_s "
                f"{lengths[2]}, and transfer_s {len(self.transfer_s)} hops: give n of each, n − 1 hops or none"
            )

    @classmethod
    def equal(
        cls, stages: int, *, forward_s: float, input_grad_s: float, weight_grad_s: float, transfer_s: float = 0.0
    ) -> StageSeconds:
        """The same for all stages and hops."""
        return cls(
            (forward_s,) * stages,
            (input_grad_s,) * stages,
            (weight_grad_s,) * stages,
            transfer_s=(transfer_s,) * (stages - 1),
        )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_s)

    def times(self) -> list[StageTimes]:
        """What a schedule looks at."""
        backward = self.backward_s or tuple(map(sum, zip(self.input_grad_s, self.weight_grad_s, strict=True)))
        columns = (self.forward_s, backward, self.input_grad_s, self.weight_grad_s)
        return [StageTimes(*seconds) for seconds in zip(*columns, strict=True)]
