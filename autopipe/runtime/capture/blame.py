"""Which module, and which line, an export stumbled over; which modules may hide something from it."""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from autopipe.core.errors import AutopipeError, ModelError
from autopipe.runtime.capture.attributes import attributes, changed
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.restoring import undisturbed
from autopipe.runtime.capture.torch_private import has_backward_hooks, is_custom_function, tree_leaves

_CALL_MACHINERY = str(Path(nn.Module.__call__.__code__.co_filename))
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Place:
    """A line of a module's code. ``path`` is the module's, empty for the model itself."""

    path: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blame(model: nn.Module, error: BaseException) -> Place | None:
    """The deepest frame of an error's traceback that runs a method of one of the model's modules.

    The line is that of the deepest such frame outside torch, where there is one.
    """
    names = {id(module): path for path, module in model.named_modules()}
    found = list(_places(error, names))
    if not found:
        return None
    own = [place for place in found if not (place.file.startswith(_TORCH) or _is_pythons(place.file))]
    line = (own or found)[-1]
    return Place(found[-1].path, line.file, line.line)


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's own library, which packages may lie inside of."""
    return file.startswith(_PYTHON) and "site-packages" not in file


def source_of(model: nn.Module) -> str:
    """The file and line of a model's own forward, or its class where that has no file."""
    forward = type(model).forward
    code = getattr(forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(model).__name__


def user_source(model: nn.Module, path: str = "") -> str:
    """The same of the innermost module around a path that is not of torch's own class; if none is, of the first."""
    while path and _is_torchs(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    around = model.get_submodule(path)
    return source_of(next((module for module in around.modules() if not _is_torchs(module)), around))


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _places(error: BaseException | None, names: dict[int, str]) -> Iterator[Place]:
    while error is not None:
        step: TracebackType | None = error.__traceback__
        met = False
        while step is not None:
            path = names.get(id(_first_local(step.tb_frame)))
            file = step.tb_frame.f_code.co_filename
            if path is not None and file != _CALL_MACHINERY and not file.startswith(_HERE):
                met = True
                yield Place(path, file, step.tb_lineno)
            step = step.tb_next
        if met:
            return
        error = error.__cause__ or error.__context__


def _first_local(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def parent_of(model: nn.Module, path: str) -> str:
    """The path of the nearest module around this one that has a forward of its own; empty for the model."""
    while path:
        path = path.rpartition(".")[0]
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            return path
    return ""


def alike(model: nn.Module, path: str) -> list[str]:
    """The paths of all modules of the same class, when it is the user's: they will stumble over the same line."""
    kind = type(model.get_submodule(path))
    if _is_torchs(model.get_submodule(path)):
        return [path]
    return [other for other, module in model.named_modules() if type(module) is kind and other]


def all_units(model: nn.Module, prefix: str = "") -> list[str]:
    """The paths of the outermost modules that are no mere lists of modules."""
    found = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        containers = nn.ModuleList | nn.ModuleDict | nn.Sequential
        found += all_units(child, f"{path}.") if isinstance(child, containers) else [path]
    return found


@contextlib.contextmanager
def user_errors(model: nn.Module) -> Iterator[None]:
    """What the model or its loss raises in eager mode, as one line with its place."""
    try:
        yield
    except AutopipeError:
        raise
    except Exception as error:
        place = blame(model, error)
        where = f"{place}: " if place is not None else ""
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{where}{type(model).__name__} fails on the example: {type(error).__name__}: {said}"
        ) from error


def suspects(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], *, later: bool = False
) -> dict[str, str]:
    """The deepest modules with something that torch.export drops silently, and what it is.

    ``later``: those that leave something for their next forward in a plain attribute, too.
    """
    found = {path: "a backward hook" for path, module in model.named_modules() if path and has_backward_hooks(module)}
    calls: list[tuple[str, Any, Any]] = []
    handles = [
        module.register_forward_hook(_noting(path, calls), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    before = attributes(model)
    try:
        with undisturbed(model, tensors) as given, _noting_tensor_hooks(model, found):
            args, kwargs = signature.call_form(given)
            model(*args, **kwargs)
            if later:
                left = changed(before, attributes(model)).items()
                found |= {path: f"the attribute {name}" for path, name in left if path}
            for path, taken, output in calls:
                what = _hidden(taken, output)
                if what:
                    found.setdefault(path, what)
    finally:
        for handle in handles:
            handle.remove()
    inside = {path: what for path, what in found.items() if path}
    return {path: what for path, what in inside.items() if not any(other.startswith(f"{path}.") for other in inside)}


def own_doing(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]) -> str:
    """What the model's own forward does that torch.export drops silently; empty where that is not known.

    It is found in a run, as what modules inside do that are kept whole already.
    """
    found: dict[str, str] = {}
    before = attributes(model)
    with undisturbed(model, tensors) as given, _noting_tensor_hooks(model, found):
        versions = [tensor._version for tensor in given]
        args, kwargs = signature.call_form(given)
        output = model(*args, **kwargs)
        for leaf, tensor, version in zip(signature.tensors, given, versions, strict=True):
            if tensor._version != version:
                return f"it changes its input {leaf.name} in place"
        if function := _hidden((args, kwargs), output):
            return f"it uses {function}"
        if "" in found:
            return f"it uses {found['']}"
        left = changed(before, attributes(model)).get("", "")
    return f"it leaves {left} for its next forward" if left else ""


@contextlib.contextmanager
def _noting_tensor_hooks(model: nn.Module, found: dict[str, str]) -> Iterator[None]:
    """Note in whose forward a hook is put on a tensor; autograd does not show such hooks."""
    original, names = torch.Tensor.register_hook, {id(module): path for path, module in model.named_modules()}

    def noting(tensor: torch.Tensor, hook: Any) -> Any:
        frame = inspect.currentframe()
        while frame is not None and names.get(id(_first_local(frame))) is None:
            frame = frame.f_back
        if frame is not None:
            found.setdefault(names[id(_first_local(frame))], "a tensor hook")
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


def _noting(path: str, calls: list[tuple[str, Any, Any]]) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((path, (args, kwargs), output))

    return note


def _hidden(given: Any, output: Any) -> str:
    """What lies between a module's inputs and outputs in the autograd graph that an export cannot see."""
    seen = {tensor.grad_fn for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor)}
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_custom_function(node):
            return f"the autograd function {type(node).__name__.removesuffix('Backward')}"
        waiting += [following for following, _ in node.next_functions]
    return ""
