"""What a model's own forward does that cannot be captured: the line, the reason in our words, and what to do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.core.errors import CaptureError
from autopipe.runtime.capture import capture

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]
ODD: list[Any] = []
SILENTLY = "which torch.export drops silently"


class Odd(nn.Module):
    """A model with some forward."""

    def __init__(self, how: Forward) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def refused(reason: str) -> Callable[[Forward], Forward]:
    def add(how: Forward) -> Forward:
        ODD.append(pytest.param(how, reason, id=how.__name__))
        return how

    return add


@refused("numpy is given the values of a tensor")
def to_numpy(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    return model.last(x * float(np.tanh(x.detach().numpy()).mean()))


@refused("the values of a tensor are made into text")
def formats(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    return model.last(x * len(f"{x.mean():.3f}"))


@refused("it takes a gradient in its forward")
def force_field(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    energy = model.last(torch.tanh(model.first(x))).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@refused("it puts a hook on a tensor")
def hooks(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    x.register_hook(lambda gradient: gradient * 2)
    return model.last(x)


@refused("it reads a tensor's memory, as copy.deepcopy and other libraries do")
def copies(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last(copy.deepcopy(model.first)(x) + model.first(x))


@refused("it keeps a tensor that it makes where no graph can: in .data, an attribute, a global, or another thread")
def clips(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.first.weight.data.clamp_(-0.3, 0.3)
    return model.last(torch.tanh(model.first(x)))


@refused("torch.func.vmap in a forward cannot be exported")
def maps(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last(torch.func.vmap(lambda row: torch.tanh(model.first(row)))(x))


@refused("torch.func.grad in a forward cannot be exported")
def slopes(model: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.vmap(torch.func.grad(lambda row: torch.sin(row).clone().sum()))
    return model.last(slope(model.first(x)))


@refused("a sparse tensor in a forward cannot be exported")
def sparse(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last((torch.eye(8).to_sparse() @ model.first(x).T).T)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 1.5


@refused(f"it uses the autograd function Squared, {SILENTLY}")
def custom_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.last(Squared.apply(model.first(x)))


@refused(f"it changes its input x in place, {SILENTLY}")
def changes_its_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    x += 1
    return model.last(torch.tanh(model.first(x)))


@refused(f"it leaves seen for its next forward, {SILENTLY}")
def hidden_state(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(model.first(x))
    x = x if model.seen is None else x + model.seen
    model.seen = x.detach().mean(0)
    return model.last(x)


@pytest.mark.parametrize(("how", "reason"), ODD)
def test_the_reason_is_in_our_words(how: Forward, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Odd(how), (torch.randn(4, 8),))
    said = str(caught.value)
    lines, start = inspect.getsourcelines(how)
    own = range(start, start + len(lines))
    forward = range(inspect.getsourcelines(Odd.forward)[1], inspect.getsourcelines(Odd.forward)[1] + 2)
    file, line = said.partition(": ")[0].rsplit(":", 1)
    assert file == __file__
    assert int(line) in own or int(line) in forward
    assert reason in said
    assert "into a sub-module's forward: a sub-module is kept whole when need be" in said
    assert "Error" not in said


def test_what_is_refused_in_the_model_is_kept_whole_in_a_module() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), Odd(slopes), nn.Linear(8, 8)), (torch.randn(4, 8),))
    (note,) = captured.notes
    assert note.startswith("kept whole: 1 (")
    assert note.endswith("torch.func.grad in a forward cannot be exported)")
