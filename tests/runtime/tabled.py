"""Any action table on all stages of a model in one process: the ranks' actions in an order that their waits allow.

The stages are those that ranks would run, and each action does what torch's runtime does for it; only processes and
messages are missing. So tables with many forwards in flight can be tried by the hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.core.schedule import Action, Op, Schedule
from autopipe.core.validation import sequence
from autopipe.runtime.capture import Captured
from autopipe.runtime.capture.restoring import same_attributes
from autopipe.runtime.checking.draws import same_draws
from autopipe.runtime.running.in_turn import check_in_turn
from autopipe.runtime.stages.modules import StageModule, build_stages
from tests.models import Case
from tests.runtime.chained import assert_same, backward, eager, reference_of, take_steps

Tensors = tuple[torch.Tensor, ...]


@dataclass
class _Flights:
    """What is between two actions: by stage and micro-batch."""

    received: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    made: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    later: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)


def tabled(
    case: Case, captured: Captured, stages: Sequence[StageModule], schedule: Schedule, batches: Sequence[Any]
) -> list[float]:
    """Forward and backward of the batches by a table; each one's loss over their number."""
    flights = _Flights()
    bound = [captured.bind(inputs) for inputs, _ in batches]
    for rank, place in sequence(schedule):
        action = schedule.order[rank][place]
        if action.op is Op.F:
            _forward(flights, stages, action, bound[action.micro_batch])
            if schedule.is_last(action.stage):
                output = captured.unflatten(flights.made[action.stage, action.micro_batch])
                loss = case.loss_fn(output, batches[action.micro_batch][1]) / len(batches)
                flights.losses[action.micro_batch] = loss
        elif action.op is Op.W:
            flights.later.pop((action.stage, action.micro_batch))()
        else:
            _backward(flights, stages, action, last=schedule.is_last(action.stage))
    return [flights.losses[number].item() for number in range(len(batches))]


def assert_trains_by_table(
    case: Case, captured: Captured, schedule: Schedule, cuts: Sequence[int], *, recompute: Sequence[int] = ()
) -> None:
    """Two steps by a table and in eager mode: losses, gradients, parameters and buffers; the model is left changed."""
    check_in_turn(captured, schedule, cuts)
    model = captured.model
    model.zero_grad()
    reference = reference_of(case, model)
    stages = build_stages(captured, cuts, recompute=recompute, deferred=schedule.splits_backward)
    with same_attributes(model):
        for step in range(2):
            torch.manual_seed(step)
            batches = [case.example_batch(captured.micro_batch or 2) for _ in range(schedule.micro_batches)]
            with same_draws(captured):
                expected = eager(case, reference, batches)
                found = tabled(case, captured, stages, schedule, batches)
            assert_same(captured, reference, found, expected)
            take_steps(model, reference)


def _forward(flights: _Flights, stages: Sequence[StageModule], action: Action, bound: dict[str, torch.Tensor]) -> None:
    stage, _, batch = action
    sent = flights.made.get((stage - 1, batch), ())
    received = tuple(
        tensor.detach().clone().requires_grad_(edge.needs_gradient)
        for tensor, edge in zip(sent, stages[stage].receives, strict=True)
    )
    flights.received[stage, batch] = received
    flights.made[stage, batch] = stages[stage](*received, **bound)


def _backward(flights: _Flights, stages: Sequence[StageModule], action: Action, *, last: bool) -> None:
    stage, op, batch = action
    made = flights.made.pop((stage, batch))
    if last:
        flights.losses[batch].backward()
    else:
        backward(stages[stage], made, [tensor.grad for tensor in flights.received.pop((stage + 1, batch))])
    if stages[stage].deferred:
        work = stages[stage].weight_backward()
        if op is Op.I:
            flights.later[stage, batch] = work
        else:
            work()
