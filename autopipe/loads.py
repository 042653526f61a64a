"""What a rank holds while each action of its row runs: activations, gradients, workspace, and what is always there.

A micro-batch's activations are held from the end of F to the end of B, or of I in part to the end of W; a stage's
gradients from its first W or the end of its first B. Which moments can be a rank's highest follows from the order alone
(``peak_loads``), so that a search looks at those and prices them for any stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from autopipe.core.in_flight import Kept, kept
from autopipe.core.schedule import Op, Schedule, stages_on
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Memory, Span
from autopipe.core.versions import copies


class Load(NamedTuple):
    """What a rank holds while one action runs, besides what it holds throughout.

    Stages are counted among those of the rank, ascending. ``running`` is the action's stage, None between actions.
    ``forwards`` counts each stage's micro-batches between F and B or I, ``input_grads`` those between I and W.
    ``gradients`` tells which stages have gradients; ``first`` that the action is the B that makes them.
    """

    running: int | None
    forwards: tuple[int, ...]
    input_grads: tuple[int, ...]
    gradients: tuple[bool, ...]
    first: bool = False

    def bytes(self, own: Sequence[StageCost]) -> int:
        """The bytes of activations, gradients and workspace; ``own`` are the rank's stages."""
        held = sum(
            f * stage.held_after_forward_bytes + i * stage.held_after_input_grad_bytes + g * stage.gradient_bytes
            for f, i, g, stage in zip(self.forwards, self.input_grads, self.gradients, own, strict=True)
        )
        if self.running is None:
            return held
        stage = own[self.running]
        more = stage.first_backward_bytes - stage.held_after_forward_bytes if self.first else 0
        return held + max(stage.workspace_bytes, more)

    def covers(self, other: Load) -> bool:
        """Whether this load is at least the other, whatever the stages cost."""
        if self.running != other.running or (other.first and not self.makes_gradients()):
            return False
        mine, theirs = (*self.forwards, *self.input_grads), (*other.forwards, *other.input_grads)
        counts = zip((*mine, *self.gradients), (*theirs, *other.gradients), strict=True)
        return all(a >= b for a, b in counts)

    def makes_gradients(self) -> bool:
        """Whether the action's stage has gradients or is making them."""
        return self.first or (self.running is not None and self.gradients[self.running])


def loads(schedule: Schedule, rank: int) -> Iterator[Load]:
    """A rank's load during each action of its row and each of its optimizer's steps; the last is what then remains."""
    own = stages_on(schedule.placement, rank)
    forwards, input_grads, gradients = [0] * len(own), [0] * len(own), [False] * len(own)
    for stage, op, _ in schedule.order[rank]:
        place = own.index(stage)
        first = op is Op.B and not gradients[place]
        gradients[place] = gradients[place] or op is Op.W
        yield Load(place, tuple(forwards), tuple(input_grads), tuple(gradients), first)
        gradients[place] = (gradients[place] or first) and op is not Op.O
        forwards[place] += schedule.trains if op is Op.F else -(op in (Op.B, Op.I))
        input_grads[place] += (op is Op.I) - (op is Op.W)
    for place in range(len(own) if schedule.trains and not schedule.asynchronous else 0):
        yield Load(place, tuple(forwards), tuple(input_grads), tuple(gradients))
    yield Load(None, tuple(forwards), tuple(input_grads), (False,) * len(own))


def peak_loads(schedule: Schedule, rank: int) -> tuple[Load, ...]:
    """The loads of a rank that can be its highest, whatever the stages cost. They depend on the order alone."""
    kept: list[Load] = []
    distinct = dict.fromkeys(load for load in loads(schedule, rank) if load.running is not None)
    for load in sorted(distinct, key=_most_first):
        if not any(other.covers(load) for other in kept):
            kept.append(load)
    return tuple(kept)


def _most_first(load: Load) -> tuple[int, int, bool]:
    """Sorts a load before all that it covers."""
    return -sum(load.forwards) - sum(load.input_grads), -sum(load.gradients), not load.first


def always_bytes(schedule: Schedule, stage: int, cost: StageCost, crossing: Kept) -> int:
    """What a stage holds throughout: what lasts, further versions of its weights, what is received and sent."""
    return cost.always_bytes(crossing, copies(schedule, stage))


def memory_curves(
    schedule: Schedule,
    stages: Sequence[StageCost],
    rows: Sequence[Sequence[Span]],
    crossing: Sequence[Kept] = (),
) -> tuple[tuple[Memory, ...], ...]:
    """Each rank's memory curve, from the spans of its row; ``crossing`` is what kept() says, where that is known."""
    both = zip(stages, crossing or kept(schedule), strict=True)
    always = [always_bytes(schedule, s, *of) for s, of in enumerate(both)]
    return tuple(_curve(schedule, rank, stages, always, row) for rank, row in enumerate(rows))


def _curve(
    schedule: Schedule, rank: int, stages: Sequence[StageCost], always: Sequence[int], spans: Sequence[Span]
) -> tuple[Memory, ...]:
    """A point where an action starts, and where it ends unless the next one starts there."""
    own = [stages[stage] for stage in stages_on(schedule.placement, rank)]
    base = sum(always[stage] for stage in stages_on(schedule.placement, rank))
    # the loads of most actions are few, again and again
    size: Callable[[Load], int] = cache(lambda load: base + load.bytes(own))
    row = [*loads(schedule, rank)]
    points = [Memory(0.0, base)]
    for load, then, span, following in zip(row, row[1:], spans, [*spans[1:], None], strict=False):
        points.append(Memory(span.start_s, size(load)))
        if following is None or following.start_s > span.end_s:
            points.append(Memory(span.end_s, size(then._replace(running=None))))
    return tuple(points[points[0].time_s == points[1].time_s :])
