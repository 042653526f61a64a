"""What every range of layers between two legal cuts costs, at once: the tables that the search works on.

Positions 0 … n stand for layer 0, the legal cuts, and the end; an array of shape (n + 1, n + 1) holds the range from
position a to position b at [a, b], for a < b. ``core.stage.stage_cost`` is the same for one range, and exact.

Times are counted in ticks, 2⁻³⁸ of the model's forward and backward, and are whole numbers of them. Sums of them are
exact, so equal splits tie exactly and the tie rule decides, whatever the unit that the profile was measured in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Link
from autopipe.core.optimizer import Optimizer, optimizer_of
from autopipe.core.profile import LayerCost, Profile, Tie
from autopipe.core.schedule import StageTimes
from autopipe.core.stage import recomputed, tied_optimizer_s, tied_state_bytes
from autopipe.planning.ladder import Floats, Ladder, Layers
from autopipe.planning.needs import Fit, Place
from autopipe.solvers.chain_dp import smallest_maxima

_TICKS = 2.0**38


class Whole(NamedTuple):
    """Ticks and bytes of all layers together; see Ranges."""

    work: float
    way: float
    optimizer: float
    static: float
    gradient: float


@dataclass(frozen=True, eq=False)
class Ranges:
    """The ranges of a profile at one micro-batch size, on the profiled device. Times in ticks of ``tick_s``.

    Of shape (n + 1, n + 1), except ``activations`` and ``gradients`` over the cut at a position, of shape (n + 1,):
    what a stage that begins or ends there receives and sends. ``static`` bytes are ``parameters``, their gradients,
    the optimizer's state and buffers. ``tied_ticks`` are those of each tied parameter's optimizer step.
    """

    ends: tuple[int, ...]
    tick_s: float
    layers: Layers
    forward: Floats
    backward: Floats
    input_grad: Floats
    weight_grad: Floats
    optimizer: Floats
    static: Floats
    parameters: Floats
    gradient: Floats
    held: Floats
    held_after_input_grad: Floats
    workspace: Floats
    first_backward: Floats
    activations: Floats
    gradients: Floats
    tied_ticks: Mapping[Tie, float]
    fits: defaultdict[bool, dict[Place, Fit]] = field(default_factory=lambda: defaultdict(dict), init=False)
    """What ranges need at places where layers may recompute, and where not, as tables.band keeps it."""
    least_extras: defaultdict[bool, dict[Place, Floats]] = field(default_factory=lambda: defaultdict(dict), init=False)
    """Of that what they must recompute at the least, as tables.least_extras keeps it."""
    _steps: dict[int, Floats] = field(default_factory=dict, init=False)

    @property
    def pieces(self) -> int:
        """How many pieces lie between the positions: the most stages there can be."""
        return len(self.ends) - 1

    @cached_property
    def ladder(self) -> Ladder:
        """Layers recompute in the order of ticks for each byte that they free."""
        return Ladder(self.layers, self.layers.ordered(self.layers.forward / np.maximum(self.layers.freed, 1)))

    @cached_property
    def by_bytes(self) -> Ladder:
        """Those that free most first: no choice of as many layers frees more."""
        return Ladder(self.layers, self.layers.ordered(-self.layers.freed))

    @cached_property
    def by_ticks(self) -> Ladder:
        """Those that are quickest first: no choice of as many layers takes less."""
        return Ladder(self.layers, self.layers.ordered(self.layers.forward))

    @cached_property
    def least_again(self) -> Floats:
        """The least workspace that recomputing any of a range's layers needs; infinite where none frees anything."""
        needs = np.where(self.layers.freed > 0, self.layers.workspace + self.layers.held, np.inf)
        return -largest(-needs, self.ends)

    @cached_property
    def real(self) -> NDArray[np.bool_]:
        """Which ranges begin before they end."""
        return np.triu(np.ones_like(self.forward, dtype=bool), 1)

    @cached_property
    def work(self) -> Floats:
        """The least ticks that a micro-batch takes in each range, its backward whole or split."""
        return self.forward + np.minimum(self.backward, self.input_grad + self.weight_grad)

    @cached_property
    def least_work(self) -> Floats:
        """The least work of 1, 2, … pieces together, shape (n,)."""
        return self._least(self.work)

    def least_step(self, micro_batches: int) -> Floats:
        """The least step in which one stage has 1, 2, … pieces and the others take no time, shape (n,).

        The first forward comes through all pieces before; the first backward when the way behind is done.
        """
        if micro_batches not in self._steps:
            row = micro_batches * self.work
            trip = self.way[:, -1] + self.forward + micro_batches * (self.work - self.forward)
            self._steps[micro_batches] = self._least(self.forward[0][:, None] + np.maximum(row, trip))
        return self._steps[micro_batches]

    def _least(self, values: Floats) -> Floats:
        return np.array([np.diagonal(values, count).min() for count in range(1, self.pieces + 1)])

    @cached_property
    def way(self) -> Floats:
        """The least ticks from a micro-batch's arrival in each range to the gradient that leaves it."""
        return self.forward + np.minimum(self.backward, self.input_grad)

    def forced_part(self, *, splits: bool) -> float:
        """The least part of any piece's work that others must wait for: its way there, with whole backwards also back.

        Where backwards are split, the way back may pass while later stages still run weight gradients.
        """
        return self._forced_parts[splits]

    @cached_property
    def _forced_parts(self) -> tuple[float, float]:
        work = np.diagonal(self.work, 1)
        ways = (np.diagonal(table, 1)[work > 0] for table in (self.way, self.forward))
        whole, split = (float(max(np.min(way / work[work > 0], initial=1.0), 1e-6)) for way in ways)
        return whole, split

    @cached_property
    def least_held(self) -> Floats:
        """The bytes of a micro-batch's activations in each range when all its layers recompute."""
        kept = np.concatenate([[0.0], np.cumsum(self.layers.held - self.layers.freed)])[list(self.ends)]
        return np.asarray(np.triu(kept[None, :] - kept[:, None], 1))

    @cached_property
    def least_crossing(self) -> float:
        """The fewest bytes of activations over any cut between layers."""
        return float(self.activations[1:-1].min(initial=np.inf)) if self.pieces > 1 else 0.0

    @cached_property
    def whole(self) -> Whole:
        """The range of all layers."""
        return Whole(*(float(t[0, -1]) for t in (self.work, self.way, self.optimizer, self.static, self.gradient)))

    @cached_property
    def longest_work(self) -> list[float]:
        """For 1 … n stages the work of the longest one, in the split where it is shortest."""
        longest = smallest_maxima(np.where(self.real, self.work, np.inf), self.pieces)
        return [*map(float, longest)]

    def times(self, stages: int) -> StageTimes:
        """The ticks of a stage that takes an equal part of the model."""
        whole = (self.forward, self.backward, self.input_grad, self.weight_grad)
        return StageTimes(*(float(ticks[0, -1]) / stages for ticks in whole))

    def places(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The positions of a split that is given by its cuts, both ends included."""
        return (0, *(self.ends.index(cut) for cut in cuts), self.pieces)

    @classmethod
    def of(
        cls, profile: Profile, micro_batch: int, *, optimizer: str | Optimizer, recompute_all: bool = False
    ) -> Ranges:
        """The tables of a profile. Raises UsageError for a micro-batch that was not measured."""
        update = optimizer_of(optimizer)
        kept = update.priced(profile.layers, profile.at(micro_batch))
        again = [recomputed(profile, i, cost, micro_batch) for i, cost in enumerate(kept)]
        costs = again if recompute_all else list(kept)
        ends = (0, *profile.legal_cuts(), len(profile.layers))
        layers = _layers(profile, kept, again)
        tick_s = sum(cost.forward_s + cost.backward_s for cost in kept) / _TICKS or 1.0
        crossing = [profile.crossing(end) if 0 < end < len(profile.layers) else () for end in ends]

        def summed(values: Sequence[float]) -> Floats:
            sums = np.concatenate([[0.0], np.cumsum(values)])[list(ends)]
            return np.asarray(np.triu(sums[None, :] - sums[:, None], 1))

        def ticks(field: str) -> Floats:
            return summed([np.rint(getattr(cost, field) / tick_s) for cost in costs])

        return cls(
            ends=ends,
            tick_s=tick_s,
            layers=replace(layers, forward=np.rint(layers.forward / tick_s)),
            forward=ticks("forward_s"),
            backward=ticks("backward_s"),
            input_grad=ticks("input_grad_s"),
            weight_grad=ticks("weight_grad_s"),
            optimizer=ticks("optimizer_s") - np.rint(_tied_optimizer(profile, ends, kept) / tick_s),
            **_static(profile, ends, update, summed),
            held=summed([cost.held_after_forward_bytes for cost in costs]),
            held_after_input_grad=summed([cost.held_after_input_grad_bytes for cost in costs]),
            workspace=largest(np.array([cost.workspace_bytes for cost in costs], np.float64), ends),
            first_backward=first_backward(
                ends,
                np.array([cost.held_after_forward_bytes for cost in costs], np.float64),
                np.array([cost.workspace_bytes for cost in costs], np.float64),
                layers.gradient,
            ),
            activations=np.array([sum(e.bytes(micro_batch) for e in edges) for edges in crossing], np.float64),
            gradients=np.array(
                [sum(e.bytes(micro_batch) for e in edges if e.needs_gradient) for edges in crossing], np.float64
            ),
            tied_ticks={
                tie: float(np.rint(tied_optimizer_s(kept, profile, tie) / tick_s)) for tie in profile.trained_ties
            },
        )

    def inside(self, layer: int) -> NDArray[np.bool_]:
        """Which ranges hold a layer."""
        ends = np.array(self.ends)
        return np.asarray((ends[:, None] <= layer) & (ends[None, :] > layer))

    def transfers(self, sizes: Floats, hops: Sequence[Link | None]) -> Floats:
        """Ticks to send each of the ``sizes`` over each hop, shape (hops, n + 1); None is inside a rank."""
        ticks = np.zeros((len(hops), len(sizes)))
        rows = {link: np.rint(_transfers_s(link, sizes) / self.tick_s) for link in set(hops) if link is not None}
        for row, link in zip(ticks, hops, strict=True):
            if link is not None:
                row[:] = rows[link]
        return ticks

    def reads(self, tie: Tie) -> NDArray[np.bool_]:
        """Which ranges hold any of a tie's layers."""
        return np.asarray(np.any([self.inside(layer) for layer in tie.layers], axis=0))

    def part_of(self, tie: Tie) -> Floats:
        """1 for the ranges that hold some but not all of a tie's layers, else 0."""
        held = np.sum([self.inside(layer) for layer in tie.layers], axis=0)
        return np.asarray((held > 0) & (held < len(tie.layers)), np.float64)


def _transfers_s(link: Link, sizes: Floats) -> Floats:
    """Link.transfer_s of many sizes."""
    return np.where(sizes > 0, link.latency_s + sizes / link.bytes_per_s, 0.0)


def _tied_optimizer(profile: Profile, ends: tuple[int, ...], costs: Sequence[LayerCost]) -> Floats:
    """Seconds that each range's sum counts too often: a tied parameter's, once for each further layer that has it."""
    total = np.zeros((len(ends), len(ends)))
    bounds = np.array(ends)
    for tie in profile.trained_ties:
        held = np.sum([(bounds[:, None] <= n) & (bounds[None, :] > n) for n in tie.layers], axis=0)
        total += np.maximum(held - 1, 0) * tied_optimizer_s(costs, profile, tie)
    return total


def _layers(profile: Profile, kept: Sequence[LayerCost], again: Sequence[LayerCost]) -> Layers:
    held = np.array([cost.held_after_forward_bytes for cost in kept], np.float64)
    return Layers(
        forward=np.array([cost.forward_s for cost in kept]),
        held=held,
        freed=held - np.array([cost.held_after_forward_bytes for cost in again]),
        workspace=np.array([cost.workspace_bytes for cost in kept], np.float64),
        gradient=np.array([layer.gradient_bytes for layer in profile.layers], np.float64),
    )


def _static(
    profile: Profile, ends: Sequence[int], update: Optimizer, summed: Callable[[Sequence[float]], Floats]
) -> dict[str, Floats]:
    """The bytes that do not depend on the micro-batch; a parameter that is read twice in a range counts once."""
    ties = profile.ties
    parameters = summed([layer.parameter_bytes for layer in profile.layers])
    parameters -= _twice(profile, ends, [tie.bytes for tie in ties])
    gradients = summed([layer.gradient_bytes for layer in profile.layers])
    gradients -= _twice(profile, ends, [tie.bytes * tie.trained for tie in ties])
    buffers = summed([layer.buffer_bytes for layer in profile.layers])
    tied = [tied_state_bytes(update, profile, tie) for tie in ties]
    state = summed([*map(update.state_bytes, profile.layers)]) - _twice(profile, ends, tied)
    static = parameters + gradients + state + buffers
    return {"static": static, "parameters": parameters, "gradient": gradients}


def _twice(profile: Profile, ends: Sequence[int], sizes: Sequence[int]) -> Floats:
    """What the sum of each range's layers counts too often: of each tie its size, once for each further layer."""
    edges = np.array(ends)
    twice = np.zeros((len(ends), len(ends)))
    for tie, size in zip(profile.ties, sizes, strict=True):
        inside = [(edges[:, None] <= layer) & (edges[None, :] > layer) for layer in tie.layers]
        twice += size * np.maximum(np.sum(inside, axis=0) - 1, 0)
    return twice


def largest(values: Floats, ends: Sequence[int]) -> Floats:
    """The largest of the layers' values in each range, 0 where there is none."""
    pieces = np.maximum.reduceat(values, ends[:-1])
    result = np.zeros((len(ends), len(ends)))
    inside = np.triu(np.ones((len(pieces), len(pieces)), dtype=bool))
    grid = np.maximum.accumulate(np.where(inside, pieces[None, :], -np.inf), axis=1)
    result[:-1, 1:] = np.where(inside, grid, 0)
    return result


def first_backward(ends: Sequence[int], held: Floats, workspace: Floats, gradient: Floats) -> Floats:
    """stage.first_backward_bytes of every range, from what its layers hold, need besides, and make.

    When layer l runs, those from the range's begin to l are still held, and the gradients of those behind are made.
    """
    kept, made = (np.concatenate([[0.0], np.cumsum(values)]) for values in (held, gradient))
    at_layer = largest(kept[1:] - made[1:] + workspace, ends)
    begin, end = kept[list(ends)], made[list(ends)]
    return np.asarray(np.triu(at_layer + end[None, :] - begin[:, None], 1))
