"""Models without memory for their weights, which remember how each weight would have been made.

``without_weights(build_model)`` builds a model on the meta device and notes every operation that makes or changes a
tensor. A rank of a pipeline then makes the tensors of its own stages only, by the same operations with the random
numbers that they would have drawn: the values are bit for bit those of ``torch.manual_seed(seed); build_model()``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopipe.core.errors import ModelError
from autopipe.runtime.capture.torch_private import replaced_trunc_normal, storage_key
from autopipe.runtime.workload import SEED

M = TypeVar("M", bound=nn.Module)
_LARGE = (
    torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye,
)  # fmt: skip
"""Functions that make weights. What makes small constants stays as it is: code looks at their values."""
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
"""What reading ``tensor.is_meta`` calls."""


def without_weights(build: Callable[..., M], *args: Any, seed: int = SEED, **kwargs: Any) -> M:
    """``build(*args, **kwargs)`` under the seed, its weights without memory; see ``Plan.build``.

    Raises ModelError when building looks at a weight's value.
    """
    notes = Notes(seed)
    try:
        with notes.taken():
            model = build(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        said = " ".join(str(error).split())[:160]
        raise ModelError(f"the model cannot be built without its weights ({said}): build it as it is") from error
    _NOTES[model] = notes
    return model


def notes_of(model: nn.Module) -> Notes | None:
    """What was noted when the model was built; None for one that ``without_weights`` did not build."""
    return _NOTES.get(model)


@dataclass(frozen=True)
class _Tensor:
    """A view of noted memory: what it is a view of, and how."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Note:
    """One operation: its arguments, with noted tensors as _Tensor, the memory that it makes, reads and writes.

    ``state`` is the random generator's before it, once that is known; ``random`` says that it draws.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[_Tensor]
    reads: set[int]
    makes: set[int]
    random: bool
    state: torch.Tensor | None = None


@dataclass
class Notes:
    """The operations that made a model's tensors, in order."""

    seed: int
    _notes: list[_Note] = field(default_factory=list)
    _alive: list[torch.Tensor] = field(default_factory=list)
    _touching: dict[int, list[int]] = field(default_factory=dict)
    _state: torch.Tensor | None = None
    _drawn: int = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Note what is done meanwhile, under the seed; the caller's random state is left as it was."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            self._state = torch.get_rng_state()
            with _LargeOnMeta(), _Noting(self), replaced_trunc_normal(self._filled):
                yield

    def _filled(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note a function that looks at what it draws as one operation."""
        if not _is_noted(tensor) or kwargs.get("generator") is not None:
            filled: torch.Tensor = function(tensor, *args, **kwargs)
            return filled
        self.add(function, (tensor, *args), kwargs, tensor, [tensor], random=True)
        return tensor

    def add(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        written: Sequence[torch.Tensor],
        *,
        random: bool,
    ) -> None:
        """Note an operation that makes memory, or changes the ``written`` tensors; ``random`` says that it draws."""
        given = [_described(leaf) for leaf in tree_leaves((args, kwargs)) if _is_noted(leaf)]
        results = [_described(leaf) for leaf in tree_leaves(result) if _is_noted(leaf)]
        reads = {tensor.storage for tensor in given}
        makes = {tensor.storage for tensor in results} - reads
        if not makes and not written:
            return  # a view: it is made again from its memory
        kept, named = tree_map(_frozen, args), tree_map(_frozen, kwargs)
        note = _Note(function, kept, named, results, reads, makes, random)
        self._alive += [leaf for leaf in tree_leaves((args, kwargs, result)) if _is_noted(leaf)]
        for storage in makes | {storage_key(tensor) for tensor in written}:
            self._touching.setdefault(storage, []).append(len(self._notes))
        self._notes.append(note)

    def catch_up(self, stop: int | None = None) -> None:
        """Draw what the noted operations up to ``stop`` draw, and remember where each began."""
        assert self._state is not None
        waiting = self._notes[self._drawn : stop]
        with torch.random.fork_rng([]):
            torch.set_rng_state(self._state)
            for note in waiting:
                if note.random:
                    note.state = torch.get_rng_state()
                    args, kwargs = tree_map(_blank, (note.args, note.kwargs))
                    note.function(*args, **kwargs)
            self._state = torch.get_rng_state()
        self._drawn += len(waiting)

    def set_state(self) -> None:
        """Make the global generator what it would be by now, for an operation that is not noted."""
        self.catch_up()
        assert self._state is not None
        torch.set_rng_state(self._state)

    def drawn(self) -> None:
        """The global generator has moved on."""
        self._state = torch.get_rng_state()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory was noted."""
        return storage_key(tensor) in self._touching

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a tensor without memory would have."""
        wanted = _described(tensor)
        steps = self._steps(wanted.storage)
        if any(self._notes[n].random for n in steps):
            self.catch_up(steps[-1] + 1)
        memory: dict[int, torch.Tensor] = {}
        with torch.random.fork_rng([]), torch.no_grad():
            for n in steps:
                _again(self._notes[n], memory)
        found = _view(wanted, memory)
        whole = found.untyped_storage().nbytes() == found.numel() * found.element_size()
        return found if whole and found.is_contiguous() else found.clone()

    def _steps(self, storage: int) -> list[int]:
        """The operations that make a piece of memory what it is, in order."""
        needed: set[int] = set()
        waiting = [(storage, len(self._notes))]
        while waiting:
            wanted, before = waiting.pop()
            for n in self._touching.get(wanted, ()):
                if n < before and n not in needed:
                    needed.add(n)
                    waiting += [(read, n) for read in self._notes[n].reads]
        return sorted(needed)


class _LargeOnMeta(TorchFunctionMode):
    """Makes on the meta device what is made on the default one by a function for large tensors.

    Whoever asks whether a tensor is there is told yes: torch.nn.init would leave it alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False
        kwargs = dict(kwargs or {})
        if func in _LARGE and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _Noting(TorchDispatchMode):
    """Hands every operation on tensors without memory to the notes."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = any(_is_noted(leaf) for leaf in tree_leaves((args, kwargs))) or _on_meta(kwargs)
        if not noted:
            if not _draws(func, kwargs):
                return func(*args, **kwargs)
            self._notes.set_state()
            result = func(*args, **kwargs)
            self._notes.drawn()
            return result
        written = _written(func, args, kwargs)
        _check(func, written, kwargs)
        result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        self._notes.add(func, args, kwargs, result, written, random=_draws(func, kwargs))
        return result


_NOTES: weakref.WeakKeyDictionary[nn.Module, Notes] = weakref.WeakKeyDictionary()


def _is_noted(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def _on_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _described(tensor: torch.Tensor) -> _Tensor:
    return _Tensor(
        storage_key(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
    )


def _frozen(leaf: Any) -> Any:
    """An argument as it is noted: a copy of a tensor with values, which may change later."""
    if _is_noted(leaf):
        return _described(leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _to_meta(leaf: Any) -> Any:
    """A tensor with values among others without; a single number may stay, as in any operation."""
    if isinstance(leaf, torch.Tensor) and not _is_noted(leaf) and leaf.dim():
        return leaf.to("meta")
    return leaf


def _blank(leaf: Any) -> Any:
    """Memory of the same form: how many random numbers are drawn does not depend on its content."""
    if isinstance(leaf, _Tensor):
        return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype).zero_()
    return leaf


def _view(tensor: _Tensor, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    base = memory[tensor.storage]
    flat = torch.empty(0, dtype=tensor.dtype).set_(base.untyped_storage())
    return flat.as_strided(tensor.size, tensor.stride, tensor.offset)


def _again(note: _Note, memory: dict[int, torch.Tensor]) -> None:
    """Run a noted operation on memory with values."""
    if note.state is not None:
        torch.set_rng_state(note.state)
    args, kwargs = tree_map(
        lambda leaf: _view(leaf, memory) if isinstance(leaf, _Tensor) else leaf, (note.args, note.kwargs)
    )
    made = [leaf for leaf in tree_leaves(note.function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor, described in zip(made, note.results, strict=True):
        if described.storage in note.makes:
            memory.setdefault(described.storage, tensor)


def _draws(function: Any, kwargs: dict[str, Any]) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()) and kwargs.get("generator") is None


def _written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    changed = [
        given.get(argument.name)
        for argument in function._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


def _check(function: Any, written: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError for what could not be done again later."""
    if any(not _is_noted(tensor) for tensor in written):
        raise RuntimeError(f"{function} writes a weight's value into a tensor that has memory")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{function} draws from a generator of its own")
