"""How many bytes of tensors are alive, counted at the dispatcher: what an allocator tells on CUDA, for any device."""

from __future__ import annotations

import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages made while it is entered, each once, until they are freed; and those given as ``known``.

    Storages that an operator makes and frees inside itself are not seen. ``current`` and ``peak`` are in bytes.
    What is made belongs to the ``label`` of that moment, what is known to −1.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.label = -1
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        for tensor in known:
            self._note(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def reset_peak(self) -> None:
        """Forget the highest value so far."""
        self.peak = self.current

    def by_label(self) -> Counter[int]:
        """Bytes that are alive now, by the label under which they were made."""
        held: Counter[int] = Counter()
        for _, size, label in self._alive.values():
            held[label] += size
        return held

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def freed(_: weakref.ref[Any]) -> None:
            if self._alive.pop(key, None) is not None:
                self.current -= size

        self._alive[key] = (weakref.ref(storage, freed), size, self.label)
        self.current += size
        self.peak = max(self.peak, self.current)


def unique_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def resident_bytes() -> int:
    """The most memory that this process has had resident, interpreter and libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
