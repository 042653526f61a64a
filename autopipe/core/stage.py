"""What a range of layers costs when it becomes a stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopipe.core.errors import UsageError
from autopipe.core.optimizer import Optimizer, optimizer_of
from autopipe.core.profile import Edge, LayerCost, Profile, Tie
from autopipe.core.schedule import StageTimes

AFTER_INPUT_GRAD: dict[str, float | None] = {"profile": None, "torch": 1.5, "papers": 0.5}
"""Models of memory, by the part of what F keeps that is held between I and W; None is what was measured."""


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of one stage, for one micro-batch where that makes a difference.

    ``receive_bytes`` and ``send_bytes`` are the activations over its two boundaries; ``receive_grad_bytes`` and
    ``send_grad_bytes`` the gradients that come back for what it sent, and that it returns for what it received.
    ``first_backward_bytes`` is the most that one micro-batch's activations, workspace and the gradients made so far
    come to in a step's first whole backward, which frees activations layer by layer while it makes gradients.
    ``reduce_s`` is the time that its replicas need together after its rank's last action: to average its parameters'
    gradients, and where they share out the optimizer's state to hand the parameters round.
    ``shared_bytes`` are of parameters that a later stage of its rank holds too: all that comes of them, gradients and
    optimizer included, is counted there.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    optimizer_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    held_after_forward_bytes: int
    held_after_input_grad_bytes: int
    workspace_bytes: int
    receive_bytes: int = 0
    send_bytes: int = 0
    receive_grad_bytes: int = 0
    send_grad_bytes: int = 0
    first_backward_bytes: int = 0
    reduce_s: float = 0.0
    shared_bytes: int = 0

    @property
    def times(self) -> StageTimes:
        """The part that a schedule looks at."""
        return StageTimes(self.forward_s, self.backward_s, self.input_grad_s, self.weight_grad_s)

    def under(self, memory: str) -> StageCost:
        """The cost in a model of memory, by what a micro-batch holds between I and W.

        ``profile``: as it was measured with deferred weight gradients. ``torch``: half as much again as after F, as
        stock torch's own split does. ``papers``: half of it, the most that the zero-bubble papers count on.
        Raises UsageError for another name.
        """
        if memory not in AFTER_INPUT_GRAD:
            raise UsageError(f"memory model {memory!r} is not known: use one of {', '.join(AFTER_INPUT_GRAD)}")
        part = AFTER_INPUT_GRAD[memory]
        if part is None:
            return self
        return replace(self, held_after_input_grad_bytes=round(part * self.held_after_forward_bytes))

    @property
    def lasting_bytes(self) -> int:
        """Parameters, optimizer state and buffers: there from the first step to the last."""
        return self.parameter_bytes - self.shared_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def static_bytes(self) -> int:
        """What lasts, and the gradients, which are there from a step's first backward to its end."""
        return self.lasting_bytes + self.gradient_bytes

    def buffers_bytes(self, before: int, behind: int) -> int:
        """What is received and sent over the two boundaries for so many micro-batches; see core.in_flight.Kept.

        A gradient is as large as its activation, and none where that needs none.
        """
        return before * self.receive_bytes + behind * self.send_bytes

    def always_bytes(self, kept: tuple[int, int], copies: int = 1) -> int:
        """What is there throughout: what lasts, so many versions of the weights, and messages.

        See core.in_flight.Kept and versions.copies.
        """
        return self.lasting_bytes + (copies - 1) * self.parameter_bytes + self.buffers_bytes(*kept)


def _bytes(edges: tuple[Edge, ...], micro_batch: int, *, gradients: bool = False) -> int:
    return sum(edge.bytes(micro_batch) for edge in edges if edge.needs_gradient or not gradients)


def recomputed(profile: Profile, index: int, cost: LayerCost, micro_batch: int) -> LayerCost:
    """The cost of a layer that keeps only its inputs and runs its forward again before its backward.

    The last layer keeps what it held: that is the model's output and the loss's, which run once.
    """
    if index == len(profile.layers) - 1:
        return cost
    inputs = sum(edge.bytes(micro_batch) for edge in profile.inputs(index))
    return replace(
        cost,
        backward_s=cost.backward_s + cost.forward_s,
        input_grad_s=cost.input_grad_s + cost.forward_s,
        held_after_forward_bytes=min(inputs, cost.held_after_forward_bytes),
        held_after_input_grad_bytes=cost.held_after_input_grad_bytes,
        workspace_bytes=cost.workspace_bytes + cost.held_after_forward_bytes,
    )


def tied_optimizer_s(costs: Sequence[LayerCost], profile: Profile, tie: Tie) -> float:
    """The seconds of a tied parameter's optimizer step, which each of its layers' costs includes.

    They are its part of the layer's bytes, by the layer where that is least.
    """
    return min(costs[n].optimizer_s * tie.bytes / max(profile.layers[n].gradient_bytes, 1) for n in tie.layers)


