"""Plain attributes of modules: what a forward may leave there for the next one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_OWN = frozenset(vars(nn.Module()))
"""What every module has."""

Attributes = dict[str, dict[str, Any]]
"""By path, the attributes of a module by name; of a collection a copy."""


def attributes(model: nn.Module) -> Attributes:
    """The plain attributes of a module and all modules inside."""
    return {
        path: {
            name: copy.copy(value) if isinstance(value, list | dict | set) else value
            for name, value in vars(module).items()
            if name not in _OWN
        }
        for path, module in model.named_modules()
    }


def changed(before: Attributes, after: Attributes) -> dict[str, str]:
    """Of each module that has one, an attribute that is another object now, or holds others; by path."""
    found = {}
    for path, known in after.items():
        for name, value in known.items():
            if name not in before[path] or _ids(value) != _ids(before[path][name]):
                found[path] = name
    return found


def numbers(model: nn.Module) -> dict[str, Any]:
    """Numbers, texts and lengths of collections in the model's modules: what a forward may change beside tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            key = f"{path}.{name}".lstrip(".")
            if isinstance(value, bool | int | float | str):
                found[key] = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                found[key] = len(value)
    return found


def _ids(value: Any) -> list[int]:
    """The objects that an attribute is or holds."""
    if isinstance(value, dict):
        return [id(each) for each in (*value, *value.values())]
    return [id(each) for each in value] if isinstance(value, list | set) else [id(value)]
