"""The published recurrences, in one process, from the papers' equations. Nothing of the runtime is used here.

Stages are lists of parameter names. W[s][v] is version v of stage s; step u makes version u + 1. Of micro-batch j in
update u = j // m, with w = p − s micro-batches in flight in stage s (0-based):

PipeDream        F and B at W[s][max(0, ⌊(j − w + 1)/m⌋)]; for m = 1 that is u − (p − 1 − s)
vertical sync    F and B at W[s][max(0, ⌊(j − p + 1)/m⌋)] for all s
2BW              F and B at W[s][max(0, u − 1)]
PipeMare         F at W[s][max(0, ⌊(j − w + 1)/m⌋)]; B at W[s][u] − τ_s δ_s; δ ← γδ + (1 − γ)(W[s][u+1] − W[s][u]),
                 γ = D^(1/τ_s); step k with learning rate α / max(τ_s, 1)^(1 − min(k/K, 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def forward_version(scheme: str, stage: int, ranks: int, per_update: int, batch: int) -> int:
    flight = ranks if scheme == "PipeDream-Sync" else ranks - stage
    if scheme == "PipeDream-2BW":
        return max(0, batch // per_update - 1)
    return max(0, math.floor((batch - flight + 1) / per_update))


def mean_delay(stage: int, ranks: int, per_update: int) -> float:
    """τ: of the m micro-batches of a late update, on average."""
    first = 1000 * per_update
    ages = [1000 - math.floor((j - (ranks - stage) + 1) / per_update) for j in range(first, first + per_update)]
    return sum(ages) / per_update


def train(
    scheme: str,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    batches: Sequence[Sequence[tuple[Any, Any]]],
    loss_fn: Callable[[nn.Module, Any, Any], torch.Tensor],
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    annealing: int = 0,
    decay: float | None = None,
    delayed: bool = True,
    drained_after: Sequence[int] = (),
    moved: Sequence[Sequence[str]] = (),
    on_step: Callable[[Sequence[torch.optim.Optimizer]], None] = lambda optimizers: None,
) -> list[float]:
    """Train in place on ``batches[u]``, the micro-batches of update u; the mean losses.

    ``delayed=False`` sets all delays to 0. ``drained_after`` are updates after which the pipeline was drained; with
    ``moved`` the stages are those from then on.
    """
    named = dict(model.named_parameters())
    ranks, per_update = len(stages), len(batches[0])
    optimizers = {name: make([parameter]) for name, parameter in named.items()}
    history = {name: [parameter.detach().clone()] for name, parameter in named.items()}
    change = {name: torch.zeros_like(p) for name, p in named.items()}
    taus = [mean_delay(s, ranks, per_update) if delayed else 0.0 for s in range(ranks)]
    losses, base = [], 0
    for update, micro_batches in enumerate(batches):
        total = 0.0
        gradients = {name: torch.zeros_like(p) for name, p in named.items()}
        for within, (inputs, target) in enumerate(micro_batches):
            batch = (update - base) * per_update + within
            for s, names in enumerate(stages):
                age = forward_version(scheme, s, ranks, per_update, batch) + base if delayed else update
                for name in names:
                    named[name].data.copy_(history[name][age])
            loss = loss_fn(model, inputs, target) / per_update
            if scheme == "PipeMare":
                for s, names in enumerate(stages):
                    for name in names:
                        shift = taus[s] * change[name] if decay is not None and taus[s] else 0.0
                        named[name].data.copy_(history[name][update] - shift)
            for name, gradient in zip(
                named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True
            ):
                if gradient is not None:
                    gradients[name] += gradient
            total += float(loss.detach())
        for s, names in enumerate(stages):
            factor = max(taus[s], 1.0) ** (1 - min(update / annealing, 1.0)) if annealing else 1.0
            for name in names:
                named[name].data.copy_(history[name][update])
                named[name].grad = gradients[name]
                (group,) = optimizers[name].param_groups
                rate, group["lr"] = group["lr"], group["lr"] / factor
                optimizers[name].step()
                group["lr"] = rate
                history[name].append(named[name].detach().clone())
                if decay is not None and taus[s]:
                    gamma = decay ** (1 / taus[s])
                    step = history[name][update + 1] - history[name][update]
                    change[name] = gamma * change[name] + (1 - gamma) * step
        on_step([*optimizers.values()])
        losses.append(total)
        if update + 1 in drained_after:
            base, stages = update + 1, moved or stages
    return losses
