"""What no split can beat.

``quick_bound_s`` looks at layers only. ``least_ends`` runs dynamic programs over a case's tables: a stage cannot
start before the first micro-batch has come through the stages before it (head), must then run its whole row, and after
its last gradient the stages before it still have their backward to do (tail), then the optimizer. It also waits:
where its row lets only some micro-batches be in flight, a later one starts when an earlier one is back, and each such
round trip takes all later stages' forward and backward. Head, trip and tail are each the least over all splits; so
the largest term of a split is a bound for it, and the split whose largest term is smallest bounds them all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopipe.core.schedule import Action, Op, Schedule
from autopipe.planning.ranges import Floats, Ranges
from autopipe.planning.tables import Setting, Tables
from autopipe.simulate import OPS
from autopipe.solvers.chain_dp import prefix_sums


def quick_bound_s(
    setting: Setting, ranges: Ranges, depth: int, micro_batches: int, *, stages_per_rank: int = 1
) -> float:
    """Seconds that no schedule and no split into the stages of ``depth`` ranks can beat, without any tables.

    One micro-batch passes all layers. Some stage works as long as the best split's longest. And with w the work of a
    micro-batch on a device of the best speed, of which at least a part q is F and the input gradient, a stage that
    comes after work P of earlier ones takes q·P + m·w ≤ T in a step of T; so for all the work W of p stages to fit,
    T ≥ q·W / (1 − (1 − q/m)^p). A slower device takes on less, in proportion to its speed.

    With several stages on a rank, not all of its work comes after that of earlier ranks, nor in one range: what is left
    is the work of all ranks, shared out.
    """
    speeds = np.array(setting.speeds(range(depth)))
    if stages_per_rank > 1:
        average = micro_batches * ranges.work[0, -1] / speeds.sum()
        return float(max(ranges.way[0, -1] / speeds.max(), average) * ranges.tick_s)
    longest = micro_batches * ranges.longest_work[depth - 1]
    taken = 1 - np.prod(1 - ranges.forced_part * speeds / speeds.max() / micro_batches)
    everything = ranges.forced_part * ranges.work[0, -1] / taken
    return float(max(ranges.way[0, -1], everything, longest) / speeds.max() * ranges.tick_s)


def least_ends(tables: Tables, schedule: Schedule) -> Floats:
    """Ticks at which a step can end at the earliest when stage s takes a range, shape (stages, n + 1, n + 1).

    It holds for any choice of layers to recompute; infinite where none fits.
    """
    forward, backward, input_grad, weight_grad = tables.least
    rows = stage_rows(schedule)
    splits = np.array([row.splits for row in rows])[:, None, None]
    back = np.where(splits, np.minimum(backward, input_grad), backward)
    counts = np.array([row.counts for row in rows]).T[:, :, None, None]
    trailing = np.array([row.trailing for row in rows])[:, None, None] * weight_grad
    rounds = np.array([row.rounds for row in rows])[:, None, None]

    heads = prefix_sums(_possible(tables, forward + _behind(tables.activations)))[:, :, None]
    tails = prefix_sums(_possible(tables, back + _behind(tables.gradients)))[:, :, None]
    tails += tables.optimizer[0, 0, 1:].min()
    work = (counts * tables.least).sum(axis=0)
    ends = np.maximum.reduce([work + tables.optimizer, work - trailing + tails, rounds * _trips(tables, back) + tails])
    return _possible(tables, heads + ends)


class Row(NamedTuple):
    """What the bound needs to know of one stage's actions.

    ``counts`` is how often F, B, I and W run; ``splits`` whether any I does. ``trailing`` weight gradients come after
    the last gradient. ``rounds`` of F and its B or I follow one another without overlap.
    """

    counts: tuple[int, ...]
    splits: bool
    trailing: int
    rounds: int


def stage_rows(schedule: Schedule) -> list[Row]:
    """The rows of the schedule's stages."""
    actions: list[list[Action]] = [[] for _ in schedule.placement]
    for row in schedule.order:
        for action in row:
            actions[action.stage].append(action)
    return [_row(stage) for stage in actions]


def _row(actions: list[Action]) -> Row:
    ops = [action.op for action in actions]
    last = max(place for place, op in enumerate(ops) if op in (Op.B, Op.I))
    waiting, rounds = None, 0
    for _, op, micro_batch in actions:
        if op is Op.F and waiting is None:
            waiting = micro_batch
        elif op in (Op.B, Op.I) and micro_batch == waiting:
            waiting, rounds = None, rounds + 1
    return Row(tuple(map(ops.count, OPS)), Op.I in ops, ops[last:].count(Op.W), rounds)


def _possible(tables: Tables, ticks: Floats) -> Floats:
    return np.where(tables.possible, ticks, np.inf)


def _behind(transfers: Floats) -> Floats:
    """The transfer over the cut at a range's end, nothing behind the last stage; shape (stages, 1, n + 1)."""
    return np.vstack([transfers, np.zeros((1, transfers.shape[1]))])[:, None, :]


def _trips(tables: Tables, back: Floats) -> Floats:
    """From a forward's start to its gradient's end: this stage, all later ones at the least, and the links."""
    both = tables.least[0] + back + _behind(tables.activations + tables.gradients)
    backwards = _possible(tables, both)[::-1, ::-1, ::-1].transpose(0, 2, 1)  # last stage and last layer first
    later = prefix_sums(backwards)[::-1, ::-1]
    return np.asarray(both + later[:, None, :])