def tied_state_bytes(update: Optimizer, profile: Profile, tie: Tie) -> int:
    """What the optimizer keeps for a tied parameter on a rank that holds it; nothing for a frozen one."""
    return update.state_bytes(profile.layers[tie.layers[0]], tie.bytes) if tie.trained else 0


def first_backward_bytes(costs: Sequence[LayerCost], gradients: Sequence[int]) -> int:
    """What StageCost.first_backward_bytes is: layer by layer from the last, what is held before, and made behind."""
    held, made, most = sum(cost.held_after_forward_bytes for cost in costs), 0, 0
    for cost, gradient in zip(reversed(costs), reversed(gradients), strict=True):
        most = max(most, held + made + cost.workspace_bytes)
        held, made = held - cost.held_after_forward_bytes, made + gradient
    return most


def shared_ties(
    profile: Profile, bounds: Sequence[tuple[int, int]], placement: Sequence[int], stage: int
) -> tuple[Tie, ...]:
    """The tied parameters that a stage and a later stage of its rank both read: the rank holds them once.

    They are counted with the later one, whose backward comes first and makes their gradient. ``bounds`` are the layers
    of all stages, ``placement`` their ranks.
    """
    if not profile.ties:
        return ()
    later = [bounds[other] for other in range(stage + 1, len(bounds)) if placement[other] == placement[stage]]
    return tuple(
        tie for tie in profile.ties if tie.read_in(*bounds[stage]) and any(tie.read_in(*other) for other in later)
    )


def stage_cost(
    profile: Profile,
    start: int,
    stop: int,
    micro_batch: int,
    *,
    speed: float = 1.0,
    optimizer: str | Optimizer | None = None,
    recompute: Collection[int] = (),
    shared: Collection[Tie] = (),
) -> StageCost:
    """The cost of layers ``start`` to ``stop`` (excluded) on a device ``speed`` times the profiled one.

    ``recompute`` names the layers whose activations are not kept. A parameter that several of the layers read
    is counted once; ``shared`` are those that are counted with a later stage of the rank (see ``shared_ties``).
    """
    layers, update = profile.layers[start:stop], optimizer_of(optimizer or profile.optimizer)
    whole = update.priced(profile.layers, profile.at(micro_batch))
    costs = [
        recomputed(profile, i, cost, micro_batch) if i in recompute else cost
        for i, cost in enumerate(whole[start:stop], start)
    ]
    again = {tie: max(0, tie.read_in(start, stop) - 1) for tie in profile.ties}
    more = {tie: often + (tie in shared) for tie, often in again.items() if tie.trained}  # gradient and optimizer
    optimizer_s = sum(cost.optimizer_s for cost in costs)
    optimizer_s -= sum(tied_optimizer_s(whole, profile, tie) * often for tie, often in more.items())
    state = sum(map(update.state_bytes, layers))
    state -= sum(tied_state_bytes(update, profile, tie) * often for tie, often in more.items())
    parameters = sum(layer.parameter_bytes for layer in layers) - sum(t.bytes * often for t, often in again.items())
    gradients = sum(layer.gradient_bytes for layer in layers) - sum(t.bytes * often for t, often in more.items())
    incoming = profile.crossing(start) if start else ()
    outgoing = profile.crossing(stop) if stop < len(profile.layers) else ()
    held = sum(cost.held_after_forward_bytes for cost in costs)
    workspace = max((cost.workspace_bytes for cost in costs), default=0)
    first = first_backward_bytes(costs, [layer.gradient_bytes for layer in layers])
    return StageCost(
        forward_s=sum(cost.forward_s for cost in costs) / speed,
        backward_s=sum(cost.backward_s for cost in costs) / speed,
        input_grad_s=sum(cost.input_grad_s for cost in costs) / speed,
        weight_grad_s=sum(cost.weight_grad_s for cost in costs) / speed,
        optimizer_s=optimizer_s / speed,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=state,
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        held_after_forward_bytes=held,
        held_after_input_grad_bytes=sum(cost.held_after_input_grad_bytes for cost in costs),
        workspace_bytes=workspace,
        receive_bytes=_bytes(incoming, micro_batch),
        send_bytes=_bytes(outgoing, micro_batch),
        receive_grad_bytes=_bytes(outgoing, micro_batch, gradients=True),
        send_grad_bytes=_bytes(incoming, micro_batch, gradients=True),
        first_backward_bytes=min(first, held + gradients + workspace),  # a tied parameter's gradient is made once
        shared_bytes=sum(tie.bytes for tie in shared),
    )
