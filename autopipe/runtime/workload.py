"""Where a model comes from, and its first contact: every mistake in it is told here, in one line.

A model file defines

    build_model() -> nn.Module
    example_batch(batch_size) -> (inputs, target)     # inputs: tuple (positional) or dict (keyword)
    loss_fn(output, target) -> scalar                 # target None where the model computes its own loss

Dimension 0 of every tensor is the batch; other leaves are passed whole. All three are called under one fixed seed.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autopipe.core.errors import AutopipeError, FileError, ModelError

SEED = 0
Inputs = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """A model with a way to make batches and its loss."""

    name: str
    model: nn.Module
    example_batch: Callable[[int], tuple[Inputs, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor]

    def batch(self, size: int) -> tuple[Inputs, Any]:
        """A checked batch, the same on every rank. Raises ModelError when a tensor's dimension 0 is not ``size``."""
        with user_code(self.name, f"example_batch({size})"):
            torch.manual_seed(SEED)
            made = self.example_batch(size)
        return check_batch(made, size, self.name)

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """The checked loss of one output. Raises ModelError when it is not a scalar tensor."""
        with user_code(self.name, "loss_fn"):
            value = self.loss_fn(output, target)
        return check_loss(value, self.name)


@dataclass(frozen=True)
class ModelFile:
    """A model file on disk and the name of its builder."""

    path: str
    builder: str = "build_model"

    @classmethod
    def parse(cls, text: str) -> ModelFile:
        """``model.py`` or ``model.py:NAME``."""
        path, colon, name = text.rpartition(":")
        return cls(path, name) if colon and name.isidentifier() else cls(text)

    @property
    def name(self) -> str:
        """How messages call it."""
        return Path(self.path).name

    @property
    def digest(self) -> str:
        """SHA-256 of the file. Raises FileError where it cannot be read."""
        try:
            return hashlib.sha256(Path(self.path).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise FileError(f"model file {self.path} does not exist") from None
        except OSError as error:
            raise FileError(f"model file {self.path} cannot be read: {error.strerror}") from None

    def open(self) -> Workload:
        """Import the file and build the model. Raises ModelError that names the line where it fails."""
        module = self._imported()
        build, example, loss = (self._function(module, name) for name in (self.builder, "example_batch", "loss_fn"))
        with user_code(self.name, self.builder):
            torch.manual_seed(SEED)
            model = build()
        return Workload(self.name, check_model(model, self.name, f"{self.builder}()"), example, loss)

    def _imported(self) -> ModuleType:
        _ = self.digest  # a file that cannot be read is told as such
        spec = importlib.util.spec_from_file_location("_autopipe_model_file", self.path)
        if spec is None or spec.loader is None:
            raise ModelError(f"model file {self.path} is not a Python file: its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        folder = str(Path(self.path).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        with user_code(self.name, "import"):
            spec.loader.exec_module(module)
        return module

    def _function(self, module: ModuleType, name: str) -> Callable[..., Any]:
        function = getattr(module, name, None)
        if not callable(function):
            raise ModelError(
                f"{self.path} does not define {name}(): a model file needs {self.builder}(), "
                f"example_batch(batch_size) and loss_fn(output, target)"
            )
        found: Callable[..., Any] = function
        return found


@dataclass(frozen=True)
class InMemory:
    """A model handed over as an object, with one batch and a loss."""

    model: nn.Module
    inputs: Inputs
    target: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    name: str = ""

    def open(self) -> Workload:
        """The workload, on a copy of the model; batches of other sizes repeat or cut the given one."""
        name = self.name or type(self.model).__name__
        try:
            model = check_model(copy.deepcopy(self.model), name, "the model")
        except RuntimeError as error:
            said = " ".join(str(error).split())[:120]
            raise ModelError(
                f"{name} cannot be copied ({said}): give it as a model file, which is built anew"
            ) from error
        size = batch_size(self.inputs)

        def example(wanted: int) -> tuple[Inputs, Any]:
            rows = torch.arange(wanted) % size
            resized: tuple[Inputs, Any] = tree_map(
                lambda leaf: leaf[rows] if isinstance(leaf, torch.Tensor) else leaf, (self.inputs, self.target)
            )
            return resized

        return Workload(name, model, example, self.loss_fn)


Source = ModelFile | InMemory


def check_loss(value: Any, name: str) -> torch.Tensor:
    """A loss as a scalar, or ModelError when it is not one floating-point number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        return value.reshape(())
    what = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise ModelError(f"{name}: loss_fn must return one floating-point number as a tensor, not {what}")


def batch_size(inputs: Inputs) -> int:
    """Dimension 0 of the inputs' first tensor. Raises ModelError when there is none."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ModelError("the inputs hold no tensor with a batch dimension")


def check_model(model: Any, name: str, what: str) -> nn.Module:
    """The model, or ModelError when it is none or has nothing to train."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}: {what} is a {type(model).__name__}, an nn.Module is needed")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{name}: {what} has no parameter that requires a gradient: there is nothing to train")
    return model


def check_batch(made: Any, size: int, name: str) -> tuple[Inputs, Any]:
    """``(inputs, target)`` with ``size`` rows in every tensor, or ModelError that names the one that has not."""
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], tuple | Mapping):
        raise ModelError(
            f"{name}: example_batch({size}) must return (inputs, target) with inputs a tuple or a dict, "
            f"not {_kind(made)}"
        )
    for what, part in (("inputs", made[0]), ("target", made[1])):
        for index, leaf in enumerate(tree_leaves(part)):
            if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != size):
                raise ModelError(
                    f"{name}: example_batch({size}) gives {what} tensor {index} of shape {tuple(leaf.shape)}: "
                    f"dimension 0 must be the batch size {size}"
                )
    return made


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return type(value).__name__


@contextlib.contextmanager
def user_code(name: str, what: str) -> Iterator[None]:
    """Run a user's function: its prints go to stderr, its errors become one line with its own line number."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except AutopipeError:
        raise
    except SyntaxError as error:
        raise ModelError(f"{name}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == name]
        line = f", line {frames[-1].lineno}" if frames else ""
        lines = str(error).strip().splitlines()
        said = f": {lines[0]}" if lines else ""
        raise ModelError(f"{name}{line}, in {what}: {type(error).__name__}{said}") from error


def rows(value: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of every tensor in a nested value; other leaves whole."""
    return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, value)


def to_device(value: Any, device: torch.device) -> Any:
    """Every tensor in a nested value on the device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for positional or keyword inputs."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
