"""The torch script's two functions that add the losses of micro-batches up to their batch's (core/reduction.py)."""

from __future__ import annotations

from autopipe.core.errors import CannotExport
from autopipe.core.reduction import Reduction
from autopipe.export.text import in_docstring, quoted

_EVEN = '''\
def shares(inputs, target):
    """What the loss of each micro-batch of all replicas counts for in the batch's: {what}."""
    return torch.full((MICRO_BATCHES * REPLICAS,), {share}, dtype=torch.float64)


def weighed(loss_fn, output, target, share):
    """A micro-batch's part of the batch's loss."""
    return loss_fn(output, target) * share
'''
_COUNTED = '''\
def shares(inputs, target):
    """What the loss of each micro-batch of all replicas counts for in the batch's.

    It is {what}.
    """
    counts = torch.stack([some.{count}.sum().double() for some in {tensor}.split(MICRO_BATCH)]).cpu()
    return counts / counts.sum().clamp(min=1e-12)


def weighed(loss_fn, output, target, share):
    """A micro-batch's part of the batch's loss. Where nothing counts, its own loss would be 0 / 0."""
    if share:
        return loss_fn(output, target) * share
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum(leaf.nan_to_num().sum() * 0.0 for leaf in leaves if leaf.is_floating_point() and leaf.dim())
'''


def share_functions(reduction: Reduction) -> str:
    """``shares(inputs, target)``, a tensor with a number a micro-batch, and ``weighed``, what is summed up."""
    if reduction.kind == "mean":
        return _EVEN.format(what="all the same", share="1 / (MICRO_BATCHES * REPLICAS)")
    if reduction.kind == "sum":
        return _EVEN.format(what="the loss is a sum over rows", share="1.0")
    count = "double()" if reduction.ignored is None else f"ne({reduction.ignored})"
    return _COUNTED.format(what=in_docstring(str(reduction)), count=count, tensor=_expression(reduction))


def _expression(reduction: Reduction) -> str:
    """The counted tensor as Python. Raises CannotExport for one that is not of ``inputs`` or ``target``."""
    first, *keys = reduction.tensor.split(".")
    if first not in ("inputs", "target"):
        raise CannotExport(f"torch: the loss counts {reduction.tensor!r}, which is not of inputs or target: plan again")
    at = "".join(f"[{key}]" if key.isdecimal() else f"[{quoted(key)}]" for key in keys)
    return f"{first}{at}" + (f"[:, {reduction.skipped}:]" if reduction.skipped else "")
