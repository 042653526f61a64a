"""An optimizer's state under the names of the model's parameters: what moves between cuts and into one process.

The form is that of torch.distributed.checkpoint.state_dict, whose ``set_optimizer_state_dict`` loads it in one process:

    {"state": {name: {"exp_avg": …}}, "param_groups": [{"lr": …, "params": [name, …]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.core.errors import ModelError, UsageError

State = dict[str, Any]


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> State:
    """The state by name. Raises UsageError for a parameter that is not this rank's."""
    own = optimizer.state_dict()
    known = _names(optimizer, names)
    groups = [group | {"params": [known[number] for number in group["params"]]} for group in own["param_groups"]]
    return {"state": {known[number]: value for number, value in own["state"].items()}, "param_groups": groups}


def load_named_state(optimizer: torch.optim.Optimizer, state: State, names: Mapping[nn.Parameter, str]) -> None:
    """Take this rank's part of a state. Raises ModelError where it lacks a parameter, or has other groups."""
    own = optimizer.state_dict()
    known = _names(optimizer, names)
    groups = state["param_groups"]
    if len(groups) != len(own["param_groups"]):
        raise ModelError(
            f"the state has {len(groups)} parameter groups, the optimizer {len(own['param_groups'])}: make it alike"
        )
    for given, group in zip(groups, own["param_groups"], strict=True):
        missing = [known[number] for number in group["params"] if known[number] not in given["params"]]
        if missing:
            raise ModelError(f"the optimizer's state lacks {missing[0]} and {len(missing) - 1} more in its group")
    optimizer.load_state_dict(
        {
            "state": {number: state["state"][name] for number, name in known.items() if name in state["state"]},
            "param_groups": [
                {**given, "params": group["params"]} for given, group in zip(groups, own["param_groups"], strict=True)
            ],
        }
    )


def merged(parts: Sequence[State], order: Sequence[str]) -> State:
    """The states of all ranks as one, parameters in the model's order. Raises UsageError for ranks of other groups."""
    counts = {len(part["param_groups"]) for part in parts}
    if len(counts) > 1:
        raise UsageError(f"the ranks' optimizers have {sorted(counts)} parameter groups: every rank must have as many")
    place = {name: index for index, name in enumerate(order)}
    groups = []
    for same in zip(*(part["param_groups"] for part in parts), strict=True):
        found = {name for group in same for name in group["params"]}
        groups.append({**same[0], "params": sorted(found, key=place.__getitem__)})
    state = {name: value for part in parts for name, value in part["state"].items()}
    return {"state": {name: state[name] for name in order if name in state}, "param_groups": groups}


def _names(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[int, str]:
    """The number of each parameter in the optimizer's own state -> its name."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = next((parameter for parameter in held if parameter not in names), None)
    if strange is not None:
        raise UsageError(f"the optimizer holds a parameter of shape {tuple(strange.shape)} that is not this rank's")
    return {number: names[parameter] for number, parameter in enumerate(held)}
