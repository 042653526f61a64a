"""A Profile: what each layer of a model costs, and what crosses a cut between layers.

Layers are in execution order and numbered from 0. Cut ``c`` lies before layer ``c``; a stage is the half-open
range of layers between two cuts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from autopipe.core.errors import UsageError
from autopipe.core.reduction import MEAN, Reduction

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes an element, by torch's name of the dtype without the ``torch.``."""

NOISY = 0.05
"""Above this spread of the model's time a profile, and every plan from it, says that the machine was busy."""

OPTIMIZER_STATE = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""State tensors of a parameter's size that an optimizer keeps for each parameter."""


@dataclass(frozen=True)
class Layer:
    """A piece of the model that is never cut: a block, or a leaf module outside the blocks.

    ``name`` is its module path, ``modules`` all module paths that run in it. ``parameter_bytes`` counts every
    parameter that the layer reads, tied ones too (see Tie); ``trainable_bytes`` those that get a gradient.
    ``structure`` is equal for layers with equal operations, shapes and dtypes.
    """

    name: str
    parameter_bytes: int
    parameters: int
    modules: tuple[str, ...] = ()
    trainable_bytes: int | None = None
    buffer_bytes: int = 0
    can_split_backward: bool = True
    cut_after: bool = True
    structure: str = ""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of its parameters."""
        return self.parameter_bytes if self.trainable_bytes is None else self.trainable_bytes


@dataclass(frozen=True)
class Edge:
    """A value that one layer makes and others read: what crosses every cut between them.

    ``producer`` is a layer's number, or None for an input of the model (which is not sent: every rank has it).
    A dimension is a number, or ``b`` or ``128*b`` where it is a multiple of the micro-batch size.
    """

    name: str
    producer: int | None
    consumers: tuple[int, ...]
    shape: tuple[int | str, ...]
    dtype: str
    needs_gradient: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise UsageError(f"edge {self.name!r}: dtype {self.dtype!r} is not known: use one of {known}")
        self.sizes(1)

    def sizes(self, micro_batch: int) -> tuple[int, ...]:
        """The shape at a micro-batch size."""
        return tuple(_size(dim, micro_batch) for dim in self.shape)

    def bytes(self, micro_batch: int) -> int:
        """Bytes of the dense tensor at a micro-batch size."""
        return math.prod(self.sizes(micro_batch)) * DTYPE_BYTES[self.dtype]


def _size(dim: int | str, micro_batch: int) -> int:
    if isinstance(dim, int) and dim >= 0:
        return dim
    factor, star, symbol = str(dim).rpartition("*")
    if symbol != "b" or (star and not factor.isdecimal()):
        raise UsageError(f"{dim!r} is not a dimension: write a number, b, or a multiple such as 128*b")
    return (int(factor) if star else 1) * micro_batch


@dataclass(frozen=True)
class Tie:
    """A parameter that several layers read: kept once on a rank, its gradients summed over ranks if it is trained."""

    name: str
    layers: tuple[int, ...]
    bytes: int
    trained: bool = True

    def read_in(self, start: int, stop: int) -> int:
        """How many of the layers ``start`` to ``stop`` (excluded) read it."""
        return sum(start <= layer < stop for layer in self.layers)


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs for one micro-batch, as it runs in a pipeline.

    Seconds are medians. ``backward_s`` is the whole backward; ``input_grad_s`` and ``weight_grad_s`` are its two
    halves when the weight gradients are deferred. Held bytes are those that the layer is the first to save for
    its backward, parameters, buffers and model inputs left out. ``workspace_bytes`` is what it needs beyond
    them while it runs. ``spread`` is (q75 − q25) / median of forward + backward.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float
    held_after_forward_bytes: int
    held_after_input_grad_bytes: int
    output_bytes: int
    workspace_bytes: int = 0
    optimizer_s: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Jitter:
    """How unevenly equal work took time while every rank was busy.

    ``parts`` are evenly spaced quantiles of what pieces of about ``piece_s`` seconds took, as parts of their medians.
    """

    piece_s: float
    parts: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.piece_s > 0 or not self.parts or min(self.parts) <= 0:
            raise UsageError(f"jitter: pieces of {self.piece_s} s and parts {self.parts}: all must be positive")


@dataclass(frozen=True)
class CostTable:
    """The costs of all layers at one micro-batch size; ``interpolated`` seconds lie between two that were measured."""

    micro_batch: int
    layers: tuple[LayerCost, ...]
    interpolated: bool = False


@dataclass(frozen=True)
class Profile:
    """A model's layers, the values between them, and their costs on one kind of device.

    ``processes`` is how many ranks were busy while it was measured, ``threads`` how many threads each had.
    ``overhead_s`` is what one action of the runtime costs beyond its layers. ``noise`` is the spread of a whole
    forward and backward over the measurement's rounds. ``notes`` are lines for the user on how the model was captured
    and on what micro-batches change in it. ``reduction`` is how its loss adds up over micro-batches. ``structure`` is
    the digest of what was measured: the operations, shapes and dtypes of the model. ``origin`` is ``measured``,
    ``imported`` or ``analytic``, with its ``sources``; a step that is measured is expected within the part ``band`` of
    one that analytic costs predict. ``out_of_memory`` are micro-batch sizes for which the device had too little memory.
    ``jitter`` is how much the seconds of equal work varied, None where that was not measured.
    """

    model: str
    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    costs: tuple[CostTable, ...]
    device: str
    dtype: str
    ties: tuple[Tie, ...] = ()
    optimizer: str = "adamw"
    threads: int = 1
    processes: int = 1
    overhead_s: float = 0.0
    noise: float = 0.0
    origin: str = "measured"
    structure: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reduction: Reduction = MEAN
    sources: tuple[str, ...] = ()
    band: float = 0.0
    out_of_memory: tuple[int, ...] = ()
    jitter: Jitter | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"profile of {self.model!r} has no layers")
        for table in self.costs:
            if len(table.layers) != len(self.layers):
                raise UsageError(
                    f"profile of {self.model!r}: {len(self.layers)} layers, but costs for {len(table.layers)} "
                    f"at micro-batch {table.micro_batch}"
                )
        for number in {n for tie in self.ties for n in tie.layers} | {
            n for edge in self.edges for n in (*edge.consumers, edge.producer or 0)
        }:
            if not 0 <= number < len(self.layers):
                raise UsageError(f"profile of {self.model!r}: layer {number} named, there are {len(self.layers)}")
        if self.optimizer not in OPTIMIZER_STATE:
            known = ", ".join(OPTIMIZER_STATE)
            raise UsageError(f"optimizer {self.optimizer!r} is not known: use one of {known}")

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The micro-batch sizes that were measured, ascending."""
        return tuple(sorted(table.micro_batch for table in self.costs))

    @property
    def trained_ties(self) -> tuple[Tie, ...]:
        """The ties that have gradients."""
        return tuple(tie for tie in self.ties if tie.trained)

    def at(self, micro_batch: int) -> tuple[LayerCost, ...]:
        """The layers' costs at a micro-batch size. Raises UsageError when it was not measured."""
        for table in self.costs:
            if table.micro_batch == micro_batch:
                return table.layers
        known = ", ".join(map(str, self.micro_batches))
        if micro_batch in self.out_of_memory:
            raise UsageError(
                f"micro-batch {micro_batch} ran out of memory on {self.device} when it was profiled: use one of {known}"
            )
        raise UsageError(f"micro-batch {micro_batch} was not profiled, only {known}: profile it with --micro-batch")

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        per_byte = {i: layer.parameters / max(layer.parameter_bytes, 1) for i, layer in enumerate(self.layers)}
        doubled = sum(tie.bytes * (len(tie.layers) - 1) * per_byte[tie.layers[0]] for tie in self.ties)
        return round(sum(layer.parameters for layer in self.layers) - doubled)

    def crossing(self, cut: int) -> tuple[Edge, ...]:
        """The edges that a cut before layer ``cut`` sends on, relayed ones included."""
        return self._crossings[cut]

    def inputs(self, layer: int) -> tuple[Edge, ...]:
        """The edges that a layer reads from earlier layers."""
        return self._inputs[layer]

    @cached_property
    def _inputs(self) -> tuple[tuple[Edge, ...], ...]:
        reads: list[list[Edge]] = [[] for _ in self.layers]
        for edge in self.edges:
            for layer in sorted(set(edge.consumers)):
                if edge.producer is not None and edge.producer < layer:
                    reads[layer].append(edge)
        return tuple(map(tuple, reads))

    @cached_property
    def _crossings(self) -> tuple[tuple[Edge, ...], ...]:
        """For each cut from 0 to the number of layers what crosses it."""
        crossing: list[list[Edge]] = [[] for _ in range(len(self.layers) + 1)]
        for edge in self.edges:
            if edge.producer is not None:
                for cut in range(edge.producer + 1, max(edge.consumers, default=-1) + 1):
                    crossing[cut].append(edge)
        return tuple(map(tuple, crossing))

    def legal_cuts(self) -> tuple[int, ...]:
        """Where a stage may begin, layer 0 left out."""
        return self._legal_cuts

    @cached_property
    def _legal_cuts(self) -> tuple[int, ...]:
        return tuple(i + 1 for i, layer in enumerate(self.layers[:-1]) if layer.cut_after)

    @property
    def digest(self) -> str:
        """SHA-256 of the profile's content."""
        return content_digest(asdict(self))


def content_digest(content: object) -> str:
    """SHA-256 of plain data, independent of the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
