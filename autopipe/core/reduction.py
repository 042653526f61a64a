"""How the losses of micro-batches make up the loss of their batch."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.core.errors import UsageError

KINDS = ("mean", "sum", "count")


@dataclass(frozen=True)
class Reduction:
    """What a micro-batch's loss counts for in the batch's loss, which is the sum of share × loss.

    - ``mean``: the loss is a mean over rows; a share is the micro-batch's rows over the batch's.
    - ``sum``: it is a sum over rows; every share is 1.
    - ``count``: it is a mean over the elements that count; a share is the micro-batch's number of them over the
      batch's. Counted is what is not ``ignored`` in ``tensor``, or the tensor's sum where ``ignored`` is None, as of a
      mask; the first ``skipped`` positions of dimension 1 are left out, as in a loss on the next token.

    ``tensor`` is a path into the batch: ``target``, ``target.mask``, ``inputs.labels``, ``inputs.0``. Raises
    UsageError for another kind, and for a count of nothing.
    """

    kind: str
    tensor: str = ""
    ignored: int | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"reduction {self.kind!r} is not known: use one of {', '.join(KINDS)}")
        if (self.kind == "count") != bool(self.tensor):
            raise UsageError(f"reduction {self.kind!r} with tensor {self.tensor!r}: a count names one, others none")

    def __str__(self) -> str:
        if self.kind != "count":
            return f"a {self.kind} over rows"
        after = f" from position {self.skipped} on" if self.skipped else ""
        what = f"the sum of {self.tensor}" if self.ignored is None else f"{self.tensor} other than {self.ignored}"
        return f"a mean over {what}{after}"


MEAN = Reduction("mean")
"""What most losses are."""
