"""When each action of a step really ran on this rank, and what the rank waits for meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from autopipe.core.schedule import Action, Op
from autopipe.core.timeline import Span
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import Clock, Mark, synchronize


class Recorder:
    """Marks the begin and end of every compute action by wrapping a stage's three methods.

    The loss belongs to the last stage's forward (``loss``).
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.clock = Clock(device)
        self._device = device
        self._rank = rank
        self._marks: list[tuple[Action, Mark, Mark]] = []

    def watch(self, stage: PipelineStage) -> None:
        """Record the stage's actions from now on."""
        index = stage.stage_index
        stage.forward_one_chunk = self._timed(  # type: ignore[method-assign]
            stage.forward_one_chunk, lambda chunk, args: Action(index, Op.F, chunk)
        )
        stage.backward_one_chunk = self._timed(  # type: ignore[method-assign]
            stage.backward_one_chunk, lambda chunk, args: Action(index, _backward(args), chunk)
        )
        stage.backward_weight_one_chunk = self._timed(  # type: ignore[method-assign]
            stage.backward_weight_one_chunk, lambda chunk, args: Action(index, Op.W, chunk)
        )

    def _timed(self, function: Callable[..., Any], name: Callable[[int, dict[str, Any]], Action]) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            action = name(chunk, kwargs)
            launch.beat(str(action))
            start = self.clock.mark()
            result = function(chunk, *args, **kwargs)
            self._marks.append((action, start, self.clock.mark()))
            launch.beat(f"a wait after {action}", waiting=True)
            return result

        return timed

    def timed(self, action: Action, function: Callable[[], None]) -> None:
        """Run something that is not a stage's, the optimizer's step, as an action."""
        launch.beat(str(action))
        start = self.clock.mark()
        function()
        self._marks.append((action, start, self.clock.mark()))

    def loss(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute the loss, as a part of the action before."""
        launch.beat("the loss")
        value = function()
        if self._marks:
            action, start, _ = self._marks[-1]
            self._marks[-1] = (action, start, self.clock.mark())
            launch.beat(f"a wait after {action}", waiting=True)
        return value

    def restart(self) -> None:
        """Forget what was recorded; now is the moment 0."""
        self._marks.clear()
        self.clock.restart()

    def spans(self) -> list[Span]:
        """What was recorded since the restart, after the device has finished it."""
        synchronize(self._device)
        since = self.clock.since_start
        return [Span(self._rank, action, since(start), since(end)) for action, start, end in self._marks]


def _backward(kwargs: dict[str, Any]) -> Op:
    return Op.B if kwargs.get("full_backward", True) else Op.I
