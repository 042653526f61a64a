"""Equal random numbers in one process and in a pipeline, for comparing both.

A forward that draws random numbers, to add noise or to leave out rows, draws them in one order in one process, and in
as many orders as there are ranks in a pipeline. While they are compared, every draw begins at the same seed: what it
gives depends on the operation and its shape alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.runtime.capture import Captured
from autopipe.runtime.capture.program import is_random

_SEED = 0


class SameDraws(TorchDispatchMode):
    """Seeds before each operation that draws; ``drawn`` says whether any did."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(_SEED)
            self.drawn = True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def same_draws(captured: Captured) -> Iterator[SameDraws]:
    """While active, equal draws give equal numbers; a model whose graph draws none is left alone."""
    mode = SameDraws()
    whole = captured.whole(0, len(captured.layers))
    if not whole and not any(is_random(node) for node in captured.program.operations()):
        yield mode
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), mode:
        yield mode
