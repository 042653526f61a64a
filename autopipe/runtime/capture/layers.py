"""Group operations into layers: a block of the model, or a module with parameters outside the blocks."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from autopipe.runtime.capture.program import path_of

_NUMBERED = re.compile(r"(?:^|\.)\d+(?:@\d+)?$")
_AGAIN = re.compile(r"@\d+")


@dataclass
class Group:
    """The operations of one layer, in order."""

    name: str
    operations: list[fx.Node] = field(default_factory=list)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of all modules that run in it, in order."""
        paths = [_AGAIN.sub("", path) for node in self.operations for path in path_of(node)]
        return tuple(dict.fromkeys(path for path in paths if path))


def group(model: nn.Module, operations: Sequence[fx.Node]) -> list[Group]:
    """The layers of operations that are in execution order, by the modules that they ran in.

    A layer is the outermost numbered module (``h.3``), or else the innermost module; what has no parameters joins
    the layer before it.
    """
    whole = _blocks(model, operations)
    groups: list[Group] = []
    before: list[fx.Node] = []
    home: dict[fx.Node, Group] = {}
    for node in operations:
        if node.target is operator.getitem and node.args[0] in home:
            home[node] = home[node.args[0]]  # type: ignore[index]
            home[node].operations.append(node)  # a tuple cannot cross a cut, its parts can
            continue
        key = _key(model, node, whole)
        if key is None and not groups:
            before.append(node)
            continue
        if key is not None and (not groups or groups[-1].name != key):
            groups.append(Group(key, before))
            before = []
        groups[-1].operations.append(node)
        home[node] = groups[-1]
    if before:
        groups.append(Group("model", before))
    return _named_apart(groups)


def _key(model: nn.Module, node: fx.Node, whole: Collection[str]) -> str | None:
    paths = [path for path in path_of(node) if path and _module(model, path) is not None]
    block = next((path for path in paths if _AGAIN.sub("", path) in whole), None)
    key = block or (paths[-1] if paths else None)
    module = _module(model, key) if key else None
    if module is None or not any(True for _ in module.parameters()):
        return None
    return key if block or _is_unit(module) else None


def _is_unit(module: nn.Module) -> bool:
    """Whether an operation of the module's own forward makes it a layer: no list of blocks lies inside."""
    return not any(isinstance(child, nn.ModuleList | nn.Sequential) for child in module.modules())


def _blocks(model: nn.Module, operations: Sequence[fx.Node]) -> set[str]:
    """The paths of numbered modules that are layers: not mere containers of others, nor most of the model."""
    counts = Counter(p for node in operations for p in {_AGAIN.sub("", path) for path in path_of(node)})
    numbered = [path for path in counts if _NUMBERED.search(path)]
    return {path for path in numbered if not _is_container(model, path, numbered, counts, len(operations))}


def _is_container(model: nn.Module, path: str, numbered: Sequence[str], counts: Counter[str], total: int) -> bool:
    if not any(other.startswith(f"{path}.") for other in numbered):
        return False
    return isinstance(_module(model, path), nn.ModuleList | nn.Sequential) or 2 * counts[path] > total


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(_AGAIN.sub("", path))
    except AttributeError:
        return None


def _named_apart(groups: list[Group]) -> list[Group]:
    """A module that runs twice gives two layers: ``encoder`` and ``encoder@1``."""
    seen: Counter[str] = Counter()
    for layer in groups:
        name = _AGAIN.sub("", layer.name)
        layer.name = f"{name}@{seen[name]}" if seen[name] else name
        seen[name] += 1
    return groups
